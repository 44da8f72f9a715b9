"""Saves in flight: their jobs, pins and revocation words, until every worker has reported them.

A save is sent in the step that computes its last block, or later; the agent waits for that step.
Its blocks are pinned until the workers report it, so the request may end earlier. A save can be
revoked: the agent reads the revocation word after it has copied and before it stores, so the pins
can be released at once.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvagent.messages import BlockStatus
from kvagent.packing import packed
from kvagent.vllm.counters import SaveCounts
from kvagent.vllm.plan import REVOKES, Outcome, SaveJob
from kvagent.vllm.scheduler.keeps import note_stored
from kvagent.vllm.scheduler.lazy import LazyBatch
from kvagent.vllm.scheduler.save_plan import SaveBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.keys.adapters import Adapters
    from kvagent.vllm.nodes.orders import Target
    from kvagent.vllm.scheduler.requests import Blocks, Tables, Tracked
    from kvagent.vllm.scheduler.save_plan import SaveRun

HOLD_S = 5.0  # the longest that a save may pin its blocks; one step counts for half of it at most

_STORED = bytes((BlockStatus.OK, BlockStatus.EXISTS, BlockStatus.IN_PROGRESS))
_LATER = (BlockStatus.BUSY, BlockStatus.REVOKED, BlockStatus.FAILED, BlockStatus.TIMED_OUT, BlockStatus.OFF)


@dataclass(eq=False, slots=True)
class _Save:
    job: int
    revoke: int
    runs: list[SaveRun]
    blocks: list[Any]
    since: float
    outcome: Outcome | None = None
    pinned: bool = True
    stale: bool = False
    """Whether its blocks depend on old weights, so that none is offered again."""

    @property
    def deliver(self) -> bool:
        """Return whether it saves offered requests."""
        return bool(self.runs) and self.runs[0].deliver

    @property
    def near_eviction(self) -> bool:
        """Return whether it saves blocks whose eviction came near (lazy)."""
        return bool(self.runs) and bool(self.runs[0].unsaved)


@dataclass(eq=False)
class Saves:
    """The saves in flight. ``revoke_now`` sets a word in all workers at once; it may be None."""

    geometry: Geometry
    world: int
    blocks: Blocks
    tables: Tables
    revoke_now: Callable[[int], None] | None = None
    watermark: int = 0
    """With lazy offload, how many blocks before its eviction a block is saved; 0: at once."""
    notes: bool = False
    """Whether some request has to know which blocks it was the first to store."""
    counts: SaveCounts = field(default_factory=SaveCounts)
    adapters: Adapters | None = None
    """The engine's LoRA adapters."""
    following: int = 0
    """How many tokens after a block its bytes depend on."""

    def __post_init__(self) -> None:
        self.lazy = None
        """The batch, if it is a lazy one."""
        if self.watermark:
            self.lazy = LazyBatch(self.geometry, self.blocks, self.tables, self.watermark, self.counts)
        self.batch: SaveBatch = self.lazy or SaveBatch(self.geometry, self.blocks, self.tables)
        """The contents of the next jobs. Callers that add to it also pin."""
        self.last_job = 0
        """The job that was sent last."""
        self.now = 0.0
        """A clock that advances by at most half of HOLD_S per step."""
        self._inflight: OrderedDict[int, _Save] = OrderedDict()
        self._words = list(range(REVOKES))
        self._last = 0.0

    def busy(self) -> bool:
        """Return whether saves are in flight or wait to be sent."""
        return bool(self._inflight or self.batch.open)

    def begin(self, now: float) -> None:
        """Begin a step."""
        self.now += min(now - self._last, HOLD_S / 2)  # the agent handles a save only after its step has ended
        self._last = now

    def ready(self) -> bool:
        """Return whether saves can be planned now. Called before blocks are added."""
        return bool(self._words) and (self.batch.room() > 0 or self.blocks.room(deliver=True) > 0)

    def finish(
        self, jobs: Callable[[], int], boot: bytes, epoch: int, space: bytes = b"", elsewhere: tuple[Target, ...] = ()
    ) -> list[SaveJob]:  # fmt: skip
        """Return the jobs of what was added and pinned."""
        planned = []
        batch = self.batch
        while self._words and not batch.empty():
            runs, blocks = batch.take_job()
            sections = packed([run.section for run in runs], len(blocks))
            save = _Save(jobs(), self._words.pop(), runs, blocks, self.now)
            self._inflight[save.job] = save
            self.last_job = save.job
            self.counts.planned += len(blocks)
            of = self._adapters_of(runs)
            planned.append(SaveJob(save.job, boot, epoch, save.revoke, sections, space, of, elsewhere))
        if not batch.empty():
            self.drop()  # no free revocation word
        return planned

    def _adapters_of(self, runs: Sequence[SaveRun]) -> tuple[tuple[int, int], ...]:
        """Return the LoRA adapters that may have computed the blocks of a job."""
        if self.adapters is None or not self.adapters.known:
            return ()
        if any(run.tracked is None for run in runs):
            return self.adapters.all()
        return tuple({one for run in runs if run.tracked is not None for one in run.tracked.adapters})

    def drop(self) -> None:
        """Discard what was added and not sent."""
        for run in self.batch.take_all():
            self._again(run, 0)
            self._unpin(run.blocks, deliver=run.deliver, near_eviction=bool(run.unsaved))

    def report(self, job: int, outcome: Outcome) -> bool:
        """Handle a report of one or more workers. Return whether the job is a save."""
        save = self._inflight.get(job)
        if save is None:
            return False
        save.outcome = outcome if save.outcome is None else save.outcome.join(outcome)
        if save.outcome.ranks >= self.world:
            del self._inflight[job]
            self._over(save, save.outcome.statuses)
        return True

    def settled(self, job: int) -> bool:
        """Return whether all saves up to this job have been reported."""
        return next(iter(self._inflight), job + 1) > job

    def end(self, tracked: Tracked, tokens: int) -> None:
        """Save the first ``tokens`` of a request that ends now, as far as there is room. What finds
        none is not saved; with lazy offload it is noted.
        """
        if self.lazy is not None or self.ready():
            self.batch.add(tracked, tokens)
            self.batch.add_again(tracked, tokens)  # last: most of it is in the agent
            self.batch.pin()
        if tokens < tracked.next_tokens:
            return
        if self.lazy is not None:
            self.lazy.keep_rest(tracked, tokens)
        elif tracked.offer is None and self.blocks.max_saving:
            self.counts.missed += self.batch.lacking(tracked, tokens)

    def clear_left(self) -> None:
        """Save nothing of what is noted of ended requests, and nothing in flight again: all of it
        depends on old weights.
        """
        for save in self._inflight.values():
            save.stale = True
        if self.lazy is not None:
            self.lazy.clear_unsaved()

    def revoke(self, *, offers: bool = False, in_use: bool = True) -> list[int]:
        """Revoke all saves, those of offered requests only with ``offers``, and only with
        ``in_use`` those all of whose blocks requests use: these would not be free.

        Return their jobs; their blocks are free from the next step on.
        """
        revoked: list[int] = []
        for save in self._inflight.values():
            if save.pinned and (offers or not save.deliver) and (in_use or _holds(save.blocks)):
                revoked.append(save.job)
                self._revoke_save(save)
        return revoked

    def revoke_overdue(self) -> list[int]:
        """Revoke the saves that have been in flight for too long."""
        overdue: list[int] = []
        for save in self._inflight.values():
            if save.since + HOLD_S > self.now:
                break
            if save.pinned:
                overdue.append(save.job)
                self._revoke_save(save)
        return overdue

    def revoke_at_once(self) -> list[int]:
        """Revoke all saves between two steps if the words are mapped, else none."""
        self.drop()
        return [] if self.revoke_now is None else self.revoke(offers=True)

    def _over(self, save: _Save, statuses: bytes) -> None:
        self._words.append(save.revoke)
        if self.notes:
            note_stored(save.runs, statuses)
        if save.pinned and save.deliver and not save.stale and BlockStatus.IN_PROGRESS in statuses:
            statuses = self._confirm(save, statuses)
        if save.pinned:
            self._unpin(save.blocks, deliver=save.deliver, near_eviction=save.near_eviction)
        if len(statuses) == len(save.blocks) and not statuses.translate(None, _STORED):  # the usual case
            stored = statuses.count(BlockStatus.OK)
            self.counts.stored += stored
            self.counts.existed += len(statuses) - stored
            return
        self._partly_over(save, statuses)

    def _unpin(self, blocks: Sequence[Any], *, deliver: bool, near_eviction: bool) -> None:
        if near_eviction and self.lazy is not None:
            self.lazy.release(blocks)
        else:
            self.blocks.unpin(blocks, deliver=deliver)

    def _partly_over(self, save: _Save, statuses: bytes) -> None:
        left = iter(statuses)
        for run in save.runs:
            again = not save.pinned  # since it was revoked
            for i in range(len(run.hashes)):
                status = next(left, BlockStatus.FAILED)
                self._count(status)
                if not again and status in _LATER:
                    again = True
                    self._again(run, i)

    def _confirm(self, save: _Save, statuses: bytes) -> bytes:
        """Offer those runs of offered requests again that have blocks which another engine is
        saving: they are not stored yet, and may never be.

        Return the statuses of the others, which stay in the save.
        """
        over: list[SaveRun] = []
        rest = b""
        at = 0
        for run in save.runs:
            own, at = statuses[at : at + len(run.hashes)], at + len(run.hashes)
            offer = run.tracked.offer if run.tracked is not None else None
            if offer is not None and BlockStatus.IN_PROGRESS in own:
                offer.confirm_until = offer.confirm_until or self.now + HOLD_S
                if self.now < offer.confirm_until:
                    self.batch.open.append(run)
                    offer.through = -1
                    continue
            over.append(run)
            rest += own
        save.runs = over
        save.blocks = [block for run in over for block in run.blocks]
        return rest

    def _revoke_save(self, save: _Save) -> None:
        if self.revoke_now is not None:
            self.revoke_now(save.revoke)
        save.pinned = False
        self.counts.revoked += len(save.blocks)
        for run in save.runs:
            self._again(run, 0)  # now: their request may end, or their contents change, before the report
        self._unpin(save.blocks, deliver=save.deliver, near_eviction=save.near_eviction)

    def _again(self, run: SaveRun, i: int) -> None:
        """Offer the blocks of a run from the i-th on again: those of no request when their eviction
        comes near again, those for a decode engine as soon as their request is looked at, and
        others when their request ends.
        """
        tracked = run.tracked
        if tracked is None:
            if self.lazy is not None:
                self.lazy.restore(run, i)
        elif tracked.offer is None:
            tracked.again.append((run.group, run.first + i, run.first + len(run.hashes)))
        else:
            tracked.cursor[run.group] = min(tracked.cursor[run.group], run.first + i)
            tracked.next_tokens = 0

    def _count(self, status: int) -> None:
        if status == BlockStatus.OK:
            self.counts.stored += 1
        elif status in _STORED:
            self.counts.existed += 1
        elif status != BlockStatus.REVOKED:
            self.counts.refused += 1


def _holds(blocks: Sequence[Any]) -> bool:
    """Return whether nothing but a pin keeps some of these blocks from being free."""
    return any(block.ref_cnt == 1 for block in blocks)
