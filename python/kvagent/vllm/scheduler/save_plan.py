"""Which blocks a step saves: when each running request is looked at for full blocks, and how they
are cut into jobs.

A request that computes a part of its prompt is looked at in that step. The others take turns: each
is looked at once in RUN_STEPS steps, so that the blocks of its answer are saved in runs, and all
turns are in one of SEND_STEPS steps, so that one message carries their blocks and wakes the agent
once. Each full block is offered once; what the agent refuses is offered again when its request
ends, and so is what the request found in the engine's own cache: the request that computed it has
offered it, perhaps to an agent that has lost it.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kvagent.limits import MAX_JOB_BLOCKS, MAX_SECTIONS
from kvagent.packing import section
from kvagent.vllm.scheduler.requests import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvagent.vllm.counters import SaveCounts
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.plan import Depends
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

    def empty(self) -> bool:
        """Return whether everything that was added was taken."""
        return not self.open

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
