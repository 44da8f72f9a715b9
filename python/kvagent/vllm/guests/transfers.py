"""Transfers: prompts that a prefill engine computes for a decode engine (docs/PD.md).

A request whose ``kv_transfer_params`` have ``do_remote_decode`` is offered: its scheduler tells the
agent the transfer's name when the request arrives, and that nothing more will be stored for it when
its saves have ended. A request with ``do_remote_prefill`` names that transfer in its look-ups, and
the agent is told once it has what it wanted.

A name needs nothing that a proxy would have to know: it is the proxy's own where it gives one to
both sides, else made of the prefill engine's identifiers, or, where the proxy asks both engines at
once, of the request ID that both of them get.
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent import messages as m
from kvagent.limits import MAX_PEER_ADDRESS, MAX_TRANSFER_NAME
from kvagent.vllm.hooks import Guest, Reset
from kvagent.vllm.scheduler.requests import USUAL, Hurry, Phase, Terms
from kvagent.vllm.scheduler.saves import HOLD_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import StepPlan
    from kvagent.vllm.scheduler.requests import Tracked


_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")  # vLLM makes request IDs unique with it
_PART = re.compile(r"(?:(\d{1,4})_)?(?:cmpl-.*-(\d{1,4})\Z)?")  # of several samples, or several prompts


@dataclass(frozen=True, slots=True)
class Wanted:
    """The transfer that a request is to receive.

    ``peer`` is the address of the prefill engine's agent, and ``early`` whether that engine may not
    have seen its request yet.
    """

    name: bytes
    peer: str
    early: bool


def base(request_id: str) -> str:
    """Return a request ID without what vLLM appended to make it unique."""
    return _SUFFIX.sub("", request_id)


def offered_name(params: Mapping[str, Any], engine_id: str, request_id: str) -> bytes:
    """Return the name of the transfer that a prefill request opens."""
    given = params.get("transfer_id")
    return _given(given, request_id) if is_name(given) else _made(engine_id, base(request_id))


def wanted(params: Mapping[str, Any], request_id: str) -> Wanted | None:
    """Return the transfer that a decode request names; None if it names none."""
    early = not isinstance(params.get("remote_num_tokens"), int)
    given = params.get("transfer_id")
    engine_id, remote = params.get("remote_engine_id"), params.get("remote_request_id")
    if is_name(given):
        name = _given(given, request_id)
    elif is_name(engine_id) and is_name(remote):
        own = base(request_id)
        name = _made(str(engine_id), own if early and str(remote) in own else base(str(remote)))
    else:
        return None
    return Wanted(name, _peer(params), early)


def is_name(value: object) -> bool:
    """Return whether a value that a client sent names something."""
    return isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""


def _given(name: object, request_id: str) -> bytes:
    """Return the name for one of the requests of a proxy's request, which may have several prompts
    or samples.
    """
    matched = _PART.match(base(request_id))
    sample, prompt = matched.groups() if matched else (None, None)
    part = f"#{sample or 0}.{prompt or 0}" if sample or prompt not in (None, "0") else ""
    return _short(f"t/{name}{part}")


def _made(engine_id: str, request_id: str) -> bytes:
    return _short(f"r/{engine_id}/{request_id}")


def _short(name: str) -> bytes:
    encoded = name.encode(errors="replace")
    return encoded if len(encoded) <= MAX_TRANSFER_NAME else b"h/" + hashlib.sha256(encoded).hexdigest().encode()


def _peer(params: Mapping[str, Any]) -> str:
    """Return host:port of the prefill engine's agent, or nothing.

    Mooncake's proxy forwards no address, but the identifier in which the agent's /query has put it.
    """
    host, port = params.get("remote_host"), params.get("remote_port")
    engine_id = params.get("remote_engine_id")
    address = ""
    if isinstance(host, str) and host and isinstance(port, int) and 0 < port < 65536:
        address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    elif "remote_bootstrap_addr" in params and isinstance(engine_id, str) and "@" in engine_id:
        address = engine_id.rpartition("@")[2]
    return address if address.isascii() and len(address) <= MAX_PEER_ADDRESS else ""


def split(peer: str) -> tuple[str, int]:
    """Return host and port of an agent's address; empty and 0 if it has none."""
    host, _, port = peer.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else ("", 0)


RENEWALS = 3  # an open transfer is renewed this many times in its time to live
COMPUTED_S = 10.0  # for blocks that a prefill engine has computed: more than they take to be stored and sent


@dataclass(eq=False, slots=True)
class Offer:
    """What a request promises that is computed for a decode engine."""

    tracked: Tracked
    name: bytes
    tokens: int
    """The prompt's whole blocks."""
    renew_at: float = 0.0
    give_up_at: float = 0.0
    """When the agent has forgotten the ended request, by the clock of the saves; 0 until they are
    first looked at.
    """


class Transfers(Guest):
    """The transfers of one engine: offers of a prefill engine, and what a decode engine wants."""

    def __init__(self, options: Options, engine_id: str, tp_size: int, *, saves: bool) -> None:
        """``saves``: whether the engine may save."""
        self._ttl_ms = int(options.transfer_ttl_ms)
        self._remote_s = options.remote_wait_ms / 1e3
        self._engine_id = engine_id
        self._tp_size = tp_size
        self._saves = saves
        self._open: dict[str, Offer] = {}  # of requests that have not ended, by request
        self._ended: list[Offer] = []  # whose saves have not
        self._wanted: dict[str, tuple[Tracked, bytes]] = {}  # by request, until it has what it wants
        self._renew_at = 0.0

    def seen(self, tracked: Tracked) -> None:
        """Open the transfer of a request that has arrived, or note the one that it is to
        receive.
        """
        request = tracked.request
        params = getattr(request, "kv_transfer_params", None) or {}
        if params.get("do_remote_decode") is True and self._saves and not tracked.barred:
            self._offer(tracked, params)
        elif params.get("do_remote_prefill") is True and (one := wanted(params, request.request_id)):
            self._wanted[request.request_id] = tracked, one.name
            pending_s = self._remote_s if one.early else min(self._remote_s, COMPUTED_S)
            tracked.asking.terms = Terms(one.name, one.peer, one.early, self._remote_s, pending_s)
            self.side.counts.transfers_wanted += 1

    def planned(self, plan: StepPlan, output: Any, now: float) -> None:  # noqa: ARG002
        """Renew what is open, and tell the agent of what has been received."""
        for tracked, _ in list(self._wanted.values()):
            if tracked.phase != Phase.NONE:
                tracked.request.kv_transfer_params["do_remote_prefill"] = False  # it is received once
            if tracked.phase != Phase.NONE and not tracked.load:
                self._deliver(tracked)
        if self._open and now >= self._renew_at:
            self._renew_at = now + self._ttl_ms / 1e3 / RENEWALS / 2
            for offer in self._open.values():
                if now >= offer.renew_at:
                    self._send(offer, now)
        self._settle()

    def heard(self, report: Any, over: Any, now: float) -> None:  # noqa: ARG002
        """Complete what is saved, and tell the agent of what has been received."""
        for tracked, _ in list(self._wanted.values()):
            if tracked.phase == Phase.LOADED and not tracked.load:
                self._deliver(tracked)
        self._settle()

    def ended(self, tracked: Tracked) -> dict[str, Any] | None:
        """End a request: what it offers is completed once its saves are over. Return what a decode
        engine needs to know about it, if it was computed for one.
        """
        self._deliver(tracked)
        request, given = tracked.request, getattr(tracked.request, "kv_transfer_params", None)
        if offer := self._open.pop(request.request_id, None):
            self._ended.append(offer)
        if not isinstance(given, dict) or given.get("do_remote_decode") is not True:
            return None
        host, port = split(self.side.agent.peer)
        name = given.get("transfer_id")
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id, "remote_host": host, "remote_port": port,
            "tp_size": self._tp_size, "remote_num_tokens": int(request.num_computed_tokens),
        } | ({"transfer_id": name} if is_name(name) else {})  # fmt: skip

    def reset(self, what: Reset) -> None:
        """Forget the ended requests if their agent is gone, and open the others' transfers at a new
        one.
        """
        if what is Reset.ENDED:
            self._ended.clear()
        if what is Reset.BEGAN:
            for offer in self._open.values():
                self._send(offer, time.monotonic())

    def busy(self) -> bool:
        """Return whether steps are needed without requests."""
        return bool(self._ended)

    def _offer(self, tracked: Tracked, params: Mapping[str, Any]) -> None:
        """Open the transfer of a request that has just arrived."""
        request, align = tracked.request, self.side.geometry.align
        tokens = request.num_prompt_tokens // align * align
        if tokens:
            tracked.saving.hurry = Hurry.AWAITED
            offer = Offer(tracked, offered_name(params, self._engine_id, request.request_id), tokens)
            self._open[request.request_id] = offer
            self.side.counts.transfers_offered += 1
            self._send(offer, time.monotonic())

    def _deliver(self, tracked: Tracked) -> None:
        """Tell the agent that a request has what it wanted of a transfer, or wants it no more."""
        _, name = self._wanted.pop(tracked.request.request_id, (None, b""))
        if name:
            self.side.agent.send(m.Delivered(name))
            tracked.asking.terms = USUAL

    def _send(self, offer: Offer, now: float) -> None:
        offer.renew_at = now + self._ttl_ms / 1e3 / RENEWALS
        self.side.agent.send(m.Offer(offer.name, offer.tokens, self._ttl_ms))

    def _settle(self) -> None:
        if self._ended:
            self._ended = [offer for offer in self._ended if not self._settled(offer)]

    def _settled(self, offer: Offer) -> bool:
        """Complete an ended request's transfer if its saves have ended."""
        tracked, saves, agent = offer.tracked, self.side.saves, self.side.agent
        offer.give_up_at = offer.give_up_at or saves.now + HOLD_S + self._ttl_ms / 1e3
        if saves.now >= offer.give_up_at:
            agent.send(m.Offered(offer.name, 0))  # it has forgotten it, unless it stood still
            return True
        if not saves.settled(tracked):
            return False
        geometry = self.side.geometry
        sizes = [(i, spec.block_tokens) for i, spec in enumerate(geometry.groups) if i not in geometry.states]
        stored = min(tracked.saving.cursor[group] * size for group, size in sizes)
        sent = agent.send(m.Offered(offer.name, min(offer.tokens, stored)))
        return sent or agent.session is None  # else it is tried again; the end of a session completes it too
