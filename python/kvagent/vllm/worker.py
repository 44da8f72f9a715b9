"""A worker's side: hands the jobs of a step's plan to the agent, and reports what became of them. It never waits.

In a step, vLLM calls: begin (before anything is overwritten), start (behind the launch of the forward pass), end (the
pass's kernels are launched; on a CPU they have ended), results, report. Every promised load is among the results
exactly once: when the agent has reported it, or when its deadline has passed, also if there is no agent. Only an
outcome in the report says that nothing touches the job's blocks any more.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvagent import messages as m
from kvagent.errors import Busy, Malformed, SessionBroken, SessionEnded
from kvagent.messages import BlockStatus
from kvagent.vllm.plan import LoadJob, Outcome, Report, SaveJob, StepPlan

if TYPE_CHECKING:
    from kvagent.shm import SyncWords
    from kvagent.vllm.link import Attachment, Link

EVENTS = 1024  # cells; a step's is reused after that many steps
DRAIN_S = 2.0  # at the end, for the agent to let go of this worker's memory

log = logging.getLogger("kvagent.vllm")


class HostClock:
    """Tells the agent how far the kernels are. On a CPU they have ended when the forward pass returns."""

    def __init__(self, words: SyncWords) -> None:
        self._words = words

    def begin(self, step: int) -> None:
        """The step's kernels are about to be launched."""
        self._words.record(step % self._words.events)

    def end(self, step: int) -> None:
        """All kernels of the step are launched."""
        self._words.step = step
        self._words.fire(step % self._words.events)


@dataclass(slots=True)
class Results:
    """What vLLM is told after a step: requests whose load is over, those among them that failed, and bad blocks."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _UnderWay:
    """A job that the agent has."""

    plan: SaveJob | LoadJob
    attachment: Attachment
    number: int
    """The job's in the session."""
    deadline: float = 0.0
    told: bool = False
    """A load that vLLM does not wait for any more."""
    cancelled: bool = False


@dataclass(slots=True)
class WorkerCounts:
    """What one worker moved, in blocks, and loads that did not come as promised."""

    saved: int = 0
    loaded: int = 0
    loads_failed: int = 0
    loads_late: int = 0


class WorkerSide:
    """See the module. ``per_block``: failures may be told block by block (models with one KV cache group)."""

    def __init__(
        self, link: Link, words: SyncWords, *, per_block: bool, whole_failures: bool, clock: HostClock | None = None
    ) -> None:
        self.counts = WorkerCounts()
        self._link = link
        self._words = words
        self._clock = clock or HostClock(words)
        self._per_block = per_block
        self._whole = whole_failures
        self._step = 0
        self._open: StepPlan | None = None
        self._jobs: dict[int, _UnderWay] = {}
        self._numbers: dict[tuple[int, int], int] = {}  # by attachment and the session's number of the job
        self._sessions: list[Attachment] = []
        self._results = Results()
        self._report = Report()

    def begin(self, plan: StepPlan) -> None:
        """Begins a step, before its kernels are launched: what the scheduler took back is taken back here."""
        if self._open is not None:  # 0.29 and 0.30 do not end a step without tokens
            self.end(self._open)
        self._step += 1
        self._open = plan
        self._clock.begin(self._step)
        for job in plan.revokes:
            if (under := self._jobs.get(job)) and isinstance(under.plan, SaveJob):
                self._words.revoke(under.plan.revoke)
        for job in plan.cancels:
            self._cancel(job)

    def start(self, plan: StepPlan) -> None:
        """Hands in the loads. The step in flight may still write to their destination: each names it."""
        for load in plan.loads:
            self._submit(load)

    def end(self, plan: StepPlan) -> None:
        """Ends the step and hands in the saves."""
        if self._open is None:
            return
        self._open = None
        for save in plan.saves:
            self._submit(save)
        self._clock.end(self._step)

    def results(self) -> Results:
        """What is over since the last call."""
        self._poll()
        self._give_up(time.monotonic())
        results, self._results = self._results, Results()
        return results

    def report(self) -> Report | None:
        """What the scheduler's side has to know since the last call."""
        if not self._report.outcomes and not self._report.late:
            return None
        report, self._report = self._report, Report()
        return report

    def busy(self) -> bool:
        """Whether the agent has jobs of this worker."""
        return bool(self._jobs)

    def leave(self) -> bool:
        """Ends all sessions and waits, bounded, until the agent has let go of the memory. Whether it has."""
        if last := self._link.close():
            self._adopt(last)
        fenced = [attachment.session.drain(DRAIN_S) for attachment in self._sessions]
        for attachment, free in zip(list(self._sessions), fenced, strict=True):
            if free:
                self._fenced(attachment)
            else:
                attachment.session.close()
        self._sessions = []
        return all(fenced)

    def rejoin(self, link: Link) -> None:
        """Goes on with another link, behind ``leave``."""
        self._link = link

    def _submit(self, plan: SaveJob | LoadJob) -> None:
        attachment = self._attached()
        if attachment is None or attachment.session.boot != plan.boot:
            return self._refused(plan, BlockStatus.FAILED)
        session, event = attachment.session, self._step % self._words.events
        try:
            if isinstance(plan, SaveJob):
                revoke = plan.revoke if session.version > 1 else m.NO_INDEX
                number = session.save(plan.sections, epoch=plan.epoch, step=self._step, event=event, revoke=revoke)
            elif not plan.sections:
                return self._refused(plan, BlockStatus.FAILED)
            else:
                number = session.load(plan.sections, epoch=plan.epoch, step=self._step, event=event, lease=plan.lease)
        except (Busy, SessionBroken, SessionEnded, Malformed) as error:
            if isinstance(error, Malformed):
                log.warning("a job of %d sections is not sent: %s", len(plan.sections), error)
            return self._refused(plan, BlockStatus.BUSY if isinstance(error, Busy) else BlockStatus.FAILED)
        under = _UnderWay(plan, attachment, number)
        if isinstance(plan, LoadJob):
            under.deadline = time.monotonic() + plan.deadline_s
        self._jobs[plan.job] = under
        self._numbers[id(attachment), number] = plan.job
        return None

    def _refused(self, plan: SaveJob | LoadJob, status: BlockStatus) -> None:
        """The agent never had it."""
        self._over(_UnderWay(plan, None, 0), bytes([status]) * _blocks(plan))  # type: ignore[arg-type]

    def _cancel(self, job: int) -> None:
        under = self._jobs.get(job)
        if under is None:
            return
        under.cancelled = True
        try:
            under.attachment.session.cancel(under.number)
        except (Busy, SessionBroken, SessionEnded):
            return  # its DONE or the session's end comes nevertheless

    def _attached(self) -> Attachment | None:
        current = self._link.current()
        if current is not None and current not in self._sessions:
            self._adopt(current)
        return current

    def _adopt(self, attachment: Attachment) -> None:
        if attachment not in self._sessions:
            self._sessions.append(attachment)

    def _poll(self) -> None:
        self._attached()
        for attachment in list(self._sessions):
            try:
                for event in attachment.session.poll():
                    if isinstance(event, m.Done):
                        self._done(attachment, event)
            except SessionEnded:
                self._fenced(attachment)

    def _done(self, attachment: Attachment, event: m.Done) -> None:
        job = self._numbers.pop((id(attachment), event.job), None)
        under = self._jobs.pop(job, None) if job is not None else None
        if under is not None:
            self._over(under, event.statuses)

    def _fenced(self, attachment: Attachment) -> None:
        """The agent's end of the session is gone: it touches nothing any more."""
        self._sessions.remove(attachment)
        attachment.session.close()
        self._link.lost(attachment)
        for job, under in list(self._jobs.items()):
            if under.attachment is attachment:
                del self._jobs[job]
                self._numbers.pop((id(attachment), under.number), None)
                self._over(under, bytes([BlockStatus.FAILED]) * _blocks(under.plan))

    def _over(self, under: _UnderWay, statuses: bytes) -> None:
        """A job has ended, and its blocks are free."""
        plan = under.plan
        self._report.outcomes[plan.job] = Outcome(1, statuses)
        if isinstance(plan, SaveJob):
            self._words.clear_revoke(plan.revoke)
            self.counts.saved += statuses.count(BlockStatus.OK)
            return
        self.counts.loaded += statuses.count(BlockStatus.OK)
        if not under.told:
            self._tell(plan, statuses, cancelled=under.cancelled)

    def _tell(self, plan: LoadJob, statuses: bytes, *, cancelled: bool) -> None:
        self._results.received.add(plan.request)
        if cancelled or (statuses and not any(statuses)):
            return
        self.counts.loads_failed += 1
        if self._per_block and statuses:
            self._results.bad_blocks.update(_bad(plan, statuses))
        else:
            self._results.failed.add(plan.request)

    def _give_up(self, now: float) -> None:
        """Tells of loads whose deadline has passed. That is no fence: they go on being under way."""
        for under in self._jobs.values():
            plan = under.plan
            if not isinstance(plan, LoadJob) or under.told or now < under.deadline:
                continue
            under.told = True
            self.counts.loads_late += 1
            self._report.late.add(plan.job)
            self._results.received.add(plan.request)
            if not under.cancelled:
                if self._whole:
                    self._results.failed.add(plan.request)
                else:  # from its first block on, which is the request's first: it is given other ones
                    self._results.bad_blocks.update(_bad(plan, b"\1" * _blocks(plan)))
            self._cancel(plan.job)


def _blocks(plan: SaveJob | LoadJob) -> int:
    return sum(len(section.blocks) // 4 for section in plan.sections)


def _bad(plan: LoadJob, statuses: bytes) -> set[int]:
    blocks = memoryview(b"".join(section.blocks for section in plan.sections)).cast("I")
    return {block for block, status in zip(blocks, statuses, strict=False) if status != 0}
