"""Saves: which blocks a step saves, and the jobs, pins and revocation words of those in flight.

A request that computes a part of its prompt is looked at in that step. The others take turns: each
is looked at once in RUN_STEPS steps, so that the blocks of its answer are saved in runs, and all
turns are in one of SEND_STEPS steps, so that one message carries their blocks and wakes the agent
once. Each full block is offered once; what the agent refuses is offered again when its request
ends, and so is what the request found in the engine's own cache: the request that computed it has
offered it, perhaps to an agent that has lost it.

A save is sent in the step that computes its last block, or later; the agent waits for that step.
Its blocks are pinned until every worker has reported it, so the request may end earlier. A save can
be revoked: its pins are released at once, and the next plan has the workers set its revocation word
before their step. The agent reads that after it has copied and before it stores.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from kvagent.limits import MAX_JOB_BLOCKS, MAX_SECTIONS
from kvagent.messages import BlockStatus
from kvagent.vllm.plan import REVOKES, SaveJob
from kvagent.vllm.scheduler.requests import Phase
from kvagent.wire import packed, section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvagent.vllm.counters import Counts
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.plan import Depends
    from kvagent.vllm.scheduler.agent_session import AgentSession
    from kvagent.vllm.scheduler.requests import Blocks, Tracked

    Named = Callable[[Tracked, int, int, int], None]


DECODE_TOKENS = 8  # a request that computes more tokens than this in a step is looked at in that step
RUN_STEPS = 128  # steps in which each other request is looked at once
SEND_STEPS = 8  # in one of so many steps some of them are
HOLD_S = 5.0  # the longest that a save may pin its blocks; one step counts for half of it at most

_NEVER = 1 << 62  # tokens
_LATER = (BlockStatus.BUSY, BlockStatus.REVOKED, BlockStatus.FAILED, BlockStatus.TIMED_OUT, BlockStatus.OFF)
_SETTLED = bytes(set(BlockStatus) - {*_LATER})  # a block that ended otherwise is offered again


class SaveSchedule:
    """Which requests are looked at in a step."""

    def __init__(self) -> None:
        self._now: dict[Tracked, None] = {}
        self._turns: OrderedDict[Tracked, None] = OrderedDict()  # all requests, in the order of their turns
        self._steps = 0
        self._share = 0  # of the next turn, in 1/RUN_STEPS

    def add(self, tracked: Tracked) -> None:
        """Look at a request in the next step, and from then on in its turns, if it computes."""
        if tracked.phase == Phase.RUNNING and not tracked.barred:
            self._now[tracked] = self._turns[tracked] = None

    def remove(self, tracked: Tracked) -> None:
        """Do not look at a request any more."""
        self._now.pop(tracked, None)
        self._turns.pop(tracked, None)

    def step(self, scheduled: Mapping[str, int], tracked_of: Mapping[str, Tracked], total: int = 0) -> None:
        """Begin a step. ``scheduled``: tokens by request, each at least one. ``total``: their sum,
        0 if unknown.
        """
        self._steps += 1
        if total != len(scheduled) and max(scheduled.values(), default=0) > DECODE_TOKENS:
            for request, tokens in scheduled.items():
                tracked = tracked_of.get(request) if tokens > DECODE_TOKENS else None
                if tracked is not None:
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


def final_tokens(request: Any, scheduled: int, following: int = 0) -> int:
    """Return how many tokens have final KV once the step that computes ``scheduled`` more has
    ended, and are followed by so many whose value is known.

    Placeholders of async scheduling and draft tokens do not count: tokens past the certain ones may
    be discarded.
    """
    tokens: int = request.num_computed_tokens + scheduled - request.num_output_placeholders
    certain: int = request.num_tokens - following
    return certain if certain < tokens else tokens  # noqa: FURB136  min() takes three times as long


class SaveRun(NamedTuple):
    """One section of a job: consecutive blocks of one group of a request, beginning with block
    ``first``. They are pinned.
    """

    tracked: Tracked | None
    """None: of no request."""
    group: int
    first: int
    hashes: Sequence[bytes]
    blocks: Sequence[Any]
    section: bytes
    depends: Depends = ()
    """What its blocks depend on."""
    notes: Sequence[Any] = ()
    """What saves of another kind know of each block."""

    @property
    def awaited(self) -> bool:
        """Return whether another engine waits for its request's blocks."""
        return self.tracked is not None and self.tracked.awaited


@dataclass(eq=False, slots=True)
class _Save:
    """A job in flight. Its runs are alike: all of awaited requests, of others, or of none."""

    job: int
    revoke: int
    runs: list[SaveRun]
    since: float
    pinned: bool = True
    stale: bool = False
    """Whether its blocks depend on old weights."""

    @property
    def blocks(self) -> list[Any]:
        """Return its blocks."""
        return [block for run in self.runs for block in run.blocks]


class Saves:
    """The saves of an engine: the blocks that were added to the next jobs, and the jobs in flight.

    Guests replace how blocks are added, and add blocks of no request.
    """

    def __init__(self, geometry: Geometry, blocks: Blocks, counts: Counts) -> None:
        self.job_blocks = MAX_JOB_BLOCKS
        """The most blocks that the agent accepts in one job."""
        self.named: list[Named] = []
        """Are told which blocks of a request are to be saved: group, first block, and number."""
        self.over: list[tuple[Sequence[SaveRun], bytes]] = []
        """Runs of saves that were over with the last report, and the statuses of their blocks."""
        self.now = 0.0
        """A clock that advances by at most half of HOLD_S per step."""
        self.schedule = SaveSchedule()
        self._blocks = blocks
        self._counts = counts
        self._following = geometry.following
        self._groups = [
            (group, spec.block_tokens, geometry.scale(group), bool(spec.window))
            for group, spec in enumerate(geometry.groups)
        ]
        self._positional = [one for one in self._groups if one[0] not in geometry.states]
        self._open: list[SaveRun] = []  # added and not sent
        self._inflight: OrderedDict[int, _Save] = OrderedDict()
        self._words = list(range(REVOKES))
        self._last = 0.0

    def busy(self) -> bool:
        """Return whether saves are in flight or wait to be sent."""
        return bool(self._inflight or self._open)

    def begin(self, now: float) -> None:
        """Begin a step."""
        self.now += min(now - self._last, HOLD_S / 2)  # the agent handles a save only after its step has ended
        self._last = now

    def ready(self) -> bool:
        """Return whether saves can be planned now."""
        return bool(self._words)

    # ---- what is added

    def room(self, tracked: Tracked | None = None) -> int:
        """Return how many more blocks may be added, of this request if one is given."""
        return _NEVER if tracked is not None and tracked.awaited else self._blocks.room()

    def admit(self, tracked: Tracked) -> None:
        """Begin with an admitted request: what it found in the engine's own cache is offered at its
        end, unless another engine waits for it, and what it loaded is not.
        """
        tracked.phase = Phase.RUNNING
        self.schedule.add(tracked)
        if not tracked.awaited:
            first, saving = max(tracked.own, tracked.loaded[1]), tracked.saving
            saving.again = [(group, 0, tracked.own // size) for group, size, _, _ in self._positional if tracked.own]
            saving.cursor = [
                max(cursor, first // size) for cursor, (_, size, _, _) in zip(saving.cursor, self._groups, strict=True)
            ]

    def look(self, scheduled: Mapping[str, int], *, short: bool = False) -> None:
        """Add the full blocks of requests whose turn it is; those without room are looked at again.

        ``scheduled``: the tokens that the step computes, by request. While memory is ``short``,
        requests wait that no engine awaits.
        """
        for tracked in self.schedule.take():
            if not tracked.saved:
                continue
            waits = short and not tracked.awaited
            if not waits:
                request, saving = tracked.request, tracked.saving
                tokens = min(final_tokens(request, scheduled.get(request.request_id, 0), self._following), saving.most)
                if tokens >= saving.next_tokens:
                    self.add(tracked, tokens)
                    waits = tokens >= saving.next_tokens  # there was no room
            if waits:
                self.schedule.add(tracked)

    def add(self, tracked: Tracked, tokens: int) -> None:
        """Add what the first ``tokens`` of a request leave to be saved, as far as there is room,
        but for states.
        """
        cursor, least = tracked.saving.cursor, _NEVER
        for group, size, end in self._ends(tracked, tokens):
            cursor[group] = begin = self._add(tracked, group, cursor[group], end)
            least = min(least, (begin + 1) * size)
        tracked.saving.next_tokens = least

    def end(self, tracked: Tracked, tokens: int) -> None:
        """Add what the first ``tokens`` of a request that ends now leave to be saved. What finds no
        room is not saved.
        """
        if self.ready():
            self.add(tracked, tokens)
            self.add_again(tracked, tokens)  # last: most of it is in the agent
        if tokens >= tracked.saving.next_tokens and not tracked.awaited and self._blocks.max_saving:
            left = (end - tracked.saving.cursor[group] for group, _, end in self._ends(tracked, tokens))
            self._counts.saves_missed += sum(max(blocks, 0) for blocks in left)

    def add_again(self, tracked: Tracked, tokens: int) -> None:
        """Add what is offered at the end of a request, of its first ``tokens``."""
        for group, begin, end in tracked.saving.again:
            self._add(tracked, group, begin, min(end, tokens // self._groups[group][1]))
        tracked.saving.again = []

    def take(self, tracked: Tracked, group: int, first: int, keys: list[bytes], blocks: Sequence[Any]) -> None:
        """Add a run of blocks as it is, for which there is room."""
        scale, hashes = self._groups[group][2], tracked.request.block_hashes
        for named in self.named:
            named(tracked, group, first, len(keys))
        self._blocks.pin(blocks, awaited=tracked.awaited)
        for at in range(0, len(keys), self.job_blocks):
            i = first + at
            parent = hashes[i * scale - 1] if i else b""
            some, these = keys[at : at + self.job_blocks], blocks[at : at + self.job_blocks]
            data = section(group, parent, some, [block.block_id for block in these])
            self._open.append(SaveRun(tracked, group, i, some, these, data, tracked.depends))

    def due(self) -> bool:
        """Return whether there may be blocks of no request to save. Called in every step, before
        blocks are added.
        """
        return False

    def collect(self) -> None:
        """Add blocks of no request that are to be saved now."""

    def restore(self, run: SaveRun, first: int) -> None:
        """Handle that the blocks of a run of no request were not saved, from the first one on."""

    def release(self, blocks: Sequence[Any]) -> None:
        """Release the references to blocks of no request."""
        self._blocks.unpin(blocks)

    def clear(self) -> None:
        """Save no blocks of no request that hold what they hold now."""

    def _ends(self, tracked: Tracked, tokens: int) -> list[tuple[int, int, int]]:
        """Return by group the tokens of a block, and the end of the blocks of the first tokens."""
        hashes = len(tracked.request.block_hashes)
        return [(group, size, min(tokens // size, hashes // scale)) for group, size, scale, _ in self._positional]

    def _add(self, tracked: Tracked, group: int, begin: int, end: int) -> int:
        """Add a request's blocks from ``begin`` to ``end`` as far as there is room. Return the
        first block that must wait.
        """
        _, size, scale, window = self._groups[group]
        if self._following:  # what the engine's own cache has may go by another next token
            begin = max(begin, tracked.own // size)
        if begin >= end:
            return begin
        table = self._blocks.table(tracked.request.request_id, group, begin, end)
        keys = tracked.request.block_hashes[(begin + 1) * scale - 1 : (begin + len(table)) * scale : scale]
        if window or self._blocks.has_stale or len(keys) > self.room(tracked):
            return self._pick(tracked, group, begin, keys, table)
        if keys:
            self.take(tracked, group, begin, keys, table)
        return begin + len(keys)

    def _pick(self, tracked: Tracked, group: int, begin: int, keys: list[bytes], table: Sequence[Any]) -> int:
        """Add those blocks of a run that need saving. Return the first block that must wait."""
        room, at, end = max(self.room(tracked), 0), 0, len(keys)
        while at < end:
            stop = next((i for i in range(at, end) if table[i].is_null or self._blocks.is_stale(table[i])), end)
            fits = min(stop, at + room)
            if at < fits:
                self.take(tracked, group, begin + at, keys[at:fits], table[at:fits])
                room -= fits - at
            if fits < stop:
                return begin + fits
            at = stop + 1
        return begin + end

    # ---- jobs

    def finish(self, jobs: Callable[[], int], agent: AgentSession) -> list[SaveJob]:
        """Return the jobs of what was added, for the session that there is."""
        session, planned = agent.session, []
        while self._words and self._open and session is not None:
            runs = self._take_job()
            sections = packed([run.section for run in runs], sum(len(run.blocks) for run in runs))
            save = _Save(jobs(), self._words.pop(), runs, self.now)
            self._inflight[save.job] = save
            for run in runs:
                if run.tracked is not None:
                    run.tracked.saving.job = save.job
            self._counts.saves_planned += sections.blocks
            depends = tuple({one for run in runs for one in run.depends})
            planned.append(SaveJob(
                save.job, session.boot, session.epoch, save.revoke, sections, agent.space, depends, agent.targets()
            ))  # fmt: skip
        self.drop()  # without a session or a free revocation word
        return planned

    def drop(self) -> None:
        """Discard what was added and not sent."""
        runs, self._open = self._open, []
        for run in runs:
            self._again(run, 0)
            self._unpin([run])

    def report(self, job: int, statuses: bytes) -> bool:
        """Handle the end of a job in all workers. Return whether it is a save."""
        save = self._inflight.pop(job, None)
        if save is None:
            return False
        self._words.append(save.revoke)
        self.over.append((save.runs, statuses))
        over: list[SaveRun] = []
        at = 0
        for run in save.runs:
            own, at = statuses[at : at + len(run.hashes)], at + len(run.hashes)
            if save.pinned and not save.stale and run.awaited and BlockStatus.IN_PROGRESS in own:
                # Another engine is saving some of it, which is not stored yet, and may never be.
                assert run.tracked is not None
                saving = run.tracked.saving
                saving.confirm_until = saving.confirm_until or self.now + HOLD_S
                if self.now < saving.confirm_until:
                    self._open.append(run)
                    continue
            over.append(run)
            own = own.ljust(len(run.hashes), bytes([BlockStatus.FAILED]))
            stored, revoked = own.count(BlockStatus.OK), own.count(BlockStatus.REVOKED)
            existed = own.count(BlockStatus.EXISTS) + own.count(BlockStatus.IN_PROGRESS)
            self._counts.saves_stored += stored
            self._counts.saves_existed += existed
            self._counts.saves_refused += len(own) - stored - existed - revoked
            settled = len(own) - len(own.lstrip(_SETTLED))
            if save.pinned and settled < len(own):
                self._again(run, settled)
        if save.pinned:
            self._unpin(over)
        return True

    def settled(self, tracked: Tracked) -> bool:
        """Return whether all saves are over with blocks of a request, or of those before it."""
        if any(run.tracked is tracked for run in self._open):
            return False
        return next(iter(self._inflight), tracked.saving.job + 1) > tracked.saving.job

    def new_weights(self) -> None:
        """Save nothing of what was added or noted, and nothing in flight again."""
        self.drop()  # else it would be sent under the new epoch
        for save in self._inflight.values():
            save.stale = True
        self.clear()

    def revoke(self, *, awaited: bool = False, in_use: bool = True) -> list[int]:
        """Revoke all saves, those that another engine awaits only with ``awaited``, and those all
        of whose blocks requests use, so that none would be free, only with ``in_use``. Return their
        jobs; their blocks are free from the next step on.
        """
        saves = [one for one in self._inflight.values() if awaited or not any(run.awaited for run in one.runs)]
        return self._revoke([one for one in saves if in_use or any(block.ref_cnt == 1 for block in one.blocks)])

    def in_flight(self) -> list[int]:
        """Return the jobs of all saves in flight."""
        return [*self._inflight]

    def blocks_of(self, jobs: Iterable[int]) -> list[Any]:
        """Return the blocks of those of the jobs that are in flight."""
        return [block for job in jobs if job in self._inflight for block in self._inflight[job].blocks]

    def revoke_overdue(self) -> list[int]:
        """Revoke the saves that have been in flight for too long."""
        return self._revoke([*takewhile(lambda one: one.since + HOLD_S <= self.now, self._inflight.values())])

    def _take_job(self) -> list[SaveRun]:
        """Return as many runs as one job holds, all alike: it is revoked and released at once."""
        blocks = count = 0
        first = self._open[0]
        for run in self._open[:MAX_SECTIONS]:
            other = run.awaited != first.awaited or (run.tracked is None) != (first.tracked is None)
            if count and (other or blocks + len(run.blocks) > self.job_blocks):
                break
            blocks += len(run.blocks)
            count += 1
        runs, self._open = self._open[:count], self._open[count:]
        return runs

    def _revoke(self, saves: Sequence[_Save]) -> list[int]:
        """Revoke those saves that are not revoked yet. Return their jobs."""
        pinned = [save for save in saves if save.pinned]
        for save in pinned:
            save.pinned = False
            self._counts.saves_revoked += len(save.blocks)
            for run in save.runs:
                self._again(run, 0)  # now: their request may end, or their contents change, before the report
            self._unpin(save.runs)
        return [save.job for save in pinned]

    def _unpin(self, runs: Sequence[SaveRun]) -> None:
        """Release the blocks of runs that are alike."""
        blocks = [block for run in runs for block in run.blocks]
        if runs and runs[0].tracked is None:
            self.release(blocks)
        elif runs:
            self._blocks.unpin(blocks, awaited=runs[0].awaited)

    def _again(self, run: SaveRun, i: int) -> None:
        """Offer the blocks of a run from the i-th on again: awaited ones as soon as their request
        is looked at, others when it ends.
        """
        if run.tracked is None:
            self.restore(run, i)
        elif run.awaited:
            saving = run.tracked.saving
            saving.cursor[run.group] = min(saving.cursor[run.group], run.first + i)
            saving.next_tokens = 0
        else:
            run.tracked.saving.again.append((run.group, run.first + i, run.first + len(run.hashes)))
