"""Saves in flight: their jobs, pins and revocation words, until every worker has reported them.

A save is sent in the step that computes its last block, or later; the agent waits for that step.
Its blocks are pinned until the workers report it, so the request may end earlier. A save can be
revoked: the agent reads the revocation word after it has copied and before it stores, so the pins
can be released at once.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvagent.messages import BlockStatus
from kvagent.packing import packed
from kvagent.vllm.counters import SaveCounts
from kvagent.vllm.plan import REVOKES, Outcome, SaveJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.vllm.plan import WorkerInfo
    from kvagent.vllm.scheduler.requests import Blocks, Tracked
    from kvagent.vllm.scheduler.save_plan import SaveBatch, SaveRun

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
    def awaited(self) -> bool:
        """Return whether another engine waits for its blocks."""
        return bool(self.runs) and self.runs[0].awaited

    @property
    def of_requests(self) -> bool:
        """Return whether its blocks are those of requests."""
        return not self.runs or self.runs[0].tracked is not None


class Saves:
    """The saves in flight."""

    def __init__(
        self, batch: SaveBatch, world: int, blocks: Blocks, counts: SaveCounts | None = None,
        revoke_now: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self.batch = batch
        """The contents of the next jobs. Callers that add to it also pin."""
        self.blocks = blocks
        self.counts = counts or SaveCounts()
        self.revoke_now = revoke_now
        """Sets a revocation word in all workers at once; None if it cannot."""
        self.over: list[tuple[Sequence[SaveRun], bytes]] = []
        """Runs of saves that were over with the last report, and the statuses of their blocks."""
        self.now = 0.0
        """A clock that advances by at most half of HOLD_S per step."""
        self._world = world
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
        return bool(self._words)

    def finish(
        self, jobs: Callable[[], int], boot: bytes, epoch: int, space: bytes = b"", elsewhere: tuple[Any, ...] = ()
    ) -> list[SaveJob]:  # fmt: skip
        """Return the jobs of what was added and pinned."""
        planned = []
        batch = self.batch
        while self._words and not batch.empty():
            runs, blocks = batch.take_job()
            sections = packed([run.section for run in runs], len(blocks))
            save = _Save(jobs(), self._words.pop(), runs, blocks, self.now)
            self._inflight[save.job] = save
            for run in runs:
                if run.tracked is not None:
                    run.tracked.saving.job = save.job
            self.counts.planned += len(blocks)
            depends = tuple({one for run in runs for one in run.depends})
            planned.append(SaveJob(save.job, boot, epoch, save.revoke, sections, space, depends, elsewhere))
        if not batch.empty():
            self.drop()  # no free revocation word
        return planned

    def drop(self) -> None:
        """Discard what was added and not sent."""
        for run in self.batch.take_all():
            self._again(run, 0)
            self._unpin(run.blocks, awaited=run.awaited, of_requests=run.tracked is not None)

    def report(self, job: int, outcome: Outcome) -> bool:
        """Handle a report of one or more workers. Return whether the job is a save."""
        save = self._inflight.get(job)
        if save is None:
            return False
        save.outcome = outcome if save.outcome is None else save.outcome.join(outcome)
        if save.outcome.ranks >= self._world:
            del self._inflight[job]
            self._over(save, save.outcome.statuses)
        return True

    def settled(self, tracked: Tracked) -> bool:
        """Return whether all saves are over that have blocks of a request, or that it shares with
        requests before it.
        """
        if any(run.tracked is tracked for run in self.batch.open):
            return False
        return next(iter(self._inflight), tracked.saving.job + 1) > tracked.saving.job

    def end(self, tracked: Tracked, tokens: int) -> None:
        """Save the first ``tokens`` of a request that ends now, as far as there is room."""
        self.batch.end(tracked, tokens, ready=self.ready())

    def clear_left(self) -> None:
        """Save nothing of what is noted of ended requests, and nothing in flight again: all of it
        depends on old weights.
        """
        for save in self._inflight.values():
            save.stale = True
        self.batch.clear()

    def revoke(self, *, awaited: bool = False, in_use: bool = True) -> list[int]:
        """Revoke all saves, those that another engine awaits only with ``awaited``, and only with
        ``in_use`` those all of whose blocks requests use: these would not be free.

        Return their jobs; their blocks are free from the next step on.
        """
        revoked: list[int] = []
        for save in self._inflight.values():
            if save.pinned and (awaited or not save.awaited) and (in_use or _holds(save.blocks)):
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
        return [] if self.revoke_now is None else self.revoke(awaited=True)

    def _over(self, save: _Save, statuses: bytes) -> None:
        self._words.append(save.revoke)
        self.over.append((save.runs, statuses))
        if save.pinned and save.awaited and not save.stale and BlockStatus.IN_PROGRESS in statuses:
            statuses = self._confirm(save, statuses)
        if save.pinned:
            self._unpin(save.blocks, awaited=save.awaited, of_requests=save.of_requests)
        if len(statuses) == len(save.blocks) and not statuses.translate(None, _STORED):  # the usual case
            stored = statuses.count(BlockStatus.OK)
            self.counts.stored += stored
            self.counts.existed += len(statuses) - stored
            return
        self._partly_over(save, statuses)

    def _unpin(self, blocks: Sequence[Any], *, awaited: bool, of_requests: bool) -> None:
        if of_requests:
            self.blocks.unpin(blocks, awaited=awaited)
        else:
            self.batch.release(blocks)

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
        """Offer those runs of awaited requests again that have blocks which another engine is
        saving: they are not stored yet, and may never be.

        Return the statuses of the others, which stay in the save.
        """
        over: list[SaveRun] = []
        rest = b""
        at = 0
        for run in save.runs:
            own, at = statuses[at : at + len(run.hashes)], at + len(run.hashes)
            if run.tracked is not None and BlockStatus.IN_PROGRESS in own:
                saving = run.tracked.saving
                saving.confirm_until = saving.confirm_until or self.now + HOLD_S
                if self.now < saving.confirm_until:
                    self.batch.open.append(run)
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
        self._unpin(save.blocks, awaited=save.awaited, of_requests=save.of_requests)

    def _again(self, run: SaveRun, i: int) -> None:
        """Offer the blocks of a run from the i-th on again: those of no request as their batch
        says, awaited ones as soon as their request is looked at, and others when it ends.
        """
        if run.tracked is None:
            self.batch.restore(run, i)
            return
        saving = run.tracked.saving
        if run.tracked.awaited:
            saving.cursor[run.group] = min(saving.cursor[run.group], run.first + i)
            saving.next_tokens = 0
        else:
            saving.again.append((run.group, run.first + i, run.first + len(run.hashes)))

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


class WorkerRevocation:
    """The revocation words of all workers, mapped through /proc.

    OSError if one cannot be mapped: a worker in another container has another number here, or is
    not seen. ``close`` unmaps them.
    """

    def __init__(self, workers: Sequence[WorkerInfo]) -> None:
        self._maps: list[mmap.mmap] = []
        self._words: list[memoryview] = []
        try:
            for worker in workers:
                _check(Path(worker.path).stat(), worker)  # before a foreign file is opened
                fd = os.open(worker.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    _check(os.fstat(fd), worker)
                    self._maps.append(mmap.mmap(fd, worker.size))
                finally:
                    os.close(fd)
                end = worker.revoke_off + 4 * worker.revokes
                self._words.append(memoryview(self._maps[-1])[worker.revoke_off : end].cast("I"))
        except BaseException:
            self.close()
            raise

    def revoke(self, index: int) -> None:
        """Revoke the save with this word, in every worker."""
        for words in self._words:
            words[index] = 1

    def close(self) -> None:
        """Unmap the words. Repeated calls do nothing."""
        for words in self._words:
            words.release()
        for mapped in self._maps:
            mapped.close()
        self._words, self._maps = [], []


def _check(found: os.stat_result, worker: WorkerInfo) -> None:
    if (found.st_dev, found.st_ino) != worker.file or found.st_size != worker.size:
        raise OSError(errno.ESTALE, "another file than the worker's", worker.path)
