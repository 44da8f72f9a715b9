"""Loads that a step waits for: which ones, and what follows from their outcome.

An asynchronous load costs its request about two steps besides the copy: the load begins after the
step that plans it, and its end is known a step later. A synchronous one costs no step, but all
requests of its step wait for the copy. So it is taken only if

- the agent says that all blocks are in its memory as they were saved (status ready), so that the
  load waits for nothing and can fail only with the agent, and
- it fits in what is left of the step's sync_load_bytes.

Until the outcome is known, the request's blocks are neither hashed nor saved: the step has computed
from bytes that may not have come. The workers report it in the same pass. If the load has failed,
the request is preempted and its output dropped (internals): vLLM would recompute it in place, which
gives wrong tokens where the next step is in flight. Its blocks are withheld from the prefix cache
until its load has succeeded, else other requests would hit them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.vllm import geometry as specs
from kvagent.vllm.hooks import Guest, Waits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.internals import Scheduler
    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import Report, StepPlan
    from kvagent.vllm.scheduler.requests import Tracked


def token_bytes(kv_cache_config: Any) -> float:
    """Return the bytes that a rank has of a token, in all groups, as the scheduler counts them."""
    found = [
        (specs.group_spec(group.kv_cache_spec), len(group.layer_names)) for group in kv_cache_config.kv_cache_groups
    ]
    return sum(layers * int(spec.page_size_bytes) / int(spec.block_size) for spec, layers in found)


def asynchronous_only(kv_cache_config: Any) -> str:
    """Return why no step may wait for loads of this model, or an empty string."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return "the model has several KV cache groups: vLLM cannot be told which of their blocks failed to load"
    if specs.window(groups[0].kv_cache_spec):
        return "the model's attention has a window"
    if kv_cache_config.needs_kv_cache_zeroing:
        return "vLLM zeroes new blocks in the step that would wait for their load"
    return ""


@dataclass(eq=False, slots=True)
class _Withheld:
    """A request whose load is not over."""

    tracked: Tracked
    own: int
    """The blocks that it had itself."""


class SyncLoads(Guest, Waits):
    """The synchronous loads of an engine."""

    def __init__(self, options: Options, geometry: Geometry, token_bytes: float, preemption: Scheduler) -> None:
        """``token_bytes``: what a rank has of a token."""
        self._preemption = preemption
        self._most = options.sync_load_bytes
        self._block_tokens = geometry.groups[0].block_tokens
        self._token_bytes = token_bytes
        self._left = self._most
        self._taken: set[Tracked] = set()  # requests whose last promise is loaded so
        self._withheld: dict[int, _Withheld] = {}  # by job
        self._jobs: dict[Tracked, int] = {}

    def ready(self, tracked: Tracked, tokens: int) -> bool:
        """Return whether to ask the agent if a request's blocks are ready, of at most that many
        tokens.
        """
        return self._may(tracked) and tokens * self._token_bytes <= self._left

    def takes(self, tracked: Tracked, tokens: int) -> bool:
        """Return whether a promise of that many tokens is loaded synchronously."""
        ready = tracked.asking.promised is not None and tracked.asking.promised.ready
        good = bool(tokens) and ready and self._may(tracked) and tokens * self._token_bytes <= self._left
        (self._taken.add if good else self._taken.discard)(tracked)
        return good

    def taken(self, tracked: Tracked) -> bool:
        """Return what ``takes`` returned last for a request."""
        return tracked in self._taken

    def start(self, job: int, tracked: Tracked, tokens: int) -> None:
        """Withhold the blocks of a request that was admitted with such a load."""
        own = tracked.own // self._block_tokens
        self._preemption.withhold(tracked.request.request_id, own)
        self._withheld[job], self._jobs[tracked] = _Withheld(tracked, own), job
        self._left -= int(tokens * self._token_bytes)
        self.side.counts.loads_sync += 1

    def replace(self, job: int, tracked: Tracked, tokens: int) -> None:
        """Let another job stand for a request's load, begun or not."""
        if (old := self._jobs.get(tracked)) is None:
            self.start(job, tracked, tokens)
        else:
            self._withheld[job], self._jobs[tracked] = self._withheld.pop(old), job

    def planned(self, plan: StepPlan, output: Any, now: float) -> None:  # noqa: ARG002
        """Let the next step wait for as many bytes again."""
        self._left = self._most

    def lost(self, tracked: Tracked) -> None:
        """Handle the loss of a request's blocks before the outcome of its load is known."""
        if self._forget(tracked) is not None:
            self._preemption.drop_output(tracked.request.request_id)

    def over(self, tracked: Tracked, *, normally: bool) -> bool:
        """Handle a request's end. Return whether that shows that its load has succeeded.

        vLLM delivers no output of a step that reports bad blocks of the request, so a request that
        ends by its output has all of them.
        """
        self._taken.discard(tracked)
        withheld = self._forget(tracked)
        if withheld is None or not normally:
            return False
        self._preemption.publish(tracked.request.request_id, withheld.own, now=True)
        return True

    def settle(self, report: Report, world: int) -> Iterator[tuple[Tracked, bool]]:
        """Yield the requests whose load is over, and whether it has succeeded. One that failed has
        been preempted.
        """
        if not self._withheld:
            return
        for job in [*report.late, *report.outcomes]:
            withheld = self._withheld.pop(job, None)
            if withheld is None:
                continue
            name, tracked = withheld.tracked.request.request_id, withheld.tracked
            outcome = report.outcomes.get(job)
            good = job not in report.late and outcome is not None and outcome.ranks == world
            good = good and outcome is not None and not any(outcome.statuses)
            self.side.counts.loads_sync_failed += not good
            if self._jobs.get(tracked) != job:
                continue  # it has lost these blocks, or ended
            del self._jobs[tracked]
            if good:
                self._preemption.publish(name, withheld.own)
                yield tracked, True
            elif self._preemption.preempt(name):
                yield tracked, False

    def _may(self, tracked: Tracked) -> bool:
        """Return whether a request may load so: not one that another engine is concerned with."""
        return not tracked.asking.terms.transfer and not tracked.awaited

    def _forget(self, tracked: Tracked) -> _Withheld | None:
        """Take back the request's part in its load, whose outcome then concerns no request."""
        job = self._jobs.pop(tracked, None)
        return None if job is None else self._withheld.get(job)
