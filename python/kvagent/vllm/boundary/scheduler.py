"""What becomes of the scheduler's part after an error in a call of vLLM's (boundary)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from kvagent.packing import Packed
from kvagent.vllm.plan import LoadJob, StepPlan, uncached_plan
from kvagent.vllm.uncached import UncachedScheduler, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvagent.vllm.plan import Report
    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.side import SchedulerSide


class RetiredScheduler(UncachedScheduler):
    """Takes the place of a SchedulerSide that failed: nothing is saved or loaded any more.

    What the workers have in flight ends as it does otherwise, and its blocks stay pinned until
    they have reported it. Then they leave the agent.
    """

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        with contextlib.suppress(Exception):
            side.close()

    def plan(self, output: Any) -> StepPlan:  # noqa: ARG002
        """Return a plan without jobs, and at the end the plan to leave the agent."""
        return StepPlan(idle=True) if self.pending() else uncached_plan()

    def report(self, report: Report) -> None:
        """Release the blocks of jobs that are over. What a step computed from a load that failed is
        dropped.
        """
        side, now = self._side, time.monotonic()
        for job, outcome in report.outcomes.items():
            with contextlib.suppress(Exception):
                if side.saves is None or not side.saves.report(job, outcome):
                    assert side.loads is not None
                    side.loads.report(job, outcome, now)
        with contextlib.suppress(Exception):
            side.settle_waiting(report, now)

    def pending(self) -> bool:
        """Return whether steps are needed without requests: a report is outstanding."""
        try:
            return self._side.waiting()
        except Exception:  # noqa: BLE001  the blocks stay pinned
            return False


class Unloaded:
    """Loads that were promised to vLLM and that no worker was told of, which have to fail."""

    def __init__(self) -> None:
        self._jobs: list[LoadJob] = []
        self._told = 0
        """The last load that workers were told of; their numbers grow."""
        self._number = 0

    def add(self, request: str, blocks: Any, own: int, *, sync: bool) -> int:
        """Add a load that was not planned, and return its number. The first ``own`` blocks of a
        request of one group are not loaded: other requests may have them too.
        """
        self._number -= 1  # no other job has it
        tables = blocks.get_block_ids()
        ids = list(tables[0][own:]) if len(tables) == 1 else [block for group in tables for block in group]
        parts = (Packed(b"", len(ids)),)
        packed = b"".join(block.to_bytes(4, "little") for block in ids)
        self._jobs.append(LoadJob(self._number, b"", 0, request, 0, 0.0, parts, packed, sync=sync))
        return self._number

    def add_planned(self, loads: Iterable[LoadJob]) -> None:
        """Add those of planned loads that workers were not told of."""
        self._jobs += [dataclasses.replace(load, boot=b"") for load in loads if load.job > self._told]

    def put(self, plan: StepPlan) -> StepPlan:
        """Return a plan with these loads, which fail in the workers as planned for no agent."""
        jobs, self._jobs = self._jobs, []
        if jobs:
            plan = dataclasses.replace(plan, loads=[*plan.loads, *jobs], uncached=False)
        if plan.loads:
            self._told = max(self._told, *(load.job for load in plan.loads))
        return plan


def retire(self: Any, reason: str) -> None:
    """Save and load nothing more in a connector's engine, after an error."""
    side = self._scheduler
    if side is None or isinstance(side, UncachedScheduler):
        return
    self._uncached = self._uncached or reason
    warn(reason)
    if side.loads is not None:
        self.unloaded.add_planned([*side.loads.taken, *side.loads.planned])
    self._scheduler = RetiredScheduler(side)
    with contextlib.suppress(Exception):
        self._say_uncached()


def exclude(self: Any, request: Any, reason: str, *, over: bool = False) -> Tracked | None:
    """Neither save nor load a request any more, or forget one that is over; retire after too many
    errors. Return its record, if there is one.
    """
    side = self._scheduler
    if side is None or isinstance(side, UncachedScheduler):
        return None
    tracked: Tracked | None = None
    try:
        tracked = side.exclude(request.request_id, over=over)
    except Exception as error:  # noqa: BLE001
        retire(self, self.errors.note("exclude", error, "The engine goes on uncached"))
    if self.errors.too_many:
        retire(self, reason)
    return tracked


def of_request(answer: Any) -> Callable[..., Any]:
    """Return what to do after an error in a call about a request."""

    def failed(self: Any, call: str, error: Exception, request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        exclude(self, request, self.errors.note(call, error, "The request goes on uncached"))
        return answer

    return failed


def of_admission(self: Any, call: str, error: Exception, request: Any, blocks: Any, num_external_tokens: int) -> None:
    """Handle an error when a request was admitted: vLLM waits for what was promised, or computes
    in this step from what did not come.
    """
    side = self._scheduler
    tracked = exclude(self, request, self.errors.note(call, error, "The request goes on uncached"))
    if num_external_tokens <= 0:
        return
    own = 0 if tracked is None else tracked.own // self._geometry.groups[0].block_tokens
    sync = tracked is not None and side.waiting_loads.taken(tracked)
    job = self.unloaded.add(request.request_id, blocks, own, sync=sync)
    if sync:
        try:
            side.waiting_loads.replace(job, tracked, num_external_tokens)
        except Exception as again:  # noqa: BLE001
            retire(self, self.errors.note(call, again, "The engine goes on uncached"))


def of_end(self: Any, call: str, error: Exception, request: Any, *args: Any) -> Any:  # noqa: ARG001
    """Handle an error when a request ended: vLLM frees its blocks, except for pinned ones."""
    exclude(self, request, self.errors.note(call, error, "Its blocks are freed"), over=True)
    return False, None


def of_all(answer: Any) -> Callable[..., Any]:
    """Return what to do after an error in a call that the whole part depends on."""

    def failed(self: Any, call: str, error: Exception, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        retire(self, self.errors.note(call, error, "The engine goes on uncached"))
        return answer

    return failed


def of_plan(self: Any, call: str, error: Exception, output: Any) -> Any:
    """Handle an error in a step's plan: the loads in it have to fail."""
    of_all(None)(self, call, error)
    return self.build_connector_meta(output)


def of_output(self: Any, call: str, error: Exception, output: Any) -> None:
    """Handle an error in the workers' report, which is not repeated."""
    of_all(None)(self, call, error)
    self.update_connector_output(output)


def of_little(answer: Any) -> Callable[..., Any]:
    """Return what to do after an error in a call that nothing depends on."""

    def failed(self: Any, call: str, error: Exception, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        reason = self.errors.note(call, error, "The call is ignored")
        if self.errors.too_many:
            retire(self, reason)
        return answer

    return failed


CALLS: dict[str, Callable[..., Any]] = {
    "bind_kv_cache_manager": of_all(None),
    "on_new_request": of_request(None), "get_num_new_matched_tokens": of_request((0, False)),
    "update_state_after_alloc": of_admission, "build_connector_meta": of_plan,
    "get_external_cache_hit_sources": of_little({}),
    "update_connector_output": of_output, "take_events": of_little(()), "request_finished": of_end,
    "request_finished_all_groups": of_end, "has_pending_push_work": of_little(False), "reset_cache": of_all(True),
    "before_weights_call": of_all(None), "weights_named": of_all(None),
}  # fmt: skip
