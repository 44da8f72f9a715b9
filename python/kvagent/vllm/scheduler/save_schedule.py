"""Which running requests may have filled another block: so that a step looks at these, and not at all that run.

A clock ticks with every step, by the most tokens that a request without a chunk of its prompt computes in it: once
when each computes one, more often with draft tokens. A request that lacks n tokens of its next block is put n ticks
ahead and not looked at before. It may turn out then that it lacks some still; a block that is seen some steps late is
saved some steps late, no more. So those that fill blocks of answers are left to gather for some steps: then one message
carries them, and wakes the agent once.

What the running requests that are due have to be saved in a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.saves import Saves

DECODE_TOKENS = 8  # tokens of one step; a request that computes more in it is looked at in that step
GATHER_STEPS = 8  # steps in which blocks of answers gather
MAX_EXPIRED = 4 * GATHER_STEPS  # ticks whose requests are not looked through


class SaveSchedule:
    """See the module. The order in which requests come up is kept."""

    def __init__(self) -> None:
        self._ready: dict[Tracked, None] = {}
        self._expired: list[tuple[int, list[Tracked]]] = []  # those whose tick has come since the last take
        self._urgent = False  # among them is one that is not to wait for others
        self._steps = 0
        self._tick = 0
        self._by_tick: dict[int, list[Tracked]] = {}

    def add(self, tracked: Tracked) -> None:
        """It is to be looked at in the next step."""
        self._ready[tracked] = None
        self._urgent = True
        tracked.due_tick = 0

    def remove(self, tracked: Tracked) -> None:
        """It is not to be looked at any more."""
        self._ready.pop(tracked, None)
        tracked.due_tick = 0

    def defer(self, tracked: Tracked, tokens: int) -> None:
        """It is to be looked at when it may have computed that many tokens more, at least one."""
        tracked.due_tick = tick = self._tick + tokens
        same_tick = self._by_tick.get(tick)
        if same_tick is None:
            self._by_tick[tick] = [tracked]
        else:
            same_tick.append(tracked)

    def ready(self) -> bool:
        """Whether they are to be looked at in this step."""
        return self._urgent or (self._steps % GATHER_STEPS == 0 and bool(self._ready or self._expired))

    def take(self) -> list[Tracked]:
        """The requests to look at now. Who cannot be dealt with is to be kept."""
        self._sort()
        now, self._ready = list(self._ready), {}
        self._urgent = False
        return now

    def requeue(self, some: Sequence[Tracked]) -> None:
        """They are to be looked at in the next step."""
        if some:
            self._ready.update(dict.fromkeys(some))
            self._urgent = True

    def step(self, scheduled: Mapping[str, int], tracked_of: Mapping[str, Tracked], total: int = 0) -> None:
        """A step computes that many tokens of each request, at least one; ``total`` in all, if it is known."""
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
        if len(self._expired) > MAX_EXPIRED:  # nobody takes them: of those that are removed nothing is to stay
            self._sort()
        self._tick += most
        self._steps += 1

    def _sort(self) -> None:
        for tick, some in self._expired:
            for tracked in some:
                if tracked.due_tick == tick:  # else it was put elsewhere, or removed
                    self._ready[tracked] = None
        self._expired.clear()

    def clear(self) -> None:
        """Forgets all of them."""
        self._ready.clear()
        self._expired.clear()
        self._by_tick.clear()
        self._urgent = False


def collect_saves(schedule: SaveSchedule, saves: Saves, scheduled: Mapping[str, int], *, decode: bool) -> None:
    """Adds it, as far as there is room; who has to wait stays due.

    ``scheduled``: the tokens that the step computes, by request. ``decode``: also the blocks of answers.
    """
    left: list[Tracked] = []
    filled: list[tuple[Tracked, int]] = []
    for tracked in schedule.take():
        if tracked.stale:
            continue
        request = tracked.request
        tokens = scheduled.get(request.request_id)
        if tokens is None:  # it computes nothing now
            left.append(tracked)
            continue
        tokens = final_tokens(request, tokens)
        if not decode:
            tokens = min(tokens, request.num_prompt_tokens)
        filled.append((tracked, tokens))
    saves.batch.add_all(filled)
    for tracked, tokens in filled:
        lacking = tracked.next_tokens - tokens
        if lacking <= 0:  # there was no room
            left.append(tracked)
        elif decode or tracked.next_tokens <= tracked.request.num_prompt_tokens:
            schedule.defer(tracked, lacking)
    saves.batch.pin()
    schedule.requeue(left)


def final_tokens(request: Any, scheduled: int) -> int:
    """The tokens whose KV is final once the step that computes ``scheduled`` more has ended.

    Not the placeholders of async scheduling, nor draft tokens: what is behind the known tokens may be taken back.
    """
    tokens: int = request.num_computed_tokens + scheduled - request.num_output_placeholders
    certain: int = request.num_tokens
    return certain if certain < tokens else tokens  # noqa: FURB136  min() takes three times as long
