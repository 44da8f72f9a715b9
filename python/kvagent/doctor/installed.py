"""Findings on this Python's packages, vLLM's entry point, settings that keep engines apart, and the
engine's KV events, which tell routers what it and its agent hold.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvagent.doctor import Finding
from kvagent.vllm import internals
from kvagent.vllm.geometry import TESTED, tested

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def packages(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield the versions, and whether vLLM can find the connector by its name."""
    own = _version("kvagent")
    if own is None:
        yield Finding(
            "package kvagent is imported from a folder, not installed: vLLM does not find the connector by its name",
            'pip install it, or add "kv_connector_module_path": "kvagent.vllm" to --kv-transfer-config, with which '
            "KVAgentTier keeps its chunks private to the engine",
        )
    else:
        yield Finding(f"package kvagent {own}")
    vllm = _version("vllm")
    if vllm is None:
        yield Finding("vLLM is not installed in this Python: run this command with the engine's own")
        return
    if tested(vllm):
        yield Finding(f"vLLM {vllm}")
    else:
        yield Finding(f"vLLM {vllm}: the connector is tested with {TESTED}", f"install vLLM {TESTED}")
    for feature in internals.USED if find_spec("vllm") is not None else ():
        if reason := internals.missing(feature):
            yield Finding(f"{feature} is off: {reason}", f"install vLLM {TESTED}")
    allowed = environment.get("VLLM_PLUGINS")
    if own is not None and allowed is not None and "kvagent" not in allowed.split(","):
        yield Finding(
            f"VLLM_PLUGINS={allowed!r} leaves the connector's entry point out",
            'add kvagent to it, or "kv_connector_module_path": "kvagent.vllm" to --kv-transfer-config, with which '
            "KVAgentTier keeps its chunks private to the engine",
        )


def seed(environment: Mapping[str, str] = os.environ) -> Finding:
    """Return the finding on the seed of block hashes."""
    value = environment.get("PYTHONHASHSEED")
    if value is None:
        return Finding(
            "PYTHONHASHSEED is not set: engines share with the hash algorithms sha256 and sha256_cbor, not with xxhash"
        )
    return Finding(f"PYTHONHASHSEED={value}: only engines with the same one share")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


HASHES = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"


def published(given: str, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield what is to be said of an engine's ``--kv-events-config``, which is JSON."""
    try:
        config = json.loads(given)
    except ValueError as error:
        yield Finding(f"--kv-events-config is no JSON: {error}", "give this command what the engine gets, in quotes")
        return
    if not isinstance(config, dict) or config.get("enable_kv_cache_events") is not True:
        yield Finding(
            "the engine publishes no KV events: routers do not see what it and its agent hold",
            'add "enable_kv_cache_events": true to --kv-events-config',
        )
        return
    yield _publisher(config)
    yield _replay(config)
    if environment.get(HASHES, "1") == "0":
        yield Finding(
            f"{HASHES}=0: block hashes in events are bytes, which Dynamo's indexer refuses", f"unset {HASHES}"
        )
    else:
        yield Finding("block hashes in KV events are integers, as routers expect")


def _publisher(config: dict[str, Any]) -> Finding:
    publisher, endpoint = config.get("publisher") or "zmq", str(config.get("endpoint", "tcp://*:5557"))
    if publisher != "zmq":
        return Finding(f'publisher "{publisher}": KV events are dropped', '"publisher": "zmq" in --kv-events-config')
    if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
        return Finding(f"KV events are published at {endpoint}, plus its data parallel rank")
    return Finding(
        f"KV events: vLLM connects to {endpoint} instead of listening there, so no router can subscribe",
        'an endpoint with an asterisk, such as "tcp://*:5557", unless a router listens there',
    )


def _replay(config: dict[str, Any]) -> Finding:
    if config.get("replay_endpoint"):
        return Finding(f"KV events can be replayed at {config['replay_endpoint']}")
    return Finding(
        "KV events cannot be replayed: a router that subscribes after they were published never hears of them",
        'a "replay_endpoint" in --kv-events-config, if the router asks for one',
    )
