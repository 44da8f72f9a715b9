"""Findings on the engine's KV events, which tell routers what it and its agent hold."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from kvagent.doctor import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
