"""Findings from the agent's /status: its health, its engines, and why engines do not share
blocks.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
from typing import TYPE_CHECKING, Any

from kvagent.doctor import Finding
from kvagent.vllm.boundary import PAIR as UNCACHED
from kvagent.vllm.weight_changes import NAMED, PAIR, PRIVATE, UNSHARED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_LOGS = "with VLLM_LOGGING_LEVEL=DEBUG both log what counts of it"
# How to make two engines agree on a key of their identity; see docs/VLLM.md.
HINTS = {
    "model": "give both the same model path or name",
    "weights": "their files differ: let both read the same files (one volume, or one revision)",
    "generation": "their weights may differ: give both the same weights_version, or, where weights were changed in "
    'place, name them to both after the change (docs/VLLM.md, "Weights that change")',
    UNSHARED: "a value of its configuration has no form that can be compared: its log names it",
    "environment": "give both the same variables of vLLM and of the libraries that compute; " + _LOGS,
    "code": "install the same plugins of vLLM in both, and give both the same code of the model",
    "dtype": "give both the same --dtype",
    "resolved": "vLLM chose other attention backends: give both the same --attention-backend or environment",
    "device": "blocks of different kinds of devices, or of their FP8 formats, cannot be exchanged",
    "tenant": "tenants do not share: that is what the option tenant is for",
    "layout": "give both the same layout option, and run both with the same attention backend",
    "groups": "give both the same --block-size and the same model",
    "stages": "set VLLM_PP_LAYER_PARTITION to the same value in both",
    "tp": "give both the same --tensor-parallel-size",
    "pp": "give both the same --pipeline-parallel-size",
    "shards": "give both the same parallel sizes, or the same share_tp and share_pp",
    "cells": "give both the same share_tp and share_pp, which say how blocks are cut",
    "hash_seed": "set the same PYTHONHASHSEED in both, or in neither and use --prefix-caching-hash-algo sha256",
    "engine": "run the same minor version of vLLM in both",
}


def health(status: Mapping[str, Any], boot: bytes) -> Iterator[Finding]:
    """Yield findings on version, boot and switches."""
    text = f"agent {status.get('version')}, up for {float(status.get('uptime_seconds', 0)):.0f} s"
    if boot and status.get("boot") != boot.hex():
        yield Finding(
            f"{text}: session.sock and admin.sock belong to different runs of the agent",
            "two agents use this directory, or one was just restarted: ask again, then look for the second one",
        )
    elif status.get("problem"):
        yield Finding(f"{text}: {status['problem']}", "see the agent's log")
    else:
        yield Finding(text)
    for name, on in sorted(status.get("switches", {}).items()):
        if on is False:
            yield Finding(f"{name} are switched off", f"kvagent set {name}=on")


def engines(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield whether all ranks of each engine are registered, and what is stored and found."""
    listed = _engines(status)
    if not listed:
        yield Finding(
            "no engine is registered",
            'an engine that runs with the connector logs why, in lines with "kvagent:": look there',
        )
    for engine in listed:
        if reason := _uncached(engine):
            yield Finding(
                f"engine {engine.get('instance')} is served UNCACHED, so every prompt is computed: {reason}",
                'change what the reason names (docs/VLLM.md, "What is not supported"), or let such a start fail with '
                '"on_unsupported": "fail" in kv_connector_extra_config',
            )
            continue
        ranks = sum(1 for one in engine.get("sessions", []) if one.get("role") == "worker" and one.get("registered"))
        scheduler = any(one.get("role") == "scheduler" for one in engine.get("sessions", []))
        text = f"engine {engine.get('instance')}: space {engine.get('space')}, {ranks} of {engine.get('world')} ranks"
        if engine.get("complete") and scheduler:
            yield Finding(f"{text}, protocol {', '.join(_versions(engine))}")
        else:
            missing = "its ranks are not all registered" if scheduler else "its scheduler is not registered"
            yield Finding(
                f"{text}: {missing}, so it finds nothing", 'see the log of that process, lines with "kvagent:"'
            )
        yield from _generation(engine)
    if listed:
        yield _hits(status)


def _uncached(engine: Mapping[str, Any]) -> str:
    identity = engine.get("identity")
    return str(identity.get(UNCACHED, "")) if isinstance(identity, dict) else ""


def _generation(engine: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield whether an engine's weights are private, and why."""
    identity = engine.get("identity")
    generation = str(identity.get(PAIR, "")) if isinstance(identity, dict) else ""
    if generation.startswith(NAMED):
        yield Finding(f"engine {engine.get('instance')}: its weights are version {generation.removeprefix(NAMED)}")
    if generation.startswith(PRIVATE):
        why = (
            "its weights were changed in place, or can change unobserved (its log says how); weights_version names "
            "those that it starts with, and weights_fixed says that they never change"
        )
        if isinstance(identity, dict) and not identity.get("weights", "unknown"):
            why = "its weight files are not in a local folder there; weights_version names them"
        if isinstance(identity, dict) and UNSHARED in identity:
            why = HINTS[UNSHARED]
        yield Finding(f"engine {engine.get('instance')}: shares with no other engine, since {why}")


def sharing(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield which keys of the engines' identities differ."""
    spaces: dict[str, Mapping[str, Any]] = {}
    served = [engine for engine in _engines(status) if not _uncached(engine)]
    for engine in served:
        spaces.setdefault(str(engine.get("space")), engine)
    if len(spaces) == 1 and len(served) > 1:
        yield Finding(f"all {len(served)} engines share one space")
    for one, other in itertools.islice(itertools.combinations(spaces.values(), 2), MAX_PAIRS):
        yield _difference(one, other)


MAX_PAIRS = 20  # of compared engines


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> Finding:
    pair = f"engines {one.get('instance')} and {other.get('instance')} do not share"
    mine, its = one.get("identity"), other.get("identity")
    if not isinstance(mine, dict) or not isinstance(its, dict):
        return Finding(f"{pair}; this agent does not say why", "compare what docs/VLLM.md lists, or update the agent")
    keys = sorted(key for key in {*mine, *its} if mine.get(key) != its.get(key))
    if not keys:
        return Finding(f"{pair}: block sizes, windows or shards differ", "give both the same --block-size and sizes")
    if "model" in keys and "weights" in keys:
        return Finding(f"{pair}: they serve different models ({mine.get('model')}, {its.get('model')})")
    named = "; ".join(f"{key}: {mine.get(key)!r} and {its.get(key)!r}" for key in keys)
    return Finding(
        f"{pair}: {named}",
        "; ".join(HINTS.get(key, f"give both the same options of vLLM's {key}; {_LOGS}") for key in keys),
    )


def _hits(status: Mapping[str, Any]) -> Finding:
    stored, saved, loaded = (status.get(name, 0) for name in ("blocks_stored", "blocks_saved", "blocks_loaded"))
    text = (
        f"{stored} blocks stored, {saved} saved and {loaded} loaded since the agent's start; "
        f"{100 * float(status.get('hit_rate', 0)):.0f} % of the tokens asked for were found"
    )
    if saved:
        return Finding(text)
    return Finding(
        f"{text}: nothing was saved yet",
        "only full blocks of finished steps are saved, and by a kv_consumer only with consumer_saves: send a prompt "
        "longer than a block, then ask again",
    )


def _engines(status: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    listed = status.get("engine_list")
    return listed if isinstance(listed, list) else []


def _versions(engine: Mapping[str, Any]) -> list[str]:
    return sorted({str(one.get("protocol_version")) for one in engine.get("sessions", [])})


TIMEOUT_S = 2.0  # of the admin socket
MAX_BYTES = 16 << 20  # of a response


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("kvagent", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def status_of(path: Path) -> dict[str, Any]:
    """Return the agent's /status, or raise OSError, http.client.HTTPException or ValueError."""
    connection = _Connection(path)
    try:
        connection.request("GET", "/status")
        answer = connection.getresponse()
        body = answer.read(MAX_BYTES)
        if answer.status != http.client.OK:
            raise ValueError(f"/status is answered by {answer.status}")
    finally:
        connection.close()
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("/status is not a JSON object")  # noqa: TRY004  the agent's answer is wrong, not an argument
    return found
