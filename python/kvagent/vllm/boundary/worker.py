"""What becomes of a worker's part after an error in a call of vLLM's (boundary)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from kvagent.messages import BlockStatus
from kvagent.vllm.boundary.errors import Call
from kvagent.vllm.plan import LoadJob, Outcome, Report, SaveJob, StepPlan
from kvagent.vllm.worker.side import Results, bad_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvagent.vllm.worker.side import WorkerSide


class LostWorker:
    """Answers for a WorkerSide that failed again and again: each job of a plan fails.

    The agent may still access the memory, so blocks of jobs in flight stay pinned.
    """

    def __init__(self, side: WorkerSide, plan: StepPlan, reason: str) -> None:
        """``plan``: of the step in progress, whose loads have failed."""
        self._side = side
        self._reason = reason
        self._results, self._report = Results(), side.pending_report
        self._fail([save for save in plan.saves if save.job not in side.started])

    def begin(self, plan: StepPlan) -> None:
        """Begin a step."""
        self._fail(plan.saves)
        for load in plan.loads:
            fail(load, self._side, self._results, self._report)

    def results(self) -> Results:
        """Return what has failed since the last call."""
        results, self._results = self._results, Results()
        return results

    def report(self) -> Report:
        """Return why this worker cannot be served, and what has failed since the last call."""
        report, self._report = self._report, Report()
        report.unsupported = self._reason
        return report

    def _fail(self, saves: Iterable[SaveJob]) -> None:
        for save in saves:
            self._report.outcomes[save.job] = Outcome(1, bytes([BlockStatus.FAILED]) * save.blocks)


def fail(load: LoadJob, side: WorkerSide, results: Results, report: Report) -> None:
    """Report a load that was not sent as failed."""
    report.outcomes[load.job] = Outcome(1, bytes([BlockStatus.FAILED]) * load.blocks)
    _failed(load, side, results)


def _failed(load: LoadJob, side: WorkerSide, results: Results) -> None:
    if not load.sync:
        results.received.add(load.request)
    if side.per_block or load.sync:
        results.bad_blocks.update(bad_blocks(load, b"\1" * load.blocks))
    else:
        results.failed.add(load.request)


def abandon(side: WorkerSide, plan: StepPlan) -> Results:
    """Give up what is in flight after an error, and return it with the results that vLLM was not
    told.

    Loads have failed from their first block on, as at their deadline; the agent may still access
    their blocks, which stay pinned until their outcome. Saves are revoked.
    """
    results, side.pending_results = side.pending_results, Results()
    for inflight in side.jobs.values():
        job = inflight.plan
        if isinstance(job, SaveJob):
            with contextlib.suppress(Exception):
                side.words.revoke(job.revoke)
        elif not inflight.reported:
            inflight.reported = True
            side.pending_report.late.add(job.job)
            _failed(job, side, results)
    for load in plan.loads:
        if load.job not in side.jobs and load.job not in side.started:
            fail(load, side, results, side.pending_report)
    return results


def of_step(self: Any, call: str, error: Exception, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
    """Handle an error in a call in a step."""
    self.recover(self.errors.note(call, error, "The worker leaves the agent and joins it again"))


def of_begin(self: Any, call: str, error: Exception, connector_metadata: Any) -> None:
    """Handle an error when a step began: the loads in its plan fail."""
    self._connector_metadata = connector_metadata
    of_step(self, call, error)


def of_results(self: Any, call: str, error: Exception, *args: Any) -> Any:
    """Handle an error when vLLM asked for results."""
    of_step(self, call, error)
    return getattr(self, call)(*args)


def of_start(self: Any, call: str, error: Exception, *args: Any) -> None:  # noqa: ARG001
    """Handle an error before the first step: the worker joins no agent."""
    self.refuse(self.errors.note(call, error, "The engine goes on uncached"))


_SIDE = "_worker"
CALLS = {
    "register_kv_caches": Call(of_start), "unregister_kv_caches": Call(of_step, None, _SIDE),
    "restore_kv_caches": Call(of_start, None, _SIDE), "handle_preemptions": Call(of_step, None, _SIDE),
    "bind_connector_metadata": Call(of_begin), "start_load_kv": Call(of_step, None, _SIDE),
    "wait_for_layer_load": Call(of_step, None, _SIDE), "wait_for_save": Call(of_step, None, _SIDE),
    "get_transfer_results": Call(of_results), "build_connector_worker_meta": Call(of_step, None, "_reporter"),
}  # fmt: skip
