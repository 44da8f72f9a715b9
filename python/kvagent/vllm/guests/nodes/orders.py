"""Messages between the scheduler and the delegates of other nodes, in plans and reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvagent.vllm.plan import LoadJob, SaveJob

if TYPE_CHECKING:
    from kvagent.vllm.plan import StepPlan

_Job = TypeVar("_Job", SaveJob, LoadJob)
NODES = "nodes"
"""The name under which the scheduler and the delegates tell each other."""


@dataclass(frozen=True, slots=True)
class Question:
    """A look-up that reserves blocks. Each is answered once, as long as it is open."""

    number: int
    tokens: int
    own: int
    hash_len: int
    hashes: bytes
    """Joined."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What the delegates are to do, in this order."""

    resets: int
    """The resets ordered so far."""
    open: tuple[int, ...] = ()
    """The questions that are of use: the others are given up, and their leases released."""
    questions: tuple[Question, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a question."""

    number: int
    tokens: int
    """That are stored, from the first one on."""
    lease: int
    """Pins them, unless it is 0."""
    lost: bool = False
    """Whether there was no answer in time, or no agent."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A delegate's session."""

    boot: bytes
    number: int
    epoch: int
    space: bytes
    job_blocks: int
    """The most blocks that the agent accepts in one job."""


@dataclass(frozen=True, slots=True)
class News:
    """The state of a delegate where it has changed, and its answers."""

    part: int
    resets: int
    """The resets that it has done, or will do before it has a session."""
    session: Facts | None
    stopped: bool = False
    """Whether the agent does not respond though its sockets exist."""
    late: bool = False
    """Whether leases may still come in answers that are late."""
    reset: bool = False
    """Whether another engine has reset the space."""
    identity: tuple[tuple[str, str], ...] = ()
    """Of the part, without its weights generation."""
    answers: tuple[Answered, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """What a job is for in another part: see SaveJob and LoadJob."""

    boot: bytes
    epoch: int
    space: bytes
    lease: int


NOWHERE = Target(b"", 0, b"", 0)
"""A job that was planned without a session."""


def localized(plan: StepPlan, part: int) -> StepPlan:
    """Return the plan as the ranks of another part than the scheduler's read it."""
    if not (plan.saves or plan.loads):
        return plan
    saves, loads = [_at(part, save) for save in plan.saves], [_at(part, load) for load in plan.loads]
    return replace(plan, saves=saves, loads=loads)


def _at(part: int, job: _Job) -> _Job:
    target = job.elsewhere[part - 1] if job.elsewhere else NOWHERE
    local: dict[str, Any] = {"boot": target.boot, "epoch": target.epoch, "space": target.space}
    if isinstance(job, LoadJob):
        local["lease"] = target.lease
    return replace(job, **local)
