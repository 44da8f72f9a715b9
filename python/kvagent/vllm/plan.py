"""What the two roles of a connector say to each other: plans from the scheduler, reports from the workers.

Both are pickled on their way, a plan for every step and worker, a report from every worker; reports of all workers are
joined into one. Each says itself how it is pickled: what dataclass makes for that takes ten times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvagent.packing import Packed

REVOKES = 256  # words, so that many saves under way


@dataclass(slots=True)
class SaveJob:
    """Blocks to be stored. ``boot`` and ``epoch`` are those in which they were planned."""

    job: int
    boot: bytes
    epoch: int
    revoke: int
    """The revocation word, the same number in every worker."""
    sections: Packed
    space: bytes = b""
    """The space in which it was planned: no other may have it."""

    @property
    def blocks(self) -> int:
        """How many blocks it names."""
        return self.sections.blocks

    def __reduce__(self) -> tuple[Any, ...]:
        return SaveJob, (self.job, self.boot, self.epoch, self.revoke, self.sections, self.space)


@dataclass(slots=True)
class LoadJob:
    """Blocks to be brought for a request. It may be too much for one job of the session: then it has several parts."""

    job: int
    boot: bytes
    epoch: int
    request: str
    lease: int
    deadline_s: float
    parts: tuple[Packed, ...]
    ids: bytes
    """The engine's blocks of all parts in order, u32 LE."""
    space: bytes = b""
    """As a save's."""

    @property
    def blocks(self) -> int:
        """How many blocks it names."""
        return len(self.ids) // 4


@dataclass(slots=True)
class StepPlan:
    """What a worker has to do in one step, besides computing."""

    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    """Loads whose request is gone."""
    revokes: list[int] = field(default_factory=list)
    """Saves whose blocks are free from the next step on."""
    idle: bool = False
    """No request is there: the step is made only so that what is under way be reported."""
    stopped: bool = False
    """The agent does not answer: loads are not waited for any longer."""
    generation: tuple[int, str] | None = None
    """The weights generation with its serial number, until all workers have reported that number."""

    def __reduce__(self) -> tuple[Any, ...]:
        return StepPlan, (
            self.saves, self.loads, self.cancels, self.revokes, self.idle, self.stopped, self.generation,
        )  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """How a job ended in ``ranks`` workers: the worst status of each block."""

    ranks: int
    statuses: bytes

    def join(self, other: Outcome) -> Outcome:
        """The outcome in both."""
        worst = bytes(map(max, self.statuses, other.statuses))
        return Outcome(self.ranks + other.ranks, worst)

    def __reduce__(self) -> tuple[Any, ...]:
        return Outcome, (self.ranks, self.statuses)


@dataclass(slots=True)
class Report:
    """What became of jobs in one or more workers. An outcome is a fence: nothing touches the blocks any more."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    """Loads that were given up; their outcome is still to come."""
    workers: tuple[WorkerInfo, ...] = ()
    """In a worker's first report, where its words are."""
    moved: tuple[int, ...] = ()
    """Serial numbers of weights generations that workers have gone over to, one of each worker."""

    def join(self, other: Report) -> Report:
        """The report of both."""
        outcomes = dict(self.outcomes)
        for job, outcome in other.outcomes.items():
            outcomes[job] = outcomes[job].join(outcome) if job in outcomes else outcome
        return Report(outcomes, self.late | other.late, self.workers + other.workers, self.moved + other.moved)

    def __reduce__(self) -> tuple[Any, ...]:
        return Report, (self.outcomes, self.late, self.workers, self.moved)


@dataclass(slots=True)
class WorkerInfo:
    """Where the scheduler finds a worker's revocation words: a file of /proc, and the place of the words in it.

    And what else it has to know of the worker.
    """

    path: str
    size: int
    revoke_off: int
    revokes: int
    resolved: str = ""
    """The attention backends that its layers use (resolved); empty where they do not say."""
