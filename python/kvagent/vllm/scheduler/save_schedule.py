"""When to check each running request for blocks to save, so that a step checks few of them.

A clock advances in every step by the most tokens that any decoding request computes in it: by one
without draft tokens, by more with them. A request that lacks n tokens of its next block is checked
n ticks later. It may still lack some then; its block is saved some steps late, which is harmless.
Checks of decoding requests are gathered over some steps, so that one message carries their blocks
and wakes the agent once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.saves import Saves

DECODE_TOKENS = 8  # a request that computes more tokens than this in a step is checked in that step
GATHER_STEPS = 8  # steps over which blocks of decoding requests are gathered
MAX_EXPIRED = 4 * GATHER_STEPS  # expired ticks kept before their requests are sorted


class SaveSchedule:
    """The schedule. Requests are checked in the order in which they become due."""

    def __init__(self) -> None:
        self._ready: dict[Tracked, None] = {}
        self._expired: list[tuple[int, list[Tracked]]] = []  # expired ticks since the last take
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

    def ready(self) -> bool:
        """Return whether requests are to be checked in this step."""
        return self._urgent or (self._steps % GATHER_STEPS == 0 and bool(self._ready or self._expired))

    def take(self) -> list[Tracked]:
        """Return the requests to check now. The caller requeues those that must wait."""
        self._sort()
        now, self._ready = list(self._ready), {}
        self._urgent = False
        return now

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
        if len(self._expired) > MAX_EXPIRED:  # not taken for long: drop removed requests
            self._sort()
        self._tick += most
        self._steps += 1

    def _sort(self) -> None:
        for tick, some in self._expired:
            for tracked in some:
                if tracked.due_tick == tick:  # else it was deferred again, or removed
                    self._ready[tracked] = None
        self._expired.clear()

    def clear(self) -> None:
        """Remove all requests."""
        self._ready.clear()
        self._expired.clear()
        self._by_tick.clear()
        self._urgent = False


def collect_saves(schedule: SaveSchedule, saves: Saves, scheduled: Mapping[str, int], *, decode: bool) -> None:
    """Add the filled blocks of requests that are due to the batch; requests without room stay due.

    ``scheduled``: the tokens that the step computes, by request. ``decode``: whether to save
    generated tokens too.
    """
    left: list[Tracked] = []
    filled: list[tuple[Tracked, int]] = []
    for tracked in schedule.take():
        if tracked.stale:
            continue
        request = tracked.request
        tokens = scheduled.get(request.request_id)
        if tokens is None:  # not scheduled in this step
            left.append(tracked)
            continue
        tokens = final_tokens(request, tokens)
        if not decode:
            tokens = min(tokens, request.num_prompt_tokens)
        filled.append((tracked, tokens))
    saves.batch.add_all(filled)
    for tracked, tokens in filled:
        lacking = tracked.next_tokens - tokens
        if lacking <= 0:  # the batch had no room
            left.append(tracked)
        elif decode or tracked.next_tokens <= tracked.request.num_prompt_tokens:
            schedule.defer(tracked, lacking)
    saves.batch.pin()
    schedule.requeue(left)


def final_tokens(request: Any, scheduled: int) -> int:
    """Return how many tokens have final KV once the step that computes ``scheduled`` more has
    ended.

    Placeholders of async scheduling and draft tokens do not count: tokens past the certain ones may
    be discarded.
    """
    tokens: int = request.num_computed_tokens + scheduled - request.num_output_placeholders
    certain: int = request.num_tokens
    return certain if certain < tokens else tokens  # noqa: FURB136  min() takes three times as long
