"""Blocks of requests that are to be kept for a time (``kvagent.pin``), or to be dropped after one
unless something uses them (``kvagent.ttl``).

The agent is told at a request's end, once its saves have ended. Both times begin then. A request's
``ttl`` concerns only what it was the first to store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvagent.limits import MAX_JOB_BLOCKS
from kvagent.messages import BlockStatus, Keep
from kvagent.registration import parts
from kvagent.vllm.hooks import Guest, Reset
from kvagent.vllm.scheduler.requests import Hurry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.vllm.plan import StepPlan
    from kvagent.vllm.scheduler.requests import Tracked

MAX_ENDED = 1024  # ended requests that wait for their saves; the oldest is forgotten for one more


@dataclass(eq=False, slots=True)
class _Kept:
    """A request whose blocks are kept for ``pin_ms``, or dropped after ``ttl_ms``; 0: not."""

    tracked: Tracked
    pin_ms: int
    ttl_ms: int
    first: list[tuple[int, bytes]] = field(default_factory=list)
    """With ``ttl_ms``: the blocks that it was the first to store, with their groups."""
    stored: Sequence[Sequence[bytes]] = ()
    """Once it has ended: of its blocks, those that may be stored, by group."""


class Keeps(Guest):
    """The requests of one engine whose blocks are kept or dropped."""

    def __init__(self) -> None:
        self._running: dict[str, _Kept] = {}
        self._ended: list[_Kept] = []  # whose saves have not

    def add(self, tracked: Tracked, pin_ms: int, ttl_ms: int) -> None:
        """Add a request that has arrived."""
        self._running[tracked.request.request_id] = _Kept(tracked, pin_ms, ttl_ms)
        tracked.saving.hurry = max(tracked.saving.hurry, Hurry.AT_ONCE)

    def planned(self, plan: StepPlan, output: Any, now: float) -> None:  # noqa: ARG002
        """Tell the agent of those whose last saves are over."""
        self._settle()

    def heard(self, report: Any, over: Sequence[tuple[Sequence[Any], bytes]], now: float) -> None:  # noqa: ARG002
        """Record which blocks requests with a time to live were the first to store."""
        if not (self._running or self._ended):
            return
        kept = {one.tracked: one for one in (*self._running.values(), *self._ended) if one.ttl_ms}
        for runs, statuses in over if kept else ():
            at = 0
            for run in runs:
                some, at = statuses[at : at + len(run.hashes)], at + len(run.hashes)
                if run.tracked in kept:
                    stored = zip(run.hashes, some, strict=False)
                    kept[run.tracked].first += [(run.group, key) for key, one in stored if one == BlockStatus.OK]
        self._settle()

    def ended(self, tracked: Tracked) -> None:
        """Handle the end of a request, whose last blocks were added to the next saves."""
        kept = self._running.pop(tracked.request.request_id, None)
        if kept is None or tracked.stale or tracked.barred:
            return
        request, geometry = tracked.request, self.side.geometry
        most = min(request.num_computed_tokens, request.num_tokens)
        steps = [(spec.block_tokens, geometry.scale(group)) for group, spec in enumerate(geometry.groups)]
        kept.stored = [request.block_hashes[scale - 1 : most // size * scale : scale] for size, scale in steps]
        if len(self._ended) == MAX_ENDED:
            del self._ended[0]
            self.side.counts.keeps_lost += 1
        self._ended.append(kept)
        self._settle()

    def reset(self, what: Reset) -> None:
        """Forget all requests that have ended, since their blocks belong to old weights."""
        if what is Reset.WEIGHTS:
            self._ended.clear()

    def _settle(self) -> None:
        """Tell the agent of the blocks whose saves have ended."""
        if not self._ended:
            return
        left = [kept for kept in self._ended if not self.side.saves.settled(kept.tracked)]
        over, self._ended = [kept for kept in self._ended if kept not in left], left
        for kept in over:
            self.side.counts.keeps_lost += not self._tell(kept)

    def _tell(self, kept: _Kept) -> bool:
        """Tell the agent of an ended request. Return whether it was told all."""
        told, agent = True, self.side.agent
        if kept.pin_ms:
            for group, hashes in enumerate(kept.stored):
                told &= all(map(agent.send, keeps(group, hashes, kept.pin_ms, 0)))
        if kept.ttl_ms:
            # A pin is a use, and so is told first; the blocks stay at least as long.
            for group in range(len(kept.stored)):
                first = [key for of, key in kept.first if of == group]
                told &= all(map(agent.send, keeps(group, first, 0, max(kept.ttl_ms, kept.pin_ms))))
        return told


def keeps(group: int, hashes: Sequence[bytes], pin_ms: int, ttl_ms: int) -> list[Keep]:
    """Return the messages that ask to keep blocks, or to drop them after a time."""
    return [Keep(group, len(part[0]), b"".join(part), pin_ms, ttl_ms) for part in parts(hashes, MAX_JOB_BLOCKS)]
