"""Transfers: prompts that a prefill engine computes for a decode engine (docs/PD.md).

A request whose ``kv_transfer_params`` have ``do_remote_decode`` is offered: its scheduler tells the
agent the transfer's name when the request arrives, and that nothing more will be stored for it when
its saves have ended. A request with ``do_remote_prefill`` names that transfer in its look-ups, and
the agent is told once it has what it wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.vllm.scheduler.saves import HOLD_S
from kvagent.vllm.transfer_names import is_name, offered_name, split

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvagent.vllm.counters import Counts
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.options import Options
    from kvagent.vllm.scheduler.agent_session import AgentSession
    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.saves import Saves

RENEWALS = 3  # an open transfer is renewed this many times in its time to live


@dataclass(eq=False, slots=True)
class Offer:
    """What an offered request promises."""

    name: bytes
    tokens: int
    """The prompt's whole blocks."""
    renew_at: float = 0.0
    end: int = 0
    """Once the request has ended: the tokens to be saved."""
    held: bool = False
    """Whether vLLM keeps the blocks of the ended request until ``Transfers.released``."""
    give_up_at: float = 0.0
    """When to stop saving for the ended request, by the clock of the saves; 0 until they are first
    looked at.
    """
    confirm_until: float = 0.0
    """How long blocks are offered again that another engine is saving, by the clock of the saves; 0
    if there were none.
    """
    through: int = -1
    """The last job of its saves; -1 while some have yet to be sent."""


class Transfers:
    """The transfers of one engine. ``offer`` and ``end`` are the prefill side's, ``deliver`` the
    decode side's.
    """

    def __init__(
        self, agent: AgentSession, geometry: Geometry, options: Options, engine_id: str, counts: Counts
    ) -> None:  # fmt: skip
        self._agent = agent
        self._align = geometry.align
        self._sizes = [(i, spec.block_tokens) for i, spec in enumerate(geometry.groups) if i not in geometry.states]
        self._ttl_ms = int(options.transfer_ttl_ms)
        self._engine_id = engine_id
        self._counts = counts
        self._open: dict[str, Tracked] = {}  # whose requests have not ended, by request
        self._ended: list[Tracked] = []  # whose saves have not
        self._released: list[str] = []
        self._renew_at = 0.0

    def offer(self, tracked: Tracked, params: Mapping[str, Any], now: float) -> None:
        """Open the transfer of a request that has just arrived."""
        request = tracked.request
        tokens = request.num_prompt_tokens // self._align * self._align
        if not tokens:
            return
        tracked.offer = Offer(offered_name(params, self._engine_id, request.request_id), tokens)
        self._open[request.request_id] = tracked
        self._counts.transfers_offered += 1
        self._send(tracked.offer, now)

    def params(self, request: Any, tp_size: int) -> dict[str, Any]:
        """Return what a decode engine needs to know about an ended request."""
        host, port = split(self._agent.peer)
        given = (request.kv_transfer_params or {}).get("transfer_id")
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id, "remote_host": host, "remote_port": port, "tp_size": tp_size,
            "remote_num_tokens": int(request.num_computed_tokens),
        } | ({"transfer_id": given} if is_name(given) else {})  # fmt: skip

    def end(self, tracked: Tracked, tokens: int, saves: Saves | None) -> bool:
        """End an offered request, of which ``tokens`` are to be saved.

        Return whether vLLM has to keep its blocks until it is ``released``: some could not be
        pinned. With no ``saves`` nothing more is saved.
        """
        offer = tracked.offer
        assert offer is not None
        self._open.pop(tracked.request.request_id, None)
        self._ended.append(tracked)
        offer.end = tokens
        if saves is not None and _lacks(tracked) and saves.blocks.max_saving + saves.blocks.max_delivering:
            offer.held = True
            self._counts.transfers_held += 1
        return offer.held

    def drop(self) -> None:
        """Forget the ended requests, since their agent is gone."""
        self.save_no_more()
        self._ended.clear()

    def save_no_more(self) -> None:
        """Save nothing more of the ended requests, since their blocks are needed or out of date."""
        for tracked in self._ended:
            self._release(tracked)

    def again(self, now: float) -> None:
        """Open the transfers of all requests at a new agent."""
        for tracked in self._open.values():
            if tracked.offer is not None:
                self._send(tracked.offer, now)

    def busy(self) -> bool:
        """Return whether steps are needed without requests."""
        return bool(self._ended or self._released)

    def active(self) -> bool:
        """Return whether there are transfers of this engine's requests."""
        return bool(self._open or self._ended)

    def step(self, saves: Saves, now: float) -> None:
        """Renew what is open, and add what the held requests still lack to the next saves.

        Called before the saves of a step are sent.
        """
        if self._open and now >= self._renew_at:
            self._renew_at = now + self._ttl_ms / 1e3 / RENEWALS / 2
            for tracked in self._open.values():
                if tracked.offer is not None and now >= tracked.offer.renew_at:
                    self._send(tracked.offer, now)
        for tracked in self._ended:
            if tracked.offer is not None and tracked.offer.held and _lacks(tracked) and saves.ready():
                saves.batch.add(tracked, tracked.offer.end)
                saves.batch.pin()

    def settle(self, saves: Saves) -> None:
        """Complete the transfers whose saves have ended. Called after saves were sent or
        reported.
        """
        if self._ended:
            self._ended = [tracked for tracked in self._ended if not self._settled(tracked, saves)]

    def released(self) -> Sequence[str]:
        """Return the held requests that vLLM may free, each once."""
        released, self._released = self._released, []
        return released

    def deliver(self, tracked: Tracked) -> None:
        """Tell the agent that a request has what it wanted of a transfer, or wants it no more."""
        if tracked.wanted is not None:
            self._agent.delivered(tracked.wanted.name)
            tracked.wanted = None

    def _send(self, offer: Offer, now: float) -> None:
        offer.renew_at = now + self._ttl_ms / 1e3 / RENEWALS
        self._agent.offer(offer.name, offer.tokens, self._ttl_ms)

    def _settled(self, tracked: Tracked, saves: Saves) -> bool:
        """Complete an ended request's transfer if its saves have ended.

        Blocks that it shares with requests before it may be in their saves, so all jobs up to its
        last one count.
        """
        offer = tracked.offer
        assert offer is not None
        offer.give_up_at = offer.give_up_at or saves.now + HOLD_S
        if saves.now >= offer.give_up_at:
            self._release(tracked)  # even if the agent reports nothing
            if saves.now >= offer.give_up_at + self._ttl_ms / 1e3:  # the agent has forgotten it
                self._agent.offered(offer.name, 0)  # unless it stood still
                return True
        if offer.held and _lacks(tracked):
            offer.through = -1
            return False
        if offer.through < 0 and saves.batch.empty():
            offer.through = saves.last_job
        if offer.through < 0 or not saves.settled(offer.through):
            return False
        stored = min(tracked.cursor[group] * size for group, size in self._sizes)
        if not self._agent.offered(offer.name, min(offer.tokens, stored)):
            return False
        self._release(tracked)
        return True

    def _release(self, tracked: Tracked) -> None:
        offer = tracked.offer
        if offer is not None and offer.held:
            offer.held = False
            self._released.append(tracked.request.request_id)


def _lacks(tracked: Tracked) -> bool:
    """Return whether an ended request has blocks that are neither saved nor being saved."""
    return tracked.offer is not None and tracked.offer.end >= tracked.next_tokens
