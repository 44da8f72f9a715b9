"""From another connector's configuration to ours: which option becomes what, and what is left over.

Settings that belong to the agent here become flags of ``kvagent serve``; all others are translated
as the connector itself does it (kvagent.vllm.peer_options).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvagent.migrate.connectors import (
    ASCEND,
    CONNECTORS,
    LMCACHE_OF_VLLM,
    OFFLOADING,
    OURS,
    PROMPTS_ONLY,
    STORES,
    TRANSFERS,
    ConfigError,
    beside_others,
    connectors_of,
    dropped,
    role_of,
)
from kvagent.migrate.serve import GIB, Serve, Untranslatable, disk_tier, mooncake_tier, remote_tier, size_of
from kvagent.vllm.options import OptionError, checked, parse, translation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvagent.migrate.sources import Sources


@dataclass(slots=True)
class Result:
    """What a configuration became."""

    transfer: dict[str, Any]
    """Our ``kv_transfer_config``."""
    serve: Serve
    became: dict[str, str] = field(default_factory=dict)
    """What each option became."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why each of the others has no counterpart."""
    notes: list[str] = field(default_factory=list)


class Chosen(NamedTuple):
    """The value of one of our options, and the given options that set it."""

    value: Any
    origins: list[str]


def convert(sources: Sources, ranks: int = 1) -> Result:
    """Return our configuration. ``ranks`` is how many ranks of engines the node has. Raise
    ConfigError.
    """
    transfer = sources.transfer or _implied(sources)
    connectors = connectors_of(transfer)
    result = Result({"kv_connector": OURS, "kv_role": role_of(transfer, connectors)}, Serve())
    result.transfer["kv_load_failure_policy"] = "recompute"
    if transfer.get("kv_load_failure_policy") != "recompute":
        result.notes.append("kv_load_failure_policy is recompute: vLLM's default fails requests whose blocks are lost")
    result.became |= dropped(transfer, connectors)
    options: dict[str, Chosen] = {}
    for one in connectors:
        if one["kv_connector"] in CONNECTORS:
            _convert_one(one, sources, ranks, options, result)
    if values := _agreed(options, result):
        result.transfer["kv_connector_extra_config"] = values
    result.transfer, others = beside_others(result.transfer, connectors)
    if transfer.get("engine_id"):
        result.transfer["engine_id"] = transfer["engine_id"]
    if others:
        result.notes.append(f"left as they are: {', '.join(others)}")
    if sources.lmcache is not None and all(one["kv_connector"] != LMCACHE_OF_VLLM for one in connectors):
        raise ConfigError(f"a configuration of LMCache was given, but no {LMCACHE_OF_VLLM}")
    if not result.serve.pool:
        result.notes.append("nothing says how much memory: give kvagent serve --pool SIZE, its default is 1GiB")
    return result


def _implied(sources: Sources) -> dict[str, Any]:
    if sources.lmcache is not None:
        return {"kv_connector": LMCACHE_OF_VLLM, "kv_role": "kv_both"}
    if sources.mooncake is not None:
        return {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    raise ConfigError("nothing to migrate: give a kv_transfer_config, or a configuration of LMCache")


def _convert_one(
    one: Mapping[str, Any], sources: Sources, ranks: int, options: dict[str, Chosen], result: Result
) -> None:
    """Convert one connector: the agent's settings, then the options."""
    name, given = str(one["kv_connector"]), one.get("kv_connector_extra_config") or {}
    if not isinstance(given, dict):
        raise ConfigError("kv_connector_extra_config: allowed is a mapping")
    left = dict(given)
    role = result.transfer["kv_role"]
    if name == LMCACHE_OF_VLLM:
        left = {f"lmcache.{key}": value for key, value in (sources.lmcache or {}).items()} | left
    for key in [key for key, value in left.items() if value is None]:
        result.became[key] = "needs nothing: it is not set"
        del left[key]
    if name == LMCACHE_OF_VLLM:
        _lmcache_settings(left, ranks, result)
    elif name in STORES:
        _store_settings(name, left, sources, ranks, result)
    elif name in OFFLOADING:
        _offloading_settings(left, ranks, result)
    elif name in TRANSFERS:
        result.notes.append("engines on different nodes: --peer-listen and --peer-key-file for the agents, docs/PD.md")
    _translate(left, role, options, result)
    _note_defaults(name, role, given, left, result)


def _translate(left: Mapping[str, Any], role: str, options: dict[str, Chosen], result: Result) -> None:
    """Translate options as the connector does, and check the range of each."""
    translated = translation({key: _typed(key, value) for key, value in left.items()}, role)
    unknown = dict.fromkeys(translated.unknown, "has no counterpart: it is not known here")
    result.missing |= translated.refused | unknown
    result.became |= translated.accepted
    for key, value in translated.options.items():
        origin = translated.origins.get(key, key)
        try:
            checked(key, value)
        except OptionError as error:
            result.became.pop(origin, None)
            result.missing[origin] = str(error)
            continue
        present = options.setdefault(key, Chosen(value, []))
        if present.value != value:
            raise ConfigError(f"{origin}: {key} would be both {present.value!r} and {value!r}")
        present.origins.append(origin)


def _agreed(options: dict[str, Chosen], result: Result) -> dict[str, Any]:
    """Return the options without those that the connector refuses beside the others."""
    while True:
        values = {key: one.value for key, one in options.items()}
        try:
            parse(values)
        except OptionError as error:
            refused = next((key for key in error.options if key in options), None)
            if refused is None:
                raise ConfigError(str(error)) from None
            for origin in options.pop(refused).origins:
                result.became.pop(origin, None)
                result.missing[origin] = str(error)
        else:
            return values


def _typed(key: str, value: Any) -> Any:
    """Return an option of LMCache with its type: variables are strings."""
    if not (key.startswith("lmcache.") and isinstance(value, str)):
        return value
    return int(value) if value.isdecimal() else value


def _setting(left: dict[str, Any], result: Result, names: tuple[str, ...], apply: Callable[[], str]) -> None:
    """Turn options into a flag of the agent, and remove them from those that are left."""
    present = [name for name in names if name in left]
    if not present:
        return
    try:
        said, into = apply(), result.became
    except Untranslatable as error:
        said, into = f"has no counterpart: {error}", result.missing
    for name in present:
        del left[name]
        into[name] = said


def _lmcache_settings(left: dict[str, Any], ranks: int, result: Result) -> None:
    serve, prefix = result.serve, "lmcache."
    memory, policy = f"{prefix}max_local_cpu_size", f"{prefix}cache_policy"
    disk, size, remote = f"{prefix}local_disk", f"{prefix}max_local_disk_size", f"{prefix}remote_url"
    _setting(left, result, (memory,), lambda: serve.add_pool(size_of(left[memory], GIB) * ranks))
    _setting(left, result, (disk, size), lambda: serve.add_tier(
        disk_tier(left.get(disk, ""), size_of(left.get(size, 0), GIB) * ranks)
    ))  # fmt: skip

    def add_remote() -> str:
        url, needed = remote_tier(left[remote])
        result.notes.extend([needed] if needed else [])
        return serve.add_tier(url)

    _setting(left, result, (remote,), add_remote)
    _setting(left, result, (policy,), lambda: serve.set_eviction(left[policy]))


def _store_settings(name: str, left: dict[str, Any], sources: Sources, ranks: int, result: Result) -> None:
    if str(left.get("backend", "mooncake")).lower() != "mooncake":
        return  # the table of options has the answer
    config = sources.mooncake
    if config is None:
        result.missing[f"{name}'s store"] = "has no --tier yet: give the file of MOONCAKE_CONFIG_PATH too"
        left.pop("backend", None)
        return
    preferred = left.get("preferred_segment")
    left["backend"] = "mooncake"

    def add() -> str:
        url = mooncake_tier(config, ranks)
        return result.serve.add_tier(f"{url}&preferred={preferred}" if isinstance(preferred, str) else url)

    named = ("backend", "preferred_segment") if isinstance(preferred, str) else ("backend",)
    _setting(left, result, named, add)


def _offloading_settings(left: dict[str, Any], ranks: int, result: Result) -> None:
    serve = result.serve
    total, rank = "cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"
    if rank in left and total in left:  # the figure of a rank wins
        result.became[total] = f"needs nothing: {rank} is given"
        del left[total]
    _setting(left, result, (total,), lambda: serve.add_pool(size_of(left[total])))
    share = left.get(rank)
    _setting(left, result, (rank,), lambda: f"{serve.add_pool(size_of(left[rank]) * ranks)}, and {rank}")
    if rank in result.became and share is not None:  # also an option of ours, by which engines leave others their part
        left[rank] = size_of(share)
        result.notes.append(f"{rank}: leave it out where the node has one engine, which --pool limits already")
    if left.get("kv_offload_backend") == "disk":
        names = ("kv_offload_backend", "disk_path", "disk_capacity_bytes")
        _setting(left, result, names, lambda: serve.add_tier(
            disk_tier(left.get("disk_path", ""), size_of(left.get("disk_capacity_bytes", 100 * GIB)) * ranks)
        ))  # fmt: skip
    _setting(left, result, ("eviction_policy",), lambda: serve.set_eviction(left["eviction_policy"]))


def _note_defaults(name: str, role: str, given: Mapping[str, Any], left: Mapping[str, Any], result: Result) -> None:
    """Say where a default differs from the other connector's."""
    prompts_only = "lmcache.save_decode_cache" if name == LMCACHE_OF_VLLM else PROMPTS_ONLY.get(name, "")
    if prompts_only and prompts_only not in left:
        result.notes.append(f"generated tokens are saved too, unlike with {name}: save_decode false saves only prompts")
    if name in ASCEND and role == "kv_consumer" and "consumer_is_to_load" not in given:
        result.notes.append(f"kv_consumer loads, unlike with {name}")
