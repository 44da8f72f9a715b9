"""Turns the configuration of another KV connector of vLLM into kvagent's, and says what of it has
no counterpart.

A SOURCE is a file, - for standard input, or JSON: a kv_transfer_config, a configuration of LMCache
(LMCACHE_CONFIG_FILE), lines LMCACHE_NAME=VALUE, or a configuration of Mooncake's client
(MOONCAKE_CONFIG_PATH). Several are taken together.

Exit codes: 0 everything was translated; 1 something has no counterpart; 2 nothing was translated.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlsplit

from kvagent.vllm.options import DEFAULTS, ROLES, parse, table, text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

OURS, MULTI, LMCACHE = "KVAgentConnector", "MultiConnector", "LMCacheConnectorV1"
EXTRA, GIB = "kv_connector_extra_config", 1 << 30
STORES = ("AscendStoreConnector", "MooncakeConnectorStoreV1", "MooncakeStoreConnector")
CONNECTORS = (  # that kvagent replaces
    LMCACHE, "LMCacheMPConnector", *STORES, "OffloadingConnector", "SimpleCPUOffloadConnector",
    "MooncakeConnector", "MooncakeConnectorV1", "MooncakeHybridConnector", "MooncakeLayerwiseConnector",
    "NixlConnector", "NixlPullConnector", "NixlPushConnector",
)  # fmt: skip
TOLD_BY = {"kv_connector": "transfer", "master_server_address": "mooncake"}
MOONCAKE = {
    "protocol": "protocol", "device_name": "devices", "metadata_server": "metadata", "local_hostname": "host",
    "global_segment_size": "segment",
}  # fmt: skip


@dataclass(slots=True)
class Result:
    """What a configuration became."""

    transfer: dict[str, Any]
    serve: list[str] = field(default_factory=list)  # the agent's flags and their values
    became: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # why the other settings have no counterpart


def main(arguments: Sequence[str] | None = None) -> int:
    """Print our configuration."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("kvagent-migrate", description=__doc__, formatter_class=formatter)
    parser.add_argument("source", nargs="*", metavar="SOURCE")
    parser.add_argument("--ranks", type=int, default=1, choices=range(1, 65), metavar="N", help="on each node")
    given = parser.parse_args(arguments)
    try:
        result = convert(read(given.source), given.ranks)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    lines = ["# vLLM:", f"--kv-transfer-config {shlex.quote(json.dumps(result.transfer))}"]
    lines += ["", "# The agent, once on each node:", shlex.join(["kvagent", "serve", *result.serve])]
    for title, entries in (("What the options became", result.became), ("No counterpart", result.missing)):
        lines += ["", f"# {title}:", *(f"#   {name}: {said}" for name, said in entries.items())] if entries else []
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if result.missing else 0


def read(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the configurations that are given: ``transfer``, ``lmcache`` and ``mooncake``."""
    sources: dict[str, dict[str, Any]] = {}
    variables: dict[str, Any] = {}
    for one in given:
        try:
            content = one if one.lstrip().startswith("{") else sys.stdin.read() if one == "-" else Path(one).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{one}: {error}") from error
        if found := re.findall(r"^\s*(?:export\s+)?LMCACHE_(\w+)=[\"']?(.*?)[\"']?\s*$", content, re.MULTILINE):
            variables |= {name.lower(): value for name, value in found}
            continue
        config = _mapping(one, content)
        nested = config.get("kv_transfer_config", config.get("kv-transfer-config"))
        config = _mapping(one, nested) if nested else config
        kind = next((kind for key, kind in TOLD_BY.items() if key in config), "lmcache")
        if kind in sources:
            raise ValueError(f"{one}: a second configuration of this kind ({kind})")
        sources[kind] = config
    return sources | ({"lmcache": sources.get("lmcache", {}) | variables} if variables else {})


def _mapping(name: str, content: Any) -> dict[str, Any]:
    """Return a mapping, or that of its JSON or YAML."""
    if isinstance(content, str):
        try:
            import yaml  # type: ignore[import-untyped, unused-ignore]  # vLLM brings it; it reads JSON too

            content = yaml.safe_load(content)
        except ImportError:
            if not content.lstrip().startswith("{"):
                raise ValueError(f"{name}: YAML needs PyYAML, which the environment of vLLM has") from None
            content = json.loads(content)
        except yaml.YAMLError as error:
            raise ValueError(f"{name}: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{name}: allowed are a JSON or YAML mapping, or lines LMCACHE_NAME=VALUE")
    return content


def convert(sources: Mapping[str, Mapping[str, Any]], ranks: int = 1) -> Result:
    """Return our configuration for what ``read`` returned, for so many ranks on the node."""
    implied = LMCACHE if "lmcache" in sources else STORES[-1] if "mooncake" in sources else ""
    transfer = sources.get("transfer") or {"kv_connector": implied, "kv_role": "kv_both"}
    extra = _mapping(EXTRA, transfer.get(EXTRA) or {})
    children = extra.get("connectors") if transfer["kv_connector"] == MULTI else [transfer]
    if not isinstance(children, list) or not all(isinstance(one, dict) for one in children):
        raise ValueError("connectors: allowed is a list of kv_transfer_config")
    replaced = [one for one in children if one.get("kv_connector") in CONNECTORS]
    if not replaced or ("lmcache" in sources and all(one["kv_connector"] != LMCACHE for one in replaced)):
        allowed = LMCACHE if "lmcache" in sources else ", ".join(CONNECTORS)
        raise ValueError(f"kv_connector: {transfer['kv_connector']!r}, allowed are {MULTI} and {allowed}")
    role = replaced[0].get("kv_role", transfer.get("kv_role"))
    if role not in ROLES:
        raise ValueError(f"kv_role: {role!r}, allowed are {', '.join(ROLES)}")
    outer = {"kv_role": role, "kv_load_failure_policy": "recompute"}
    result = Result({"kv_connector": OURS, **outer})
    options: dict[str, Any] = {}
    for one in replaced:
        for name, value in _without_agents(one, sources, ranks, result).items():
            _add_option(name, value, options, result)
    parse(options)
    if options:
        result.transfer[EXTRA] = options
    if len(replaced) < len(children):
        beside = [result.transfer if one is replaced[0] else one for one in children if one not in replaced[1:]]
        result.transfer = {"kv_connector": MULTI, **outer, EXTRA: {"connectors": beside}}
    result.transfer |= {key: transfer[key] for key in ("engine_id",) if key in transfer}
    return result


def _add_option(name: str, value: Any, options: dict[str, Any], result: Result) -> None:
    """Translate one option into ours."""
    foreign = table().get(name)
    means = {name: value} if name in DEFAULTS else foreign.meaning(value) if foreign else None
    if means is None:
        result.missing[name] = foreign.otherwise() if foreign else "no counterpart: it is not known here"
        return
    for ours, one in means.items():
        if isinstance(one, str) and not isinstance(DEFAULTS[ours], str):  # of a variable
            one = {"true": True, "false": False}.get(one.lower(), int(one) if one.isdecimal() else one)
        if options.setdefault(ours, one) != one:
            raise ValueError(f"{name}: {ours} would be both {options[ours]!r} and {one!r}")
    said = ", ".join(f"{ours}: {text(options[ours])}" for ours in means)
    result.became[name] = said or (foreign.advice(value) if foreign else "")


def _without_agents(one: Mapping[str, Any], sources: Mapping[str, Any], ranks: int, result: Result) -> dict[str, Any]:
    """Turn the agent's settings into its flags. Return the other options of a connector."""
    name, left = one["kv_connector"], _mapping(EXTRA, one.get(EXTRA) or {})
    mooncake = sources.get("mooncake", {}) if name in (LMCACHE, *STORES) else {}
    if name == LMCACHE:
        left = {f"lmcache.{key}": value for key, value in sources.get("lmcache", {}).items()} | left
        mooncake = _mapping("extra_config", left.pop("lmcache.extra_config", None) or {}) | mooncake
        url = urlsplit(str(left.get("lmcache.remote_url")))
        if url.scheme == "mooncakestore":  # its server and device win
            more = {"master_server_address": url.netloc, "device_name": "".join(parse_qs(url.query).get("device", []))}
            mooncake = mooncake | {key: value for key, value in more.items() if value}
            result.became["lmcache.remote_url"] = f"a tier of {left.pop('lmcache.remote_url')}"
    elif name in STORES and not mooncake:
        result.missing[f"{name}'s store"] = "has no --tier yet: give the file of MOONCAKE_CONFIG_PATH too"
    left = {key: value for key, value in (mooncake | left).items() if value not in (None, "")}

    def flag(make: Callable[..., str], *names: str) -> None:
        """Let ``make`` turn settings into a flag; it is given None for those that are not there."""
        if not (given := {key: left.pop(key) for key in names if key in left}):
            return
        try:
            made = make(*(value and str(value) for value in map(given.get, names)))
            if made.startswith("--pool") and "--pool" in result.serve:
                raise ValueError("the pool has a size already; give it the sum if that is meant")
            result.serve += made.split(" ", 1)
            result.became |= dict.fromkeys(given, made.partition("?")[0])
        except ValueError as error:
            result.missing |= dict.fromkeys(given, f"no counterpart: {error}")

    flag(lambda size: f"--pool {bytes_of(size) * ranks}", "cpu_bytes_to_use_per_rank")
    flag(lambda size: f"--pool {bytes_of(size)}", "cpu_bytes_to_use")
    flag(lambda size: f"--pool {bytes_of(size, GIB) * ranks}", "lmcache.max_local_cpu_size")
    names = ("lmcache.local_disk", "lmcache.max_local_disk_size")
    flag(lambda path, size: disk_tier(path, bytes_of(size, GIB) * ranks), *names)
    if left.get("master_server_address"):
        left |= {key: bytes_of(left[key]) * ranks for key in ("global_segment_size",) if left.get(key)}
        unread = {"tcp": ["device_name"], "rdma": []}.get(left.get("protocol", "tcp"), ["device_name", "protocol"])
        keys = [key for key in MOONCAKE if key not in unread]  # the others are reported
        flag(lambda master, *values: mooncake_tier(master, keys, values), "master_server_address", *keys)
    flag(remote_tier, "lmcache.remote_url")
    if any(text(left.get(key)).lower() == "true" for key in ("use_layerwise", "lmcache.use_layerwise")):
        left.pop("load_async", left.pop("lmcache.enable_async_loading", None))  # layers are waited for all the same
    return left


def mooncake_tier(master: str, keys: Sequence[str], values: Sequence[str]) -> str:
    """Return the flag of a tier for settings of Mooncake's client. Raise ValueError."""
    if not re.fullmatch(r"etcd://.+|[^/]+:\d+", master):
        raise ValueError(f"master_server_address {master!r}: the agent needs HOST:PORT or etcd://...")
    options = [f"{MOONCAKE[key]}={quote(value, safe=':/,')}" for key, value in zip(keys, values, strict=True) if value]
    options, host = ([*options, f"master={quote(master)}"], "") if "/" in master else (options, master)
    return f"--tier mooncake://{host}" + ("?" + "&".join(options) if options else "")


def remote_tier(value: str) -> str:
    """Return the flag of a tier for an URL of LMCache, without its password. Raise ValueError."""
    url = urlsplit(value)
    if url.scheme in ("redis", "rediss", "valkey") and url.hostname:
        user = f"{quote(url.username)}@" if url.username else ""
        host = url.netloc.rpartition("@")[2] + ("" if url.port else ":6379")
        password = "?password-env=KVAGENT_REDIS_PASSWORD" if url.password else ""
        return f"--tier {url.scheme.replace('valkey', 'redis')}://{user}{host}{url.path.rstrip('/')}{password}"
    bucket = re.fullmatch(r"([^.]+)(?:\.s3[.-]([a-z0-9-]+)\.amazonaws\.com)?", url.netloc)
    if url.scheme == "s3" and bucket:
        return f"--tier s3://{bucket[1]}{url.path.rstrip('/')}" + (f"?region={bucket[2]}" if bucket[2] else "")
    raise ValueError(f"there is no tier for {url.scheme or value}:// of this form (docs/TIERS.md)")


def disk_tier(path: str | None, size: int) -> str:
    """Return the flag of a disk tier of so many bytes. Raise ValueError."""
    name = (path or "").removeprefix("file://").rstrip("/")
    if not name.startswith("/"):
        raise ValueError(f"{path!r} is not an absolute path")
    return f"--tier disk:{quote(name)}?capacity={size}"


def bytes_of(value: object, unit: int = 1) -> int:
    """Return a positive size in bytes, given in ``unit`` bytes or with a unit. Raise ValueError."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(i?B)?\s*", str(value), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f"{value!r} is not a positive size")
    return int(float(match[1]) * (1 << 10 * " KMGT".index(match[2].upper()) if match[2] else unit))


if __name__ == "__main__":
    sys.exit(main())
