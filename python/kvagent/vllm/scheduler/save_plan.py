"""Which blocks a step saves: when each running request is checked for full blocks, and which of
them go into the next jobs.

A clock advances in every step by the most tokens that any decoding request computes in it: by one
without draft tokens, by more with them. A request that lacks n tokens of its next block is checked
n ticks later. It may still lack some then; its block is saved some steps late, which is harmless.
Blocks of decoding requests are gathered over some steps, so that one message carries them and wakes
the agent once. They are pinned meanwhile.

The blocks are pinned and cut into sections of jobs. Those that were offered recently, and that the
agent did not report as missing, are skipped.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from kvagent.limits import MAX_JOB_BLOCKS, MAX_SECTIONS
from kvagent.packing import section

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kvagent.vllm.events.tokens import Tokens
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.scheduler.lazy import Unsaved
    from kvagent.vllm.scheduler.requests import Blocks, Tables, Tracked
    from kvagent.vllm.scheduler.saves import Saves


RECENT_S = 10.0  # a block is not offered again for at least this time, at most twice it
MAX_RECENT = 32768  # keys in each of the two sets


class RecentOffers:
    """Recently offered keys of one group, in two sets by age; the older one is dropped whole."""

    def __init__(self) -> None:
        self.young: set[bytes] = set()
        self.old: set[bytes] = set()
        self._turn = 0.0

    def disjoint(self, keys: Collection[bytes]) -> bool:
        """Return whether none of the keys was offered recently."""
        return self.young.isdisjoint(keys) and self.old.isdisjoint(keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self.young or key in self.old

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget keys that the agent does not have."""
        self.young.difference_update(keys)
        self.old.difference_update(keys)

    def rotate(self, now: float) -> None:
        """Drop the older set when it is time. Called in every step."""
        if now >= self._turn or len(self.young) > MAX_RECENT:
            self.old, self.young = self.young, set()
            self._turn = now + RECENT_S

    def clear(self) -> None:
        """Forget all keys, since the agent has no blocks any more."""
        self.young.clear()
        self.old.clear()


_NEVER = 1 << 62  # tokens


class SaveRun(NamedTuple):
    """One section of a job: consecutive blocks of one group of a request, beginning with block
    ``first``.
    """

    tracked: Tracked | None
    """None: of no request, but ``unsaved`` ones."""
    group: int
    first: int
    hashes: Sequence[bytes]
    blocks: Sequence[Any]
    section: bytes
    deliver: bool = False
    """Whether its pins are those of an offered request."""
    unsaved: Sequence[Unsaved] = ()
    """With lazy offload, what is known of each block whose eviction came near."""


class SaveBatch:
    """Blocks that were added but not yet sent.

    ``pin`` pins the blocks added since the last call; a job that is taken keeps its blocks pinned.
    """

    def __init__(self, geometry: Geometry, blocks: Blocks, tables: Tables) -> None:
        self.job_blocks = MAX_JOB_BLOCKS
        """The most blocks that the agent accepts in one job."""
        self.recent = [RecentOffers() for _ in geometry.groups]
        """By group."""
        self.open: list[SaveRun] = []
        """The runs that were added and not taken."""
        self.tokens: Tokens | None = None
        """What is told the tokens of all blocks that are to be saved; None without KV events."""
        self._blocks = blocks
        self._tables = tables
        self._groups = [
            (group, spec.block_tokens, geometry.scale(group), bool(spec.window), self.recent[group])
            for group, spec in enumerate(geometry.groups)
        ]
        self._positional = [one for one in self._groups if one[0] not in geometry.states]
        self._least_size = min(size for _, size, _, _, _ in self._positional)
        self._stagger = 0
        self._unpinned: list[Any] = []  # blocks added since the last pin
        self._undelivered: list[Any] = []  # those of them that offered requests pin

    def spare_tokens(self, *, first: bool) -> int:
        """Return how many generated tokens beyond its next block a request computes before it is
        checked. The ``first`` time they differ, so that not all requests are checked in one step.
        """
        if not first:
            return max(RUN_TOKENS - self._least_size, 0)
        self._stagger = (self._stagger + self._least_size) % max(RUN_TOKENS, self._least_size)
        return self._stagger

    def empty(self) -> bool:
        """Return whether everything that was added was taken."""
        return not self.open

    def full(self) -> bool:
        """Return whether there is enough for a message, so that it need not be gathered longer."""
        return len(self.open) >= GATHER_RUNS

    def room(self, tracked: Tracked | None = None) -> int:
        """Return how many more blocks may be added, of this request if one is given."""
        if tracked is not None and self._delivers(tracked):
            return self._blocks.room(deliver=True) - len(self._undelivered)
        return self._blocks.room() - len(self._unpinned)

    def _delivers(self, tracked: Tracked) -> bool:
        """Return whether a request's blocks are pinned from the budget of offered requests."""
        return tracked.offer is not None and self._blocks.max_delivering > 0

    def add(self, tracked: Tracked, tokens: int) -> None:
        """Add what the first ``tokens`` of a request leave to be saved, as far as there is room.

        States are added by themselves (states).
        """
        request = tracked.request
        hashes, cursor = request.block_hashes, tracked.cursor
        least = _NEVER
        for group, size, scale, window, recent in self._positional:
            begin, end = max(cursor[group], tracked.found // size), min(tokens // size, len(hashes) // scale)
            if begin < end:
                table = self._tables.slice(request.request_id, group, begin, end)
                keys = hashes[(begin + 1) * scale - 1 : (begin + len(table)) * scale : scale]
                loaded = tracked.loaded[1] > begin * size or self._blocks.has_stale
                if loaded or window or len(keys) > self.room(tracked) or not recent.disjoint(keys):
                    begin = self._pick(tracked, group, begin, keys, table)
                elif keys:
                    self.take(tracked, group, begin, keys, table)
                    begin += len(keys)
            cursor[group] = begin
            least = min(least, (begin + 1) * size)
        tracked.next_tokens = least

    def lacking(self, tracked: Tracked, tokens: int) -> int:
        """Return how many blocks of the first ``tokens`` of a request were not added."""
        hashes = len(tracked.request.block_hashes)
        ends = [(group, min(tokens // size, hashes // scale)) for group, size, scale, _, _ in self._positional]
        return sum(max(end - tracked.cursor[group], 0) for group, end in ends)

    def pin(self) -> None:
        """Pin the blocks that were added."""
        if self._unpinned:
            self._blocks.pin(self._unpinned)
            self._unpinned = []
        if self._undelivered:
            self._blocks.pin(self._undelivered, deliver=True)
            self._undelivered = []

    def take_job(self) -> tuple[list[SaveRun], list[Any]]:
        """Return as many runs as one job holds, and their blocks.

        A job is revoked and released as a whole, so runs of offered requests, and of blocks near
        their eviction, have jobs of their own.
        """
        blocks: list[Any] = []
        count = 0
        for run in self.open[:MAX_SECTIONS]:
            other = run.deliver != self.open[0].deliver or bool(run.unsaved) != bool(self.open[0].unsaved)
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
        _, _, scale, _, recent = self._groups[group]
        hashes = tracked.request.block_hashes
        recent.young.update(keys)
        if self.tokens is not None:
            self.tokens.say(tracked, group, first, len(keys))
        deliver = self._delivers(tracked)
        if deliver:
            self._undelivered += blocks
        else:
            self._unpinned += blocks
        for at in range(0, len(keys), self.job_blocks):
            i = first + at
            parent = hashes[i * scale - 1] if i else b""
            some, these = keys[at : at + self.job_blocks], blocks[at : at + self.job_blocks]
            data = section(group, parent, some, [block.block_id for block in these])
            self.open.append(SaveRun(tracked, group, i, some, these, data, deliver))

    def _pick(self, tracked: Tracked, group: int, begin: int, keys: list[bytes], table: Sequence[Any]) -> int:
        """Add those blocks of a run that need saving.

        Return the new cursor: the first block that must wait.
        """
        _, size, _, _, recent = self._groups[group]
        loaded = range(tracked.loaded[0] // size, tracked.loaded[1] // size)
        room = self.room(tracked)
        first = 0  # start of the current run
        for i, (key, block) in enumerate(zip(keys, table, strict=True)):
            if block.is_null or begin + i in loaded or key in recent or self._blocks.is_stale(block):
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


DECODE_TOKENS = 8  # a request that computes more tokens than this in a step is checked in that step
RUN_TOKENS = 128  # generated tokens of a request that are saved together
GATHER_STEPS = 8  # steps over which blocks of decoding requests are gathered
GATHER_RUNS = MAX_SECTIONS  # runs of blocks that are sent without waiting for more
CHECKS = 20  # decoding requests checked in a step, and an eighth of those beyond; fewer wait for GATHER_STEPS
MAX_EXPIRED = 4 * GATHER_STEPS  # expired ticks kept before their requests are sorted


class SaveSchedule:
    """The schedule. Requests are checked in the order in which they become due.

    If many fill a block in one step, their checks are spread over the next ones.
    """

    def __init__(self) -> None:
        self._ready: dict[Tracked, None] = {}
        self._expired: deque[tuple[int, list[Tracked]]] = deque()  # expired ticks whose requests were not taken
        self._waiting = 0  # requests in expired ticks
        self._urgent = False  # whether a ready request must not wait for others
        self._steps = 0
        self._tick = 0
        self._by_tick: dict[int, list[Tracked]] = {}

    def add(self, tracked: Tracked) -> None:
        """Check a request in the next step."""
        self._ready[tracked] = None
        self._urgent = True
        tracked.due_tick = 0

    def remove(self, tracked: Tracked) -> None:
        """Do not check a request any more."""
        self._ready.pop(tracked, None)
        tracked.due_tick = 0

    def defer(self, tracked: Tracked, tokens: int) -> None:
        """Check a request once it may have computed ``tokens`` more, at least one."""
        tracked.due_tick = tick = self._tick + tokens
        same_tick = self._by_tick.get(tick)
        if same_tick is None:
            self._by_tick[tick] = [tracked]
        else:
            same_tick.append(tracked)

    def sends(self, *, after: int = 0) -> bool:
        """Return whether what was gathered is to be sent in this step, or some steps ``after``
        it.
        """
        return self._urgent or (self._steps + after) % GATHER_STEPS == 0

    def ready(self) -> bool:
        """Return whether requests are to be checked in this step: as soon as there are CHECKS of
        them, else in one of GATHER_STEPS; never in one that sends, which takes its time too.
        """
        if self._urgent:
            return True
        since_sent = self._steps % GATHER_STEPS
        if self._waiting >= CHECKS:
            return since_sent != 0
        return since_sent == GATHER_STEPS // 2 and bool(self._ready or self._expired)

    def take(self) -> list[Tracked]:
        """Return the requests to check now. The caller requeues those that must wait."""
        now, self._ready = self._ready, {}
        self._urgent = False
        left = CHECKS + max(self._waiting - CHECKS, 0) // 8
        while self._expired and left > 0:
            left -= self._sort(now, left)
        return list(now)

    def requeue(self, some: Sequence[Tracked]) -> None:
        """Check these requests again in the next step."""
        if some:
            self._ready.update(dict.fromkeys(some))
            self._urgent = True

    def step(self, scheduled: Mapping[str, int], tracked_of: Mapping[str, Tracked], total: int = 0) -> None:
        """Advance the clock by a step.

        ``scheduled``: tokens by request, each at least one. ``total``: their sum, 0 if unknown.
        """
        most = 1 if total == len(scheduled) > 0 else max(scheduled.values(), default=0)
        if most > DECODE_TOKENS:
            most = 1
            for request, tokens in scheduled.items():
                if tokens > DECODE_TOKENS:
                    if (tracked := tracked_of.get(request)) is not None and tracked.admitted:
                        self.add(tracked)
                elif tokens > most:
                    most = tokens
        for tick in range(self._tick + 1, self._tick + most + 1):
            if (some := self._by_tick.pop(tick, None)) is not None:
                self._expired.append((tick, some))
                self._waiting += len(some)
        while len(self._expired) > MAX_EXPIRED:  # not taken for long: drop removed requests
            self._sort(self._ready, _NEVER)
        self._tick += most
        self._steps += 1

    def skip(self) -> None:
        """Count a step in which nothing can be saved, so that ``sends`` goes on as in others."""
        self._steps += 1

    def _sort(self, ready: dict[Tracked, None], most: int) -> int:
        """Add at most that many requests of the earliest expired tick. Return how many.

        One that was deferred again meanwhile, or removed, is dropped.
        """
        tick, some = self._expired.popleft()
        due = [tracked for tracked in some if tracked.due_tick == tick]
        if left := due[most:]:
            self._expired.appendleft((tick, left))
            due = due[:most]
        ready.update(dict.fromkeys(due))
        self._waiting -= len(some) - len(left)
        return len(due)

    def clear(self) -> None:
        """Remove all requests."""
        self._ready.clear()
        self._expired.clear()
        self._waiting = 0
        self._by_tick.clear()
        self._urgent = False


def collect_saves(
    schedule: SaveSchedule, saves: Saves, scheduled: Mapping[str, int], *, decode: bool, offers_only: bool = False
) -> None:
    """Add the filled blocks of requests that are due to the batch; requests without room stay due.

    ``scheduled``: the tokens that the step computes, by request. ``decode``: whether to save
    generated tokens too. With ``offers_only``, requests that are not offered stay due.
    """
    left: list[Tracked] = []
    for tracked in schedule.take():
        if tracked.stale or tracked.no_save or tracked.unkeyed:
            continue
        request = tracked.request
        tokens = scheduled.get(request.request_id)
        if tokens is None or (offers_only and tracked.offer is None):  # not scheduled, or not now
            left.append(tracked)
            continue
        tokens = final_tokens(request, tokens, saves.following)
        if not decode:
            tokens = min(tokens, request.num_prompt_tokens)
        if tokens >= tracked.next_tokens:
            saves.batch.add(tracked, tokens)
        first = tracked.due_tick == 0
        lacking = tracked.next_tokens - tokens
        if lacking <= 0:  # the batch had no room
            left.append(tracked)
        elif tracked.next_tokens <= request.num_prompt_tokens:
            schedule.defer(tracked, lacking)
        elif decode:
            schedule.defer(tracked, lacking + saves.batch.spare_tokens(first=first))
    saves.batch.pin()
    schedule.requeue(left)


def final_tokens(request: Any, scheduled: int, following: int = 0) -> int:
    """Return how many tokens have final KV once the step that computes ``scheduled`` more has
    ended, and are followed by so many whose value is known.

    Placeholders of async scheduling and draft tokens do not count: tokens past the certain ones may
    be discarded.
    """
    tokens: int = request.num_computed_tokens + scheduled - request.num_output_placeholders
    certain: int = request.num_tokens - following
    return certain if certain < tokens else tokens  # noqa: FURB136  min() takes three times as long
