"""Which connectors a configuration has, which of them kvagent replaces, and what stays of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvagent.vllm.options import ROLES

if TYPE_CHECKING:
    from collections.abc import Mapping

OURS = "KVAgentConnector"
MULTI = "MultiConnector"
LMCACHE_OF_VLLM = "LMCacheConnectorV1"
ASCEND = ("AscendStoreConnector", "MooncakeConnectorStoreV1")
STORES = (*ASCEND, "MooncakeStoreConnector")
OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector")
TRANSFERS = (
    "MooncakeConnector", "MooncakeConnectorV1", "MooncakeHybridConnector", "MooncakeLayerwiseConnector",
    "NixlConnector", "NixlPullConnector", "NixlPushConnector",
)  # fmt: skip
CONNECTORS = (OURS, LMCACHE_OF_VLLM, "LMCacheMPConnector", *STORES, *OFFLOADING, *TRANSFERS)
"""The connectors that kvagent replaces."""

PROMPTS_ONLY = {"OffloadingConnector": "offload_prompt_only", **dict.fromkeys(STORES, "save_decode_cache")}
"""The connectors that save only prompts by default, and the option that changes it."""

_KEPT = ("kv_connector", "kv_role", "engine_id", "kv_connector_extra_config", "kv_load_failure_policy")


class ConfigError(ValueError):
    """A configuration that cannot be translated at all."""


def connectors_of(transfer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the connectors of a configuration, those of MultiConnector one by one."""
    name = transfer.get("kv_connector")
    if name != MULTI:
        if name not in CONNECTORS:
            raise ConfigError(f"kv_connector: {name!r}, allowed are {MULTI}, {', '.join(CONNECTORS)}")
        return [dict(transfer)]
    children = (transfer.get("kv_connector_extra_config") or {}).get("connectors")
    if not isinstance(children, list) or not all(isinstance(one, dict) and "kv_connector" in one for one in children):
        raise ConfigError("connectors: allowed is a list of kv_transfer_config")
    if not any(one["kv_connector"] in CONNECTORS for one in children):
        raise ConfigError(f"connectors: none of them is {', '.join(CONNECTORS)}")
    return [dict(one) for one in children]


def role_of(transfer: Mapping[str, Any], connectors: list[dict[str, Any]]) -> str:
    """Return the ``kv_role`` of those that are replaced, or of the whole. Raise ConfigError."""
    roles = {one.get("kv_role") for one in connectors if one["kv_connector"] in CONNECTORS}
    role = roles.pop() if len(roles) == 1 else transfer.get("kv_role")
    if role not in ROLES:
        raise ConfigError(f"kv_role: {role!r}, allowed are {', '.join(ROLES)}")
    return str(role)


def dropped(transfer: Mapping[str, Any], connectors: list[dict[str, Any]]) -> dict[str, str]:
    """Return why the settings that are not options of a connector are dropped."""
    unread = "needs nothing: the connector does not read it"
    said = {name: unread for name in transfer if name not in _KEPT}
    if transfer["kv_connector"] != MULTI:
        return said
    outer = transfer["kv_connector_extra_config"]
    said |= {f"{MULTI}'s {name}": f"dropped: {MULTI} reads connectors alone" for name in outer if name != "connectors"}
    for one in connectors:
        if one["kv_connector"] in CONNECTORS:
            said |= {f"{one['kv_connector']}'s {name}": unread for name in one if name not in _KEPT}
            if "engine_id" in one:
                said[f"{one['kv_connector']}'s engine_id"] = f"dropped: vLLM refuses it; {MULTI}'s is for all"
    return said


def beside_others(ours: dict[str, Any], connectors: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Put our configuration beside the connectors that it does not replace, in the place of the
    first that it does. Return the whole configuration, and the names of those others.
    """
    others = [one for one in connectors if one["kv_connector"] not in CONNECTORS]
    if not others:
        return ours, []
    place = next(i for i, one in enumerate(connectors) if one["kv_connector"] in CONNECTORS)
    children = [*connectors[:place], ours, *(one for one in connectors[place:] if one in others)]
    outer = {key: ours[key] for key in ("kv_role", "kv_load_failure_policy")}
    whole = {"kv_connector": MULTI, **outer, "kv_connector_extra_config": {"connectors": children}}
    return whole, [str(one["kv_connector"]) for one in others]
