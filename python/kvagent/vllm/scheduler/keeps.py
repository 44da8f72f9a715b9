"""Blocks of requests that are to be kept for a time (``kvagent.pin``), or to be dropped after one
unless something uses them (``kvagent.ttl``).

The agent is told at a request's end, once its saves have ended. Both times begin then. A request's
``ttl`` concerns only what it was the first to store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvagent.messages import BlockStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.vllm.counters import Counts
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.scheduler.agent_session import AgentSession
    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.save_plan import SaveRun
    from kvagent.vllm.scheduler.saves import Saves


MAX_ENDED = 1024  # requests that wait for their saves; the oldest is forgotten for one more


@dataclass(eq=False, slots=True)
class _Ended:
    """A request that has ended, whose saves may not have."""

    tracked: Tracked
    hashes: list[Sequence[bytes]]
    """By group, its blocks that may be stored."""
    through: int = -1
    """The last job of its saves; -1 while some have yet to be sent."""


class Keeps:
    """The requests of one engine that have ended and of which the agent is not told yet."""

    def __init__(self, agent: AgentSession, geometry: Geometry, counts: Counts) -> None:
        self._agent = agent
        self._counts = counts
        self._groups = [(spec.block_tokens, geometry.scale(group)) for group, spec in enumerate(geometry.groups)]
        self._ended: list[_Ended] = []

    def end(self, tracked: Tracked) -> None:
        """Handle the end of a request, whose last blocks were added to the next saves."""
        if tracked.stale or tracked.bypass or tracked.unkeyed or not (tracked.pin_ms or tracked.ttl_ms):
            return
        request = tracked.request
        tokens = min(request.num_computed_tokens, request.num_tokens)
        hashes = request.block_hashes
        stored = [hashes[scale - 1 : tokens // size * scale : scale] for size, scale in self._groups]
        if len(self._ended) == MAX_ENDED:
            del self._ended[0]
            self._counts.keeps_lost += 1
        self._ended.append(_Ended(tracked, stored))

    def settle(self, saves: Saves) -> None:
        """Tell the agent of the requests whose saves have ended. Called after saves were sent or
        reported.
        """
        if self._ended:
            self._ended = [ended for ended in self._ended if not self._settled(ended, saves)]

    def clear(self) -> None:
        """Forget all requests, since their blocks belong to old weights."""
        self._ended.clear()

    def _settled(self, ended: _Ended, saves: Saves) -> bool:
        if ended.through < 0 and saves.batch.empty():
            ended.through = saves.last_job
        if ended.through < 0 or not saves.settled(ended.through):
            return False
        self._counts.keeps_lost += not self._tell(ended)
        return True

    def _tell(self, ended: _Ended) -> bool:
        """Tell the agent, and return whether it was told all."""
        tracked, told = ended.tracked, True
        if tracked.pin_ms:
            for group, hashes in enumerate(ended.hashes):
                told &= self._agent.keep(group, hashes, tracked.pin_ms, 0)
        if tracked.ttl_ms:
            # A pin is a use, and so is told first; the blocks stay at least as long.
            for group in range(len(self._groups)):
                first = [key for of, key in tracked.stored_first if of == group]
                told &= self._agent.keep(group, first, 0, max(tracked.ttl_ms, tracked.pin_ms))
        return told


def note_stored(runs: Sequence[SaveRun], statuses: bytes) -> None:
    """Record which blocks requests with a time to live were the first to store."""
    at = 0
    for run in runs:
        some = statuses[at : at + len(run.hashes)]
        at += len(run.hashes)
        if run.tracked is not None and run.tracked.ttl_ms:
            stored = zip(run.hashes, some, strict=False)
            run.tracked.stored_first += [(run.group, key) for key, status in stored if status == BlockStatus.OK]
