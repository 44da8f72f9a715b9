"""Messages between the two roles of the connector: a plan for every step and worker, and one report
joined from those of all workers.

Both are pickled. So they have no slots, with which a dataclass takes ten times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvagent.wire import Packed

Depends = tuple[tuple[int, int], ...]
"""What blocks depend on besides tokens and weights: the number under which a worker has it, and the
serial of what it has under that.
"""
REVOKES = 256  # revocation words, and so the maximum of saves in flight


@dataclass
class SaveJob:
    """Blocks to save. ``boot``, ``epoch`` and ``space`` are those of the session for which the job
    was planned, the only one to which it goes.
    """

    job: int
    boot: bytes
    epoch: int
    revoke: int
    """The index of the revocation word, equal in every worker."""
    sections: Packed
    space: bytes = b""
    depends: Depends = ()
    """What the blocks depend on; the job must not be sent if one of it has changed."""
    elsewhere: tuple[Any, ...] = ()
    """What the job is for at other agents, for guests."""

    @property
    def blocks(self) -> int:
        """Return the number of blocks."""
        return self.sections.blocks


@dataclass
class LoadJob:
    """Blocks to load for a request. What SaveJob has too is the same here.

    A load too large for one job of the session has several parts.
    """

    job: int
    boot: bytes
    epoch: int
    request: str
    lease: int
    deadline_s: float
    parts: tuple[Packed, ...]
    ids: bytes
    """The engine's block IDs of all parts in order, u32 LE."""
    space: bytes = b""
    sync: bool = False
    """Whether the step waits for it, because the request computes in the same step."""
    depends: Depends = ()
    """What the blocks depend on; the load fails if one of it has changed by its end."""
    elsewhere: tuple[Any, ...] = ()

    @property
    def blocks(self) -> int:
        """Return the number of blocks."""
        return len(self.ids) // 4


@dataclass
class StepPlan:
    """A worker's tasks for one step, besides the computation."""

    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    """Loads whose request has ended."""
    revokes: list[int] = field(default_factory=list)
    """Saves whose blocks are free from the next step on."""
    idle: bool = False
    """Whether the engine has no request: the step only collects reports of jobs in flight."""
    stopped: bool = False
    """Whether the agent does not respond: loads are no longer waited for."""
    generation: tuple[int, str] | None = None
    """The weights generation with its serial number."""
    decoding: int = 0
    """The number of requests if each of them computes its next token and none is new, else 0."""
    uncached: bool = False
    """Whether the engine is served without the agent, for good."""
    told: dict[str, Any] = field(default_factory=dict)
    """For the workers' guests, by name."""


@dataclass
class Outcome:
    """How a job ended in ``ranks`` workers: the worst status of each block."""

    ranks: int
    statuses: bytes

    def join(self, other: Outcome) -> Outcome:
        """Return the outcome in both."""
        return Outcome(self.ranks + other.ranks, bytes(map(max, self.statuses, other.statuses)))


@dataclass
class Report:
    """The outcomes of jobs in one or more workers.

    An outcome is a fence: the blocks are no longer accessed.
    """

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    """Loads that were given up at their deadline; their outcome follows."""
    workers: tuple[WorkerInfo, ...] = ()
    """In a worker's first report, the facts about it."""
    unsupported: str = ""
    """Why a worker cannot be served: the engine is to be served without the agent."""
    news: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """From the workers' guests, by name."""

    def join(self, other: Report) -> Report:
        """Return the report of both."""
        outcomes, news = dict(self.outcomes), dict(self.news)
        for job, outcome in other.outcomes.items():
            outcomes[job] = outcomes[job].join(outcome) if job in outcomes else outcome
        for name, told in other.news.items():
            news[name] = news.get(name, ()) + told
        reason = self.unsupported or other.unsupported
        return Report(outcomes, self.late | other.late, self.workers + other.workers, reason, news)


@dataclass
class WorkerInfo:
    """The facts about a worker that the scheduler needs."""

    node: str = ""
    """The node that it is on (geometry.node); empty if it cannot tell."""
    identity: tuple[tuple[str, str], ...] = ()
    """What it registers (space.identity); empty if the scheduler is to keep its own."""
