"""What becomes of the scheduler's part after an error in a call of vLLM's, or when its engine turns
out not to be served (boundary).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from kvagent.packing import Packed
from kvagent.vllm.boundary.errors import Call
from kvagent.vllm.plan import LoadJob, StepPlan, uncached_plan
from kvagent.vllm.uncached import warn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvagent.vllm.plan import Report
    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.side import SchedulerSide


class RetiredScheduler:
    """Takes the place of a SchedulerSide that failed, or whose engine cannot be served: nothing is
    saved or loaded any more. None: there was none.

    Saves in flight are revoked with the next plan, and loads end as they do otherwise. The blocks
    of both stay pinned until that. Then the workers leave the agent.
    """

    def __init__(self, side: SchedulerSide | None) -> None:
        self._side = side
        self._revokes = side is not None
        if side is not None:
            with contextlib.suppress(Exception):
                side.close()

    def plan(self, output: Any) -> StepPlan:
        """Return a plan without jobs, and at the end the plan to leave the agent."""
        plan = StepPlan(idle=not output.num_scheduled_tokens) if self.pending() else uncached_plan()
        if self._revokes and self._side is not None:
            self._revokes = False
            with contextlib.suppress(Exception):
                self._side.saves.drop()
                plan.revokes = self._side.saves.revoke(awaited=True)  # what is free now might be reused in this step
        return plan

    def report(self, report: Report) -> None:
        """Release the blocks of jobs that are over. What a step computed from a load that failed is
        dropped.
        """
        side = self._side
        if side is None:
            return
        for job, outcome in report.outcomes.items():
            with contextlib.suppress(Exception):
                if not side.saves.report(job, outcome):
                    side.loads.report(job, outcome)
        with contextlib.suppress(Exception):
            side.settle_waiting(report)

    def pending(self) -> bool:
        """Return whether steps are needed without requests: a report is outstanding."""
        try:
            return self._side is not None and self._side.waiting()
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
    """Save and load nothing more in a connector's engine."""
    if self._retired is not None or self._make_side is None:  # or it is a worker's connector
        return
    self._uncached = self._uncached or reason
    warn(reason)
    side: SchedulerSide | None = self._scheduler
    if side is not None:
        self.unloaded.add_planned([*side.loads.taken, *side.loads.take()[0]])
    self._scheduler, self._retired = None, RetiredScheduler(side)
    with contextlib.suppress(Exception):
        self._say_uncached()


def exclude(self: Any, request: Any, reason: str, *, over: bool = False) -> Tracked | None:
    """Neither save nor load a request any more, or forget one that is over; retire after too many
    errors. Return its record, if there is one.
    """
    side: SchedulerSide | None = self._scheduler
    if side is None:
        return None
    tracked: Tracked | None = None
    try:
        tracked = side.exclude(request.request_id, over=over)
    except Exception as error:  # noqa: BLE001
        retire(self, self.errors.note("exclude", error, "The engine goes on uncached"))
    if self.errors.too_many:
        retire(self, reason)
    return tracked


def of_request(self: Any, call: str, error: Exception, request: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
    """Handle an error in a call about a request."""
    exclude(self, request, self.errors.note(call, error, "The request goes on uncached"))


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


def of_end(self: Any, call: str, error: Exception, request: Any, *args: Any) -> None:  # noqa: ARG001
    """Handle an error when a request ended: vLLM frees its blocks, except for pinned ones."""
    exclude(self, request, self.errors.note(call, error, "Its blocks are freed"), over=True)


def of_all(self: Any, call: str, error: Exception, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
    """Handle an error in a call that the whole part depends on."""
    retire(self, self.errors.note(call, error, "The engine goes on uncached"))


def of_plan(self: Any, call: str, error: Exception, output: Any) -> Any:
    """Handle an error in a step's plan: the loads in it have to fail."""
    of_all(self, call, error)
    return self.build_connector_meta(output)


def of_output(self: Any, call: str, error: Exception, output: Any) -> None:
    """Handle an error in the workers' report, which is not repeated."""
    of_all(self, call, error)
    self.update_connector_output(output)


def of_little(self: Any, call: str, error: Exception, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
    """Handle an error in a call that nothing depends on."""
    reason = self.errors.note(call, error, "The call is ignored")
    if self.errors.too_many:
        retire(self, reason)


_SIDE = "_scheduler"
CALLS = {
    "bind_kv_cache_manager": Call(of_all), "on_new_request": Call(of_request, None, _SIDE),
    "get_num_new_matched_tokens": Call(of_request, (0, False), _SIDE),
    "update_state_after_alloc": Call(of_admission, None, _SIDE), "build_connector_meta": Call(of_plan),
    "get_external_cache_hit_sources": Call(of_little, {}, _SIDE), "update_connector_output": Call(of_output),
    "take_events": Call(of_little, (), _SIDE), "request_finished": Call(of_end, (False, None), _SIDE),
    "request_finished_all_groups": Call(of_end, (False, None), _SIDE), "has_pending_push_work": Call(of_little, False),
    "reset_cache": Call(of_all, True, _SIDE), "before_weights_call": Call(of_all, None, _SIDE),
    "weights_named": Call(of_all, None, _SIDE),
}  # fmt: skip
