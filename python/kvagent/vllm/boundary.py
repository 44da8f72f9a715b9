"""The boundary between vLLM and the connector: no error of the connector's leaves a call of vLLM's
(docs/VLLM.md, "Errors"), and an engine that cannot be served runs without the agent and says so.

A call that fails gets the answer of a connector that has nothing. If it is about one request, that
request goes on uncached; after any other error the scheduler's part retires, and a worker leaves
the agent and joins it again. A part that fails again and again retires for good. Each kind of error
is logged once with its traceback, and all are counted (``errors``).

Errors by which the connector refuses a start leave it: Unsupported with ``on_unsupported: fail``,
and OptionError. Otherwise the scheduler's part retires, for a reason that it finds at its start, or
that a worker reports with its first step: a worker sees the tensors of its KV caches, and groups
that vLLM flattens for the scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvagent.messages import Group, Role
from kvagent.registration import Registration, identity_pairs
from kvagent.vllm.counters import ErrorCounts
from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.link import Link
from kvagent.vllm.options import FAIL, OptionError, Options
from kvagent.vllm.plan import LoadJob, Report, StepPlan
from kvagent.vllm.scheduler.agent_session import AgentSession
from kvagent.wire import Packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.side import SchedulerSide


MAX_ERRORS = 8
"""The most errors after which a part goes on."""

log = logging.getLogger("vllm.kvagent")
_Class = TypeVar("_Class", bound=type)


class Errors:
    """The errors of one part in calls of vLLM's."""

    def __init__(self) -> None:
        self.counts = ErrorCounts()
        self._logged: set[tuple[str, str]] = set()

    def note(self, call: str, error: Exception, what: str) -> str:
        """Count an error, and log the first of its kind. Return it as a reason."""
        self.counts.errors += 1
        reason = f"{type(error).__name__} in {call}: {error}"
        kind = call, type(error).__name__
        if kind not in self._logged:
            self._logged.add(kind)
            log.error("%s. %s. Please report it", reason, what, exc_info=error)
        return reason

    @property
    def too_many(self) -> bool:
        """Whether the part is to retire."""
        return self.counts.errors > MAX_ERRORS


class Call(NamedTuple):
    """What becomes of an error in a call of vLLM's, and what a part that has nothing answers."""

    failed: Callable[..., None]
    """Takes the connector, the call's name, the error and the call's arguments."""
    answer: Any = None
    part: str = ""
    """The attribute with the part that the call is made of: without it nothing is called."""
    again: bool = False
    """Whether the call is then made again, of what took the place of the part that failed."""


def contained(calls: Mapping[str, Call]) -> Callable[[_Class], _Class]:
    """Return a decorator of a class with these methods."""

    def decorate(cls: _Class) -> _Class:
        for name, one in calls.items():
            setattr(cls, name, _guarded(name, getattr(cls, name), one))
        return cls

    return decorate


def _guarded(name: str, method: Callable[..., Any], one: Call) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if one.part and getattr(self, one.part) is None:
            return one.answer
        try:
            return method(self, *args, **kwargs)
        except OptionError:
            raise
        except Exception as error:
            if isinstance(error, Unsupported) and getattr(self._options, "on_unsupported", "") == FAIL:
                raise
            one.failed(self, name, error, *args, **kwargs)
        return call(self, *args, **kwargs) if one.again else one.answer

    return call


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
        plan = StepPlan(idle=not output.num_scheduled_tokens) if self.pending() else StepPlan(uncached=True)
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
                side.settle(job, outcome)
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
            plan.loads, plan.uncached = [*plan.loads, *jobs], False
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


def _exclude(self: Any, call: str, error: Exception, request: Any, *, over: bool) -> Tracked | None:
    """Neither save nor load a request any more, or forget one that is over; retire after too many
    errors. Return its record, if there is one.
    """
    reason = self.errors.note(call, error, "The request is served uncached")
    tracked: Tracked | None = None
    try:
        tracked = self._scheduler.exclude(request.request_id, over=over)
    except Exception as again:  # noqa: BLE001
        of_all(self, "exclude", again)
    if self.errors.too_many:
        retire(self, reason)
    return tracked


def of_request(self: Any, call: str, error: Exception, request: Any, *args: Any) -> None:  # noqa: ARG001
    """Handle an error in a call about a request."""
    _exclude(self, call, error, request, over=False)


def of_admission(self: Any, call: str, error: Exception, request: Any, blocks: Any, num_external_tokens: int) -> None:
    """Handle an error when a request was admitted: vLLM waits for what was promised, or computes
    in this step from what did not come.
    """
    waits = self._scheduler.waiting_loads
    tracked = _exclude(self, call, error, request, over=False)
    if num_external_tokens <= 0:
        return
    own = 0 if tracked is None else tracked.own // self._geometry.groups[0].block_tokens
    sync = tracked is not None and tracked.waits
    job = self.unloaded.add(request.request_id, blocks, own, sync=sync)
    if sync:
        try:
            waits.start(job, tracked, num_external_tokens)
        except Exception as again:  # noqa: BLE001
            of_all(self, call, again)


def of_end(self: Any, call: str, error: Exception, request: Any, *args: Any) -> None:  # noqa: ARG001
    """Handle an error when a request ended: vLLM frees its blocks, except for pinned ones."""
    _exclude(self, call, error, request, over=True)


def of_all(self: Any, call: str, error: Exception, *args: Any) -> None:  # noqa: ARG001
    """Handle an error in a call that the whole part depends on."""
    retire(self, self.errors.note(call, error, "The engine goes on uncached"))


def of_little(self: Any, call: str, error: Exception, *args: Any) -> None:  # noqa: ARG001
    """Handle an error in a call that nothing depends on."""
    reason = self.errors.note(call, error, "The call is ignored")
    if self.errors.too_many:
        retire(self, reason)


_SIDE = "_scheduler"
SCHEDULER = {
    "bind_kv_cache_manager": Call(of_all), "on_new_request": Call(of_request, None, _SIDE),
    "get_num_new_matched_tokens": Call(of_request, (0, False), _SIDE),
    "update_state_after_alloc": Call(of_admission, None, _SIDE), "build_connector_meta": Call(of_all, again=True),
    "get_external_cache_hit_sources": Call(of_little, {}, _SIDE),
    "update_connector_output": Call(of_all, again=True), "take_events": Call(of_little, (), _SIDE),
    "request_finished": Call(of_end, (False, None), _SIDE),
    "request_finished_all_groups": Call(of_end, (False, None), _SIDE), "has_pending_push_work": Call(of_little, False),
    "reset_cache": Call(of_all, True, _SIDE), "before_weights_call": Call(of_all, None, _SIDE),
    "weights_named": Call(of_all, None, _SIDE),
}  # fmt: skip


def of_step(self: Any, call: str, error: Exception, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
    """Handle an error in a call in a step."""
    self.recover(self.errors.note(call, error, "The worker leaves the agent and joins it again"))


def of_begin(self: Any, call: str, error: Exception, connector_metadata: Any) -> None:
    """Handle an error when a step began: the loads in its plan fail."""
    self._connector_metadata = connector_metadata
    of_step(self, call, error)


def of_start(self: Any, call: str, error: Exception, *args: Any) -> None:  # noqa: ARG001
    """Handle an error before the first step: the worker joins no agent."""
    self.refuse(self.errors.note(call, error, "The engine goes on uncached"))


_WORKER = "_worker"
WORKER = {
    "register_kv_caches": Call(of_start), "unregister_kv_caches": Call(of_step, None, _WORKER),
    "restore_kv_caches": Call(of_start, None, _WORKER), "handle_preemptions": Call(of_step, None, _WORKER),
    "bind_connector_metadata": Call(of_begin), "start_load_kv": Call(of_step, None, _WORKER),
    "wait_for_layer_load": Call(of_step, None, _WORKER), "wait_for_save": Call(of_step, None, _WORKER),
    "get_transfer_results": Call(of_step, again=True),
    "build_connector_worker_meta": Call(of_step),
}  # fmt: skip


PAIR = "uncached"
"""The key of the identity whose value is the reason."""
MAX_REASON = 1000  # characters that the agent is told


def warn(reason: str) -> None:
    """Log that the engine is served uncached, with the reason and what to do."""
    log.warning(
        "this engine is served UNCACHED: nothing is saved or loaded, and every prompt is computed. Reason: %s. "
        'To serve it cached, change what the reason names (docs/VLLM.md, "Models" and "What is not supported"); '
        '"on_unsupported": "fail" in kv_connector_extra_config ends such a start instead',
        reason.rstrip("."),
    )


def notice(engine: str, identity: dict[str, str], reason: str) -> Registration:
    """Return the registration by which an agent lists the engine with the reason: that of a
    scheduler whose only rank never comes. ``identity`` has the keys that every identity needs.
    """
    text = " ".join(reason.split())[:MAX_REASON]
    return Registration(
        instance=engine[:128], role=Role.SCHEDULER, identity=identity_pairs(identity | {PAIR: text}),
        groups=(Group(1, 1),), hash_tokens=1,
    )  # fmt: skip


class Notice(AgentSession):
    """Keeps a session that says that the engine is served uncached, as long as it is polled."""

    def __init__(self, socket_dir: str, registration: Registration) -> None:
        super().__init__(Link(socket_dir, "an engine that is not served", lambda: registration), Options())
