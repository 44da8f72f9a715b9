"""Saves: which blocks a step saves, and the jobs, pins and revocation words of those in flight.

A request that computes a part of its prompt is looked at in that step. The others take turns: each
is looked at once in RUN_STEPS steps, so that the blocks of its answer are saved in runs, and all
turns are in one of SEND_STEPS steps, so that one message carries their blocks and wakes the agent
once. Each full block is offered once; what the agent refuses is offered again when its request
ends, and so is what the request found in the engine's own cache: the request that computed it has
offered it, perhaps to an agent that has lost it.

A save is sent in the step that computes its last block, or later; the agent waits for that step.
Its blocks are pinned until every worker has reported it, so the request may end earlier. A save can
be revoked: the agent reads the revocation word after it has copied and before it stores, so the
pins can be released at once.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvagent.limits import MAX_JOB_BLOCKS, MAX_SECTIONS
from kvagent.messages import BlockStatus
from kvagent.vllm.counters import SaveCounts
from kvagent.vllm.plan import REVOKES, SaveJob
from kvagent.vllm.scheduler.requests import Phase
from kvagent.wire import packed, section

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.plan import Depends, WorkerInfo
    from kvagent.vllm.scheduler.requests import Blocks, Tracked

    Named = Callable[[Tracked, int, int, int], None]


_NEVER = 1 << 62  # tokens


class SaveRun(NamedTuple):
    """One section of a job: consecutive blocks of one group of a request, beginning with block
    ``first``.
    """

    tracked: Tracked | None
    """None: of no request."""
    group: int
    first: int
    hashes: Sequence[bytes]
    blocks: Sequence[Any]
    section: bytes
    awaited: bool = False
    """Whether another engine waits for its request's blocks."""
    depends: Depends = ()
    """What its blocks depend on."""
    notes: Sequence[Any] = ()
    """What a batch of another kind knows of each block."""


class SaveBatch:
    """Blocks that were added but not yet sent.

    ``pin`` pins the blocks added since the last call; a job that is taken keeps its blocks pinned.
    """

    def __init__(self, geometry: Geometry, blocks: Blocks, counts: SaveCounts) -> None:
        self.job_blocks = MAX_JOB_BLOCKS
        """The most blocks that the agent accepts in one job."""
        self.open: list[SaveRun] = []
        """The runs that were added and not taken."""
        self.named: list[Named] = []
        """Are told which blocks of a request are to be saved: group, first block, and number."""
        self._blocks = blocks
        self._counts = counts
        self._following = geometry.following
        self._groups = [
            (group, spec.block_tokens, geometry.scale(group), bool(spec.window))
            for group, spec in enumerate(geometry.groups)
        ]
        self._positional = [one for one in self._groups if one[0] not in geometry.states]
        self._unpinned: list[Any] = []  # blocks added since the last pin
        self._awaited: list[Any] = []  # likewise, of requests that another engine awaits

    def room(self, tracked: Tracked | None = None) -> int:
        """Return how many more blocks may be added, of this request if one is given."""
        if tracked is not None and tracked.awaited:
            return _NEVER
        return self._blocks.room() - len(self._unpinned)

    def begin(self, tracked: Tracked) -> None:
        """Begin with a request that is admitted: what it found in the engine's own cache is offered
        at its end, unless another engine waits for it, and what it loaded is not.
        """
        if not tracked.awaited:
            first, saving = max(tracked.own, tracked.loaded[1]), tracked.saving
            saving.again = [(group, 0, tracked.own // size) for group, size, _, _ in self._positional if tracked.own]
            saving.cursor = [
                max(cursor, first // size) for cursor, (_, size, _, _) in zip(saving.cursor, self._groups, strict=True)
            ]

    def add(self, tracked: Tracked, tokens: int) -> None:
        """Add what the first ``tokens`` of a request leave to be saved, as far as there is room.

        States are added by themselves (states).
        """
        hashes, cursor = len(tracked.request.block_hashes), tracked.saving.cursor
        least = _NEVER
        for group, size, scale, _ in self._positional:
            begin = self._add(tracked, group, cursor[group], min(tokens // size, hashes // scale))
            cursor[group] = begin
            least = min(least, (begin + 1) * size)
        tracked.saving.next_tokens = least

    def end(self, tracked: Tracked, tokens: int, *, ready: bool) -> None:
        """Add what the first ``tokens`` of a request that ends now leave to be saved, if the batch
        is ``ready``. What finds no room is not saved.
        """
        if ready:
            self.add(tracked, tokens)
            self.add_again(tracked, tokens)  # last: most of it is in the agent
            self.pin()
        if tokens >= tracked.saving.next_tokens and not tracked.awaited and self._blocks.max_saving:
            hashes = len(tracked.request.block_hashes)
            ends = [(group, min(tokens // size, hashes // scale)) for group, size, scale, _ in self._positional]
            self._counts.missed += sum(max(end - tracked.saving.cursor[group], 0) for group, end in ends)

    def add_again(self, tracked: Tracked, tokens: int) -> None:
        """Add what is offered at the end of a request, of its first ``tokens``."""
        for group, begin, end in tracked.saving.again:
            self._add(tracked, group, begin, min(end, tokens // self._groups[group][1]))
        tracked.saving.again = []

    def due(self) -> bool:
        """Return whether there may be blocks of no request to save. Called in every step, before
        blocks are added.
        """
        return False

    def collect(self) -> None:
        """Add blocks of no request that are to be saved now, and pin them."""

    def restore(self, run: SaveRun, first: int) -> None:
        """Handle that the blocks of a run of no request were not saved, from the first one on."""

    def release(self, run_blocks: Sequence[Any]) -> None:
        """Release the references to blocks of no request."""
        self._blocks.unpin(run_blocks)

    def clear(self) -> None:
        """Save no blocks of no request that hold what they hold now."""

    def pin(self) -> None:
        """Pin the blocks that were added."""
        if self._unpinned:
            self._blocks.pin(self._unpinned)
            self._unpinned = []
        if self._awaited:
            self._blocks.pin(self._awaited, awaited=True)
            self._awaited = []

    def take_job(self) -> tuple[list[SaveRun], list[Any]]:
        """Return as many runs as one job holds, and their blocks.

        A job is revoked and released as a whole, so runs of awaited requests, and of no request,
        have jobs of their own.
        """
        blocks: list[Any] = []
        count = 0
        for run in self.open[:MAX_SECTIONS]:
            other = run.awaited != self.open[0].awaited or (run.tracked is None) != (self.open[0].tracked is None)
            if blocks and (other or len(blocks) + len(run.blocks) > self.job_blocks):
                break
            blocks += run.blocks
            count += 1
        runs, self.open = self.open[:count], self.open[count:]
        return runs, blocks

    def take_all(self) -> list[SaveRun]:
        """Return all runs, pinned."""
        self.pin()
        taken, self.open = self.open, []
        return taken

    def take(self, tracked: Tracked, group: int, first: int, keys: list[bytes], blocks: Sequence[Any]) -> None:
        """Add a run of blocks as it is, for which there is room."""
        scale, hashes = self._groups[group][2], tracked.request.block_hashes
        for named in self.named:
            named(tracked, group, first, len(keys))
        if tracked.awaited:
            self._awaited += blocks
        else:
            self._unpinned += blocks
        for at in range(0, len(keys), self.job_blocks):
            i = first + at
            parent = hashes[i * scale - 1] if i else b""
            some, these = keys[at : at + self.job_blocks], blocks[at : at + self.job_blocks]
            data = section(group, parent, some, [block.block_id for block in these])
            self.open.append(SaveRun(tracked, group, i, some, these, data, tracked.awaited, tracked.depends))

    def _add(self, tracked: Tracked, group: int, begin: int, end: int) -> int:
        """Add a request's blocks from ``begin`` to ``end`` as far as there is room.

        Return the new cursor: the first block that must wait.
        """
        _, size, scale, window = self._groups[group]
        if self._following:  # what the engine's own cache has may go by another next token
            begin = max(begin, tracked.own // size)
        if begin >= end:
            return begin
        hashes = tracked.request.block_hashes
        table = self._blocks.table(tracked.request.request_id, group, begin, end)
        keys = hashes[(begin + 1) * scale - 1 : (begin + len(table)) * scale : scale]
        if window or self._blocks.has_stale or len(keys) > self.room(tracked):
            return self._pick(tracked, group, begin, keys, table)
        if keys:
            self.take(tracked, group, begin, keys, table)
        return begin + len(keys)

    def _pick(self, tracked: Tracked, group: int, begin: int, keys: list[bytes], table: Sequence[Any]) -> int:
        """Add those blocks of a run that need saving.

        Return the new cursor: the first block that must wait.
        """
        room = self.room(tracked)
        first = 0  # start of the current run
        for i, block in enumerate(table):
            if block.is_null or self._blocks.is_stale(block):
                if first < i:
                    self.take(tracked, group, begin + first, keys[first:i], table[first:i])
                first = i + 1
            elif room <= 0:
                keys = keys[:i]
                break
            else:
                room -= 1
        if first < len(keys):
            self.take(tracked, group, begin + first, keys[first:], table[first : len(keys)])
        return begin + len(keys)


DECODE_TOKENS = 8  # a request that computes more tokens than this in a step is looked at in that step
RUN_STEPS = 128  # steps in which each other request is looked at once
SEND_STEPS = 8  # in one of so many steps some of them are


class SaveSchedule:
    """Which requests are looked at in a step."""

    def __init__(self) -> None:
        self._now: dict[Tracked, None] = {}
        self._turns: OrderedDict[Tracked, None] = OrderedDict()  # all requests, in the order of their turns
        self._steps = 0
        self._share = 0  # of the next turn, in 1/RUN_STEPS

    def add(self, tracked: Tracked) -> None:
        """Look at a request in the next step, and from then on in its turns."""
        self._now[tracked] = None
        self._turns[tracked] = None

    def remove(self, tracked: Tracked) -> None:
        """Do not look at a request any more."""
        self._now.pop(tracked, None)
        self._turns.pop(tracked, None)

    def clear(self) -> None:
        """Remove all requests."""
        self._now.clear()
        self._turns.clear()

    def step(self, scheduled: Mapping[str, int], tracked_of: Mapping[str, Tracked], total: int = 0) -> None:
        """Begin a step.

        ``scheduled``: tokens by request, each at least one. ``total``: their sum, 0 if unknown.
        """
        self._steps += 1
        if total != len(scheduled) and max(scheduled.values(), default=0) > DECODE_TOKENS:
            for request, tokens in scheduled.items():
                if (
                    tokens > DECODE_TOKENS
                    and (tracked := tracked_of.get(request)) is not None
                    and tracked.phase == Phase.RUNNING
                ):
                    self.add(tracked)
        if self._steps % SEND_STEPS == 0:
            turns, self._share = divmod(self._share + len(self._turns) * SEND_STEPS, RUN_STEPS)
            for tracked in list(islice(self._turns, turns)):
                self._turns.move_to_end(tracked)
                self._now[tracked] = None

    def ready(self) -> bool:
        """Return whether there are requests to look at."""
        return bool(self._now)

    def take(self) -> list[Tracked]:
        """Return the requests to look at. The caller adds those again that must wait."""
        now, self._now = self._now, {}
        return list(now)


def collect_saves(
    schedule: SaveSchedule, batch: SaveBatch, scheduled: Mapping[str, int], *, following: int = 0, short: bool = False
) -> None:
    """Add the full blocks of requests to the batch; those without room are looked at again.

    ``scheduled``: the tokens that the step computes, by request. ``following``: of Geometry. While
    memory is ``short``, requests wait that no engine awaits.
    """
    left: list[Tracked] = []
    for tracked in schedule.take():
        if not tracked.saved:
            continue
        if short and not tracked.awaited:
            left.append(tracked)
            continue
        request, saving = tracked.request, tracked.saving
        tokens = min(final_tokens(request, scheduled.get(request.request_id, 0), following), saving.most)
        if tokens >= saving.next_tokens:
            batch.add(tracked, tokens)
            if tokens >= saving.next_tokens:  # there was no room
                left.append(tracked)
    batch.pin()
    for tracked in left:
        schedule.add(tracked)


def final_tokens(request: Any, scheduled: int, following: int = 0) -> int:
    """Return how many tokens have final KV once the step that computes ``scheduled`` more has
    ended, and are followed by so many whose value is known.

    Placeholders of async scheduling and draft tokens do not count: tokens past the certain ones may
    be discarded.
    """
    tokens: int = request.num_computed_tokens + scheduled - request.num_output_placeholders
    certain: int = request.num_tokens - following
    return certain if certain < tokens else tokens  # noqa: FURB136  min() takes three times as long


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
        self, batch: SaveBatch, blocks: Blocks, counts: SaveCounts | None = None,
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
        while self._words and batch.open:
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
        if batch.open:
            self.drop()  # no free revocation word
        return planned

    def drop(self) -> None:
        """Discard what was added and not sent."""
        for run in self.batch.take_all():
            self._again(run, 0)
            self._unpin(run.blocks, awaited=run.awaited, of_requests=run.tracked is not None)

    def report(self, job: int, statuses: bytes) -> bool:
        """Handle the end of a job in all workers. Return whether it is a save."""
        save = self._inflight.pop(job, None)
        if save is not None:
            self._over(save, statuses)
        return save is not None

    def settled(self, tracked: Tracked) -> bool:
        """Return whether all saves are over that have blocks of a request, or that it shares with
        requests before it.
        """
        if any(run.tracked is tracked for run in self.batch.open):
            return False
        return next(iter(self._inflight), tracked.saving.job + 1) > tracked.saving.job

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
