"""Actions on blocks, as clients and routers write them.

vLLM 0.33 hands on an envelope (``Request.kv_hints``) of actions, each with an ID, a type, a version
and a payload. ``kv_transfer_params`` may have the same under ``kvagent.hints``, or a list of plain
actions, whose payload is beside their type. A router may also name the agent that has a prompt
(llm-d's ``remote_kv_source``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvagent.limits import MAX_HINT_ACTIONS, MAX_HINT_ID, MAX_HINT_MS, MAX_PEER_ADDRESS, MAX_PRIORITY
from kvagent.messages import Action, HintAction

NAMES = {f"kv.{action.name.lower()}": action for action in Action}
VERSIONS = "1."  # of actions
MAX_SECONDS = MAX_HINT_MS // 1000
_TIMES = {Action.RETAIN, Action.PIN, Action.DEMOTE, Action.DROP}


class BadHint(ValueError):
    """A hint that does not exist, or has a value that is not allowed."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """An action that is not carried out: its ID and name as the client gave them, and why."""

    id: str
    action: str
    reason: str


def actions(given: Any) -> list[HintAction | Rejected]:
    """Return the actions of an envelope, or of a list of plain ones. Raise BadHint for what is
    neither.
    """
    every = given.get("actions") if isinstance(given, Mapping) else getattr(given, "actions", given)
    if isinstance(every, (str, bytes)) or not isinstance(every, Sequence):
        raise BadHint(f"{shown(given)}, allowed is a list of actions, or a mapping that has one")
    found: list[HintAction | Rejected] = []
    for one in every[: MAX_HINT_ACTIONS + 1]:
        identifier = kind = ""
        try:
            name, what, version, payload = _parts(one)
            kind = what if isinstance(what, str) and what in NAMES else shown(what)
            identifier = _identifier(name)
            if len(found) == MAX_HINT_ACTIONS:
                raise BadHint(f"{len(every)} actions, allowed are {MAX_HINT_ACTIONS}")
            found.append(_action(identifier, what, version, payload))
        except BadHint as reason:
            found.append(Rejected(identifier, kind, str(reason)))
    return found


def source(params: Mapping[str, Any]) -> HintAction | None:
    """Return the fetch that llm-d's ``remote_kv_source`` means, if it is there."""
    given = params.get("remote_kv_source")
    if not isinstance(given, Mapping):
        return None
    host, port = given.get("remote_host"), given.get("remote_port")
    if isinstance(port, str) and port.isdecimal():
        port = int(port)
    if not isinstance(host, str) or not host or not isinstance(port, int) or not 0 < port < 1 << 16:
        return None
    peer = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    if not peer.isascii() or len(peer) > MAX_PEER_ADDRESS:
        return None
    return HintAction("remote_kv_source", Action.FETCH, peer=peer)


def _parts(one: Any) -> tuple[Any, Any, Any, Any]:
    """Return an action's ID, type, version and payload."""
    if isinstance(one, Mapping):
        if "action_type" in one:
            return one.get("action_id"), one["action_type"], one.get("action_version"), one.get("payload")
        return one.get("id"), one.get("action"), None, one
    if hasattr(one, "action_type"):
        return one.action_id, one.action_type, one.action_version, one.payload
    raise BadHint(f"{shown(one)}, allowed is a mapping")


def _identifier(given: Any) -> str:
    if given is None:
        return ""
    if not isinstance(given, str) or len(given.encode(errors="replace")) > MAX_HINT_ID:
        raise BadHint(f"id: {shown(given)}, allowed is a string of at most {MAX_HINT_ID} bytes")
    return given.encode(errors="replace").decode()  # it comes back in an answer, as JSON


def _action(identifier: str, kind: Any, version: Any, payload: Any) -> HintAction:
    action = NAMES.get(kind) if isinstance(kind, str) else None
    if action is None:
        raise BadHint(f"{shown(kind)}: no such action; there are {', '.join(NAMES)}")
    if version is not None and not str(version).startswith(VERSIONS):
        raise BadHint(f"{kind}: version {shown(version)}, allowed is {VERSIONS}x")
    if not isinstance(payload, Mapping):
        raise BadHint(f"{kind}: payload: {shown(payload)}, allowed is a mapping")
    priority = payload.get("priority", MAX_PRIORITY // 2)
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= MAX_PRIORITY:
        raise BadHint(f"{kind}: priority: {shown(priority)}, allowed is an integer 0 to {MAX_PRIORITY}")
    peer = _peer(payload) if action == Action.FETCH else ""
    ms = _milliseconds(str(kind), payload) if action in _TIMES else 0
    return HintAction(identifier, action, priority, ms, peer)


def _milliseconds(kind: str, payload: Mapping[str, Any]) -> int:
    """Return how long an action lasts: ``seconds``, or until the Unix time ``lease_until``; 0
    without either.
    """
    name = "seconds" if "seconds" in payload else "lease_until"
    given = payload.get(name, 0)
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise BadHint(f"{kind}: {name}: {shown(given)}, allowed is a number")
    seconds = given - time.time() if name == "lease_until" and given else given
    if not 0 <= seconds <= MAX_SECONDS:
        raise BadHint(f"{kind}: {name}: {shown(given)}, allowed are 0 to {MAX_SECONDS} seconds")
    return max(1, round(seconds * 1e3)) if given else 0


def _peer(payload: Mapping[str, Any]) -> str:
    """Return host:port of the agent that a fetch names, as this project or as Dynamo does."""
    given = payload.get("from", payload.get("source_control_endpoint"))
    peer = given.removeprefix("tcp://") if isinstance(given, str) else ""
    host, _, port = peer.rpartition(":")
    if not host or not port.isdecimal() or not peer.isascii() or len(peer) > MAX_PEER_ADDRESS:
        raise BadHint(f"kv.fetch: from: {shown(given)}, allowed is host:port of an agent")
    return peer


def shown(value: Any) -> str:
    """Return a client's value as messages show it."""
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


MAX_SHOWN = 80  # characters
