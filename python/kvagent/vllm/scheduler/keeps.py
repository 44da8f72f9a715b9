"""Blocks of requests that are to be kept for a time (``kvagent.pin``), or to be dropped after one
unless something uses them (``kvagent.ttl``).

The agent is told at a request's end, once its saves have ended. Both times begin then. A request's
``ttl`` concerns only what it was the first to store.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvagent.messages import BlockStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.vllm.counters import Counts
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.scheduler.agent_session import AgentSession
    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.save_plan import SaveRun
    from kvagent.vllm.scheduler.saves import Saves


MAX_ENDED = 1024  # ended requests that wait for their saves; the oldest is forgotten for one more


@dataclass(eq=False, slots=True)
class _Waiting:
    """What the agent is told of blocks once their saves have ended."""

    tell: Callable[[], bool]
    """Returns whether the agent was told all."""
    through: int = -1
    """The last job of their saves; -1 while some have yet to be sent."""


class Keeps:
    """The requests of one engine that have ended and of which the agent is not told yet."""

    def __init__(self, agent: AgentSession, geometry: Geometry, counts: Counts) -> None:
        self._agent = agent
        self._counts = counts
        self._groups = [(spec.block_tokens, geometry.scale(group)) for group, spec in enumerate(geometry.groups)]
        self.waiting: list[_Waiting] = []
        """Those of them whose saves have not ended."""

    def end(self, tracked: Tracked) -> None:
        """Handle the end of a request, whose last blocks were added to the next saves."""
        if tracked.stale or tracked.bypass or tracked.unkeyed or not (tracked.pin_ms or tracked.ttl_ms):
            return
        request = tracked.request
        tokens = min(request.num_computed_tokens, request.num_tokens)
        hashes = request.block_hashes
        stored = [hashes[scale - 1 : tokens // size * scale : scale] for size, scale in self._groups]
        self._add(partial(self._tell, tracked, stored))

    def settle(self, saves: Saves) -> None:
        """Tell the agent of the blocks whose saves have ended. Called after saves were sent or
        reported.
        """
        self.waiting = [waiting for waiting in self.waiting if not self._settled(waiting, saves)]

    def clear(self) -> None:
        """Forget all requests, since their blocks belong to old weights."""
        self.waiting.clear()

    def _add(self, tell: Callable[[], bool]) -> None:
        if len(self.waiting) == MAX_ENDED:
            del self.waiting[0]
            self._counts.keeps_lost += 1
        self.waiting.append(_Waiting(tell))

    def _settled(self, waiting: _Waiting, saves: Saves) -> bool:
        if waiting.through < 0 and saves.batch.empty():
            waiting.through = saves.last_job
        if waiting.through < 0 or not saves.settled(waiting.through):
            return False
        self._counts.keeps_lost += not waiting.tell()
        return True

    def _tell(self, tracked: Tracked, stored: Sequence[Sequence[bytes]]) -> bool:
        """Tell the agent of an ended request, of whose blocks these may be stored, by group."""
        told = True
        if tracked.pin_ms:
            for group, hashes in enumerate(stored):
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
