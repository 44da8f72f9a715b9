"""The boundary between vLLM and the connector: no error of the connector's leaves a call of vLLM's
(docs/VLLM.md, "Errors"), and an engine that cannot be served runs without the agent and says so.

A call that fails gets the answer of a connector that has nothing. Errors by which the connector
refuses a start leave it: Unsupported with ``on_unsupported: fail``, and OptionError. Otherwise the
scheduler's part retires, for a reason that it finds at its start, or that a worker reports with its
first step: a worker sees the tensors of its KV caches, and groups that vLLM flattens for the
scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import struct
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
    to: str = ""
    """The part's method to which the call is forwarded as it is; the class has none then."""


def contained(calls: Mapping[str, Call]) -> Callable[[_Class], _Class]:
    """Return a decorator of a class with these methods."""

    def decorate(cls: _Class) -> _Class:
        for name, one in calls.items():
            setattr(cls, name, _guarded(name, None if one.to else getattr(cls, name), one))
        return cls

    return decorate


def _guarded(name: str, method: Callable[..., Any] | None, one: Call) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = getattr(self, one.part) if one.part else self
        if part is None:
            return one.answer
        try:
            return method(self, *args, **kwargs) if method else getattr(part, one.to)(*args, **kwargs)
        except OptionError:
            raise
        except Exception as error:
            if isinstance(error, Unsupported) and getattr(self._options, "on_unsupported", "") == FAIL:
                raise
            one.failed(self, name, error, *args, **kwargs)
        return call(self, *args, **kwargs) if one.again else one.answer

    return functools.wraps(method)(call) if method else call


class RetiredScheduler:
    """Takes the place of a SchedulerSide that failed, or whose engine cannot be served: nothing is
    saved or loaded any more. None: there was none.

    Saves in flight are revoked with the next plan, and loads end as they do otherwise. The blocks
    of both stay pinned until that. Then the workers leave the agent.
    """

    def __init__(self, side: SchedulerSide | None) -> None:
        self._side = side
        self._revokes = True
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
                self._side.saves.revoke(awaited=True)  # what is free now might be reused in this step
                plan.revokes = self._side.saves.in_flight()  # the side may have failed after it revoked some
                self._side.take_revokes()
        return plan

    def report(self, report: Report) -> None:
        """Release the blocks of jobs that are over. What a step computed from a load that failed is
        dropped.
        """
        if (side := self._side) is not None:
            for outcomes in [*({job: outcome} for job, outcome in report.outcomes.items()), {}]:
                with contextlib.suppress(Exception):
                    side.settle(Report(outcomes, report.late))

    def pending(self) -> bool:
        """Return whether steps are needed without requests: a report is outstanding."""
        with contextlib.suppress(Exception):  # the blocks stay pinned
            return self._side is not None and self._side.waiting()
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
        packed = struct.pack(f"<{len(ids)}I", *ids)
        self._jobs.append(LoadJob(self._number, b"", 0, request, 0, 0.0, (Packed(b"", len(ids)),), packed, sync=sync))
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


def notice(socket_dir: str, engine: str, identity: dict[str, str], reason: str) -> AgentSession:
    """Return the session by which an agent lists the engine with the reason, as long as it is
    polled: that of a scheduler whose only rank never comes. ``identity`` has the keys that every
    identity needs.
    """
    text = " ".join(reason.split())[:MAX_REASON]
    registration = Registration(
        instance=engine[:128], role=Role.SCHEDULER, identity=identity_pairs(identity | {PAIR: text}),
        groups=(Group(1, 1),), hash_tokens=1,
    )  # fmt: skip
    return AgentSession(Link(socket_dir, "an engine that is not served", lambda: registration), Options())
