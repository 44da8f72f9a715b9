"""Findings on the engine's KV events, which tell routers what it and its agent hold."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from kvagent.doctor import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MEDIA = ("gpu", "cpu", "storage")
"""What events tell of, as llm-d names it: the engine's cache, the agent's memory and its disk."""
DEFAULTS: dict[str, Any] = {"gpu": 1.0, "cpu": 0.8}
"""What llm-d weighs by itself of them."""
WEIGHTS = "kvCacheBackendConfigs"
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


def weighed(path: Path) -> Finding:
    """Return whether llm-d's configuration names all media that events tell of."""
    try:
        config = _parsed(path.read_text())
    except (OSError, ValueError) as error:
        return Finding(f"--router-config {path}: {error}", "give the router's configuration, as JSON or YAML")
    named = {str(one.get("name")): one.get("weight") for one in _entries(config) if isinstance(one, dict)}
    weights = named or DEFAULTS
    missing = [name for name in MEDIA if not weights.get(name)]
    if not missing:
        return Finding(f"llm-d weighs blocks by medium: {', '.join(f'{name} {weights[name]}' for name in MEDIA)}")
    return Finding(
        f"llm-d counts blocks of medium {', '.join(missing)} as 0: {WEIGHTS} does not name it",
        f"under indexerConfig, {WEIGHTS}: [{{name: gpu, weight: 1.0}}, {{name: cpu, weight: 0.8}}, "
        "{name: storage, weight: 0.5}]",
    )


def _parsed(text: str) -> Any:
    """Return what a text of JSON or YAML has. Raise ValueError."""
    try:
        return json.loads(text)
    except ValueError as error:
        try:
            import yaml  # type: ignore[import-untyped, unused-ignore]  # vLLM brings it
        except ImportError:
            raise ValueError(f"{error}; YAML needs PyYAML") from None
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as problem:
            raise ValueError(str(problem)) from None


def _entries(config: Any) -> list[Any]:
    """Return the weights of media, wherever they are in a configuration."""
    if isinstance(config, dict):
        found = config.get(WEIGHTS)
        return found if isinstance(found, list) else [one for part in config.values() for one in _entries(part)]
    return [one for part in config for one in _entries(part)] if isinstance(config, list) else []
