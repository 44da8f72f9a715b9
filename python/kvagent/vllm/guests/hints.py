"""Hints of how a request's blocks will be used: actions on them (docs/STEERING.md).

vLLM 0.33 hands on an envelope of actions (``Request.kv_hints``), each with an ID, a type, a version
and a payload. ``kvagent.hints`` may have the same, or a list of plain actions, whose payload is
beside their type. A router may also name the agent that has a prompt (llm-d's
``remote_kv_source``).

The agent is told what brings blocks when a request arrives, and all else once it has ended and its
saves are over, with the facts of its end: then its blocks are stored, and nobody waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvagent.limits import MAX_HINT_ACTIONS, MAX_HINT_ID, MAX_HINT_MS, MAX_JOB_BLOCKS, MAX_PEER_ADDRESS, MAX_PRIORITY
from kvagent.messages import Action, ActionState, BlockStatus, Finish, Hint, HintAction, HintChain, Hinted
from kvagent.vllm.hooks import Guest, Reset
from kvagent.vllm.scheduler.requests import NO_LIMIT, USUAL, Hurry, Phase, Terms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvagent.vllm.plan import StepPlan
    from kvagent.vllm.scheduler.requests import Tracked


NAMES = {f"kv.{action.name.lower()}": action for action in Action}
VERSIONS = "1."  # of actions
MAX_SECONDS = MAX_HINT_MS // 1000
MAX_SHOWN = 80  # characters
MAX_TOKENIZER_BYTES = 16 << 20
MAX_ENDED = 1024  # ended requests that wait for their saves; the oldest is forgotten for one more

_TIMES = {Action.RETAIN, Action.PIN, Action.DEMOTE, Action.DROP}
_NOW = {Action.PREFETCH, Action.FETCH}
_LOWER = {Action.DEMOTE, Action.DROP}
_FINISHED = {
    "FINISHED_STOPPED": Finish.STOP, "FINISHED_LENGTH_CAPPED": Finish.LENGTH, "FINISHED_ABORTED": Finish.ABORT,
}  # fmt: skip
_NAMES = {action: name for name, action in NAMES.items()}

log = logging.getLogger("vllm.kvagent")


class Bad(ValueError):
    """A switch or a hint that does not exist, or has a value that is not allowed."""


def shown(value: Any) -> str:
    """Return a client's value as messages show it."""
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _parts(one: Any) -> tuple[Any, Any, Any, Any]:
    """Return an action's ID, type, version and payload, of an envelope or plain."""
    if isinstance(one, Mapping):
        if "action_type" in one:
            return one.get("action_id"), one["action_type"], one.get("action_version"), one.get("payload")
        return one.get("id"), one.get("action"), None, one
    if hasattr(one, "action_type"):
        return one.action_id, one.action_type, one.action_version, one.payload
    raise Bad(f"{shown(one)}, allowed is a mapping")


def _text(given: Any, least: int = 0, name: str = "") -> str:
    if not isinstance(given, str) or not least <= len(given.encode(errors="replace")) <= MAX_HINT_ID:
        raise Bad(f"{name}{shown(given)}, allowed is a string of {least} to {MAX_HINT_ID} bytes")
    return given.encode(errors="replace").decode()  # it comes back in an answer, as JSON


def _action(identifier: str, kind: Any, version: Any, payload: Any) -> HintAction:
    action = NAMES.get(kind) if isinstance(kind, str) else None
    if action is None:
        raise Bad(f"{shown(kind)}: no such action; there are {', '.join(NAMES)}")
    if version is not None and not str(version).startswith(VERSIONS):
        raise Bad(f"{kind}: version {shown(version)}, allowed is {VERSIONS}x")
    if not isinstance(payload, Mapping):
        raise Bad(f"{kind}: payload: {shown(payload)}, allowed is a mapping")
    priority = integer(f"{kind}: priority: ", payload.get("priority", MAX_PRIORITY // 2), MAX_PRIORITY)
    peer = _peer(payload) if action == Action.FETCH else ""
    ms = _milliseconds(str(kind), payload) if action in _TIMES else 0
    return HintAction(identifier, action, priority, ms, peer)


def expect(allowed: object, why: str) -> None:
    """Raise Bad unless something is allowed."""
    if not allowed:
        raise Bad(why)


def integer(name: str, value: Any, most: int) -> int:
    """Return a client's integer of 0 to ``most``. Raise Bad."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise Bad(f"{name}{shown(value)}, allowed is an integer 0 to {most}")
    return value


def _milliseconds(kind: str, payload: Mapping[str, Any]) -> int:
    """Return how long an action lasts: ``seconds``, or until the Unix time ``lease_until``; 0
    without either.
    """
    name = "seconds" if "seconds" in payload else "lease_until"
    given = payload.get(name, 0)
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise Bad(f"{kind}: {name}: {shown(given)}, allowed is a number")
    seconds = given - time.time() if name == "lease_until" and given else given
    if not 0 <= seconds <= MAX_SECONDS:
        raise Bad(f"{kind}: {name}: {shown(given)}, allowed are 0 to {MAX_SECONDS} seconds")
    return max(1, round(seconds * 1e3)) if given else 0


def _peer(payload: Mapping[str, Any]) -> str:
    """Return host:port of the agent that a fetch names, as this project or as Dynamo does."""
    given = payload.get("from", payload.get("source_control_endpoint"))
    peer = given.removeprefix("tcp://") if isinstance(given, str) else ""
    host, _, port = peer.rpartition(":")
    if not host or not port.isdecimal() or not peer.isascii() or len(peer) > MAX_PEER_ADDRESS:
        raise Bad(f"kv.fetch: from: {shown(given)}, allowed is host:port of an agent")
    return peer


def _source(params: Mapping[str, Any]) -> HintAction | None:
    """Return the fetch that llm-d's ``remote_kv_source`` means, if it is there."""
    given = params.get("remote_kv_source")
    host, port = (given.get("remote_host"), given.get("remote_port")) if isinstance(given, Mapping) else ("", 0)
    if isinstance(port, str) and port.isdecimal() and len(port) <= 5:  # int() refuses 4,301
        port = int(port)
    if not isinstance(host, str) or not host or not isinstance(port, int) or not 0 < port < 1 << 16:
        return None
    peer = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    good = peer.isascii() and len(peer) <= MAX_PEER_ADDRESS
    return HintAction("remote_kv_source", Action.FETCH, peer=peer) if good else None


@dataclass(eq=False, slots=True)
class _Told:
    """What the agent is told of a request: ``about`` has the facts of its end, once it has ended,
    and ``stored`` by group those of its blocks that may be stored. Actions are carried out when it
    arrives (``now``, in ``parts`` until these are sent) or once it has ended; ``receipts`` are by
    an action's number. ``terms``: how its look-ups wait for another agent.
    """

    tracked: Tracked
    about: Hint
    later: list[HintAction] = field(default_factory=list)
    now: list[HintAction] = field(default_factory=list)
    parts: list[Hint] = field(default_factory=list)
    terms: Terms | None = None
    receipts: list[dict[str, Any]] = field(default_factory=list)
    first: set[tuple[int, bytes]] | None = None
    """The blocks that it was the first to store, with their groups; None: that does not matter."""
    stored: Sequence[Sequence[bytes]] = ()


class Hints(Guest):
    """Tells the agent of the ends of requests, and of what clients ask to do with blocks."""

    def __init__(self, remote_s: float, tool_tokens: frozenset[int] = frozenset(), *, nodes: int = 1) -> None:
        """``remote_s``: how long a request waits for another agent. ``tool_tokens``: of which an
        output that calls a tool has one. ``nodes``: with several no agent has whole blocks.
        """
        self._told_of = nodes == 1
        self._remote_s = remote_s
        self._tool_tokens = tool_tokens
        self._told: dict[Tracked, _Told] = {}  # those that have not ended, or whose saves have not
        self._bringing: list[_Told] = []  # for which something is to be brought
        self._ended: list[_Told] = []  # whose saves have not
        self._req = secrets.randbits(31)

    def name(self, tracked: Tracked, session: Any) -> None:
        """Name the client's session of a request that arrives. Raise Bad."""
        self._own(self._of(tracked), _text(session, least=1))

    def add(self, tracked: Tracked, given: Any) -> None:
        """Take the actions of a request that arrives: an envelope, or a list of plain ones. Raise
        Bad for what is neither.
        """
        every = given.get("actions") if isinstance(given, Mapping) else getattr(given, "actions", given)
        if isinstance(every, (str, bytes)) or not isinstance(every, Sequence):
            raise Bad(f"{shown(given)}, allowed is a list of actions, or a mapping that has one")
        told = self._of(tracked)
        self.side.counts.requests_hinted += 1
        for i, one in enumerate(every[: MAX_HINT_ACTIONS + 1]):
            identifier = kind = ""
            try:
                name, what, version, payload = _parts(one)
                kind = what if isinstance(what, str) and what in NAMES else shown(what)
                identifier = _text("" if name is None else name, name="id: ")
                expect(i < MAX_HINT_ACTIONS, f"{len(every)} actions, allowed are {MAX_HINT_ACTIONS}")
                self._take(told, _action(identifier, what, version, payload))
            except Bad as reason:
                told.receipts.append(_receipt(identifier, kind, ActionState.REJECTED, str(reason)))

    def seen(self, tracked: Tracked) -> None:
        """Note a request that has arrived, and tell the agent what is to be brought for it. Without
        a session it is told before the next step.
        """
        request, told = tracked.request, self._of(tracked)
        if not told.about.session:
            with contextlib.suppress(Bad):
                self._own(told, _text(getattr(request, "session_id", None), least=1))
        if given := getattr(request, "kv_hints", None):
            try:
                self.add(tracked, given)
            except Bad as reason:
                self.side.counts.switches_ignored += 1
                log.warning("kv_hints: %s; they are ignored", reason)
        params = getattr(request, "kv_transfer_params", None)
        if isinstance(params, dict) and (fetch := _source(params)):
            self._take(told, fetch)
        if told.now:
            for action in told.now:
                if action.kind == Action.FETCH and tracked.asking.terms == USUAL:
                    name = f"hint/{action.id}"
                    told.terms = Terms(name.encode(), action.peer, False, self._remote_s, self._remote_s)
                    tracked.asking.terms = told.terms
            about = replace(told.about, session="", actions=tuple(told.now))
            told.parts = list(hints(about, self._blocks(request, NO_LIMIT), None))
            self._bringing.append(told)
            self._send(told)

    def _of(self, tracked: Tracked) -> _Told:
        """Return what the agent is told of a request that arrives."""
        if (told := self._told.get(tracked)) is None:
            self._req = self._req % (1 << 32 - 1) + 1
            told = self._told[tracked] = _Told(tracked, Hint(self._req, "", Finish.UNKNOWN, 0, (), ()))
        return told

    @staticmethod
    def _own(told: _Told, session: str) -> None:
        told.about, told.first = replace(told.about, session=session), set()

    def _take(self, told: _Told, action: HintAction) -> None:
        number, now, state = len(told.receipts), action.kind in _NOW, ActionState.DEFERRED
        why = "the agent was not told" if now else "carried out once the request's blocks are stored"
        if not self._told_of:
            state, why = ActionState.REJECTED, "the engine is on several nodes"
        told.receipts.append(_receipt(action.id, _NAMES[Action(action.kind)], state, why))
        if not self._told_of:
            return
        (told.now if now else told.later).append(replace(action, id=f"{told.about.req}/{number}"))
        if not now:
            told.tracked.saving.hurry = max(told.tracked.saving.hurry, Hurry.AT_ONCE)
        if action.kind in _LOWER:
            self._own(told, told.about.session)

    def _send(self, told: _Told) -> None:
        """Send what is to be brought, if there is a session."""
        if told.parts and all(list(map(self.side.agent.send, told.parts))):
            told.parts = []
            for action in told.now:
                told.receipts[_number(action.id)]["reason"] = "on its way"

    def planned(self, plan: StepPlan, output: Any, now: float) -> None:  # noqa: ARG002
        """Take receipts, and tell the agent of those whose last saves are over."""
        for told in self._bringing:
            self._send(told)
            asking = told.tracked.asking
            if told.tracked.phase != Phase.NONE and asking.terms is told.terms:  # no transfer took its place
                asking.terms = USUAL
        self._bringing = [one for one in self._bringing if one.parts or one.tracked.phase == Phase.NONE]
        for answer in self.side.agent.take(Hinted):
            for told in [one for one in self._told.values() if one.about.req == answer.req]:
                for one in answer.receipts:
                    if (number := _number(one.id)) < len(told.receipts):
                        told.receipts[number] |= {
                            "state": ActionState(one.state).name.lower(), "blocks": one.blocks, "bytes": one.bytes,
                            "reason": one.reason,
                        }  # fmt: skip
        self._settle()

    def heard(self, report: Any, over: Sequence[tuple[Sequence[Any], bytes]], now: float) -> None:  # noqa: ARG002
        """Record which blocks requests were the first to store."""
        for runs, statuses in over:
            at = 0
            for run in runs:
                some, at = statuses[at : at + len(run.hashes)], at + len(run.hashes)
                told = self._told.get(run.tracked)
                if told is not None and told.first is not None:
                    stored = zip(run.hashes, some, strict=False)
                    told.first.update((run.group, key) for key, one in stored if one == BlockStatus.OK)
        self._settle()

    def ended(self, tracked: Tracked) -> dict[str, Any] | None:
        """Handle the end of a request. Return the receipts of its hints, if it had some."""
        told, request = self._told.pop(tracked, None), tracked.request
        if told is None:
            return None
        if told in self._bringing:
            self._bringing.remove(told)
        finish = _FINISHED.get(getattr(request.status, "name", ""), Finish.UNKNOWN)
        if finish == Finish.STOP and not self._tool_tokens.isdisjoint(request.output_token_ids):
            finish = Finish.TOOL
        told.about = replace(told.about, finish=finish, output=request.num_output_tokens, actions=tuple(told.later))
        told.stored = self._blocks(request, min(request.num_computed_tokens, request.num_tokens))
        if self._told_of and not (tracked.stale or tracked.barred) and any(told.stored):
            if len(self._ended) == MAX_ENDED:
                del self._told[self._ended.pop(0).tracked]
                self.side.counts.hints_lost += 1
            self._ended.append(told)
            self._told[tracked] = told
            self._settle()
        return {"kvagent.receipts": told.receipts} if told.receipts else None

    def reset(self, what: Reset) -> None:
        """Forget all requests that have ended, since their blocks belong to old weights."""
        if what is Reset.WEIGHTS:
            for told in self._ended:
                del self._told[told.tracked]
            self._ended.clear()

    def _blocks(self, request: Any, tokens: int) -> list[Sequence[bytes]]:
        """Return the hashes of a request's first tokens, by group."""
        geometry = self.side.geometry
        sizes = [(spec.block_tokens, geometry.scale(group)) for group, spec in enumerate(geometry.groups)]
        return [request.block_hashes[scale - 1 : tokens // size * scale : scale] for size, scale in sizes]

    def _settle(self) -> None:
        """Tell the agent of the requests whose saves have ended."""
        for told in [told for told in self._ended if self.side.saves.settled(told.tracked)]:
            self._ended.remove(told)
            del self._told[told.tracked]
            whole = told.about.session or told.later
            stored = told.stored if whole else [one[-1:] for one in told.stored]
            sent = list(map(self.side.agent.send, hints(told.about, stored, told.first)))
            self.side.counts.hints_lost += not all(sent)


def hints(
    about: Hint, hashes: Sequence[Sequence[bytes]], first: set[tuple[int, bytes]] | None
) -> Iterator[Hint]:  # fmt: skip
    """Yield the messages about blocks, by group. ``first``: which the request was the first to
    store.
    """
    chains: list[HintChain] = []
    room = MAX_JOB_BLOCKS
    for group, keys in enumerate(hashes):
        at = 0
        while at < len(keys):
            part = keys[at : at + room]
            bits = sum(1 << i for i, key in enumerate(part) if first and (group, key) in first)
            mine = bits.to_bytes((len(part) + 7) // 8, "little") if bits else b""
            chains.append(HintChain(group, len(part[0]), b"".join(part), mine))
            at, room = at + len(part), room - len(part)
            if not room:
                yield replace(about, chains=tuple(chains))
                chains, room = [], MAX_JOB_BLOCKS
    if chains:
        yield replace(about, chains=tuple(chains))


def _receipt(identifier: str, action: str, state: ActionState, reason: str) -> dict[str, Any]:
    return {
        "id": identifier, "action": action, "state": state.name.lower(), "reason": reason, "blocks": 0, "bytes": 0,
    }  # fmt: skip


def _number(identifier: str) -> int:
    """Return an action's number among those of its request."""
    number = identifier.rpartition("/")[2]
    return int(number) if number.isdecimal() else 1 << 32


def tool_tokens(model: Any) -> frozenset[int]:
    """Return the tokens with which the model of vLLM's ModelConfig calls tools, where its folder
    says so.
    """
    try:
        path = Path(str(model.tokenizer or model.model)) / "tokenizer_config.json"
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            return frozenset()
        added = json.loads(path.read_text())["added_tokens_decoder"]
        return frozenset(int(number) for number, one in added.items() if one["content"] in TOOL_TOKENS)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return frozenset()  # every end without a tool call is an ordinary stop


TOOL_TOKENS = {
    "<tool_call>", "</tool_call>", "<|tool_call|>", "<|tool_call>", "<|call|>", "<|eom_id|>", "<|eom|>", "[TOOL_CALLS]",
    "<|tool_calls_section_begin|>", "<|action_start|>", "<|python_tag|>",
    "<\N{FULLWIDTH VERTICAL LINE}tool\u2581calls\u2581begin\N{FULLWIDTH VERTICAL LINE}>",
}  # fmt: skip
