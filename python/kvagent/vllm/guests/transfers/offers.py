"""Transfers: prompts that a prefill engine computes for a decode engine (docs/PD.md).

A request whose ``kv_transfer_params`` have ``do_remote_decode`` is offered: its scheduler tells the
agent the transfer's name when the request arrives, and that nothing more will be stored for it when
its saves have ended. A request with ``do_remote_prefill`` names that transfer in its look-ups, and
the agent is told once it has what it wanted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent import messages as m
from kvagent.vllm.guests.transfers.names import is_name, offered_name, split, wanted
from kvagent.vllm.hooks import Guest, Reset
from kvagent.vllm.scheduler.requests import USUAL, Hurry, Phase, Terms
from kvagent.vllm.scheduler.saves import HOLD_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import StepPlan
    from kvagent.vllm.scheduler.requests import Tracked

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

    def __init__(self, options: Options, engine_id: str, tp_size: int, *, saves: bool, loads: bool = True) -> None:
        """``saves``, ``loads``: what the engine may do."""
        self._ttl_ms = int(options.transfer_ttl_ms)
        self._remote_s = options.remote_wait_ms / 1e3
        self._engine_id = engine_id
        self._tp_size = tp_size
        self._saves = saves
        self._loads = loads
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
        elif params.get("do_remote_prefill") is True and self._loads and (one := wanted(params, request.request_id)):
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

    def ended(self, tracked: Tracked) -> None:
        """End a request: what it offers is completed once its saves are over."""
        self._deliver(tracked)
        if offer := self._open.pop(tracked.request.request_id, None):
            self._ended.append(offer)

    def reset(self, what: Reset) -> None:
        """Forget the ended requests if their agent is gone, and open the others' transfers at a new
        one.
        """
        if what is Reset.ENDED:
            self._ended.clear()
        if what is Reset.BEGAN:
            for offer in self._open.values():
                self._send(offer, time.monotonic())

    def transfer_params(self, request: Any) -> dict[str, Any] | None:
        """Return what a decode engine needs to know about an ended request, if it was computed for
        one.
        """
        given = request.kv_transfer_params
        if not isinstance(given, dict) or given.get("do_remote_decode") is not True:
            return None
        host, port = split(self.side.agent.peer)
        name = given.get("transfer_id")
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id, "remote_host": host, "remote_port": port,
            "tp_size": self._tp_size, "remote_num_tokens": int(request.num_computed_tokens),
        } | ({"transfer_id": name} if is_name(name) else {})  # fmt: skip

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
