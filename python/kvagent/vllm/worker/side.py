"""A worker's side: hands the jobs of a step's plan to the agent, and reports what became of them. It never waits.

In a step, vLLM calls: take_back (before anything is overwritten), begin, start (behind the launch of the forward pass),
end (the pass's kernels are launched; on a CPU they have ended), results, report. Every promised load is among the
results exactly once: when the agent has reported it, when its deadline has passed, or the agent stands still, also if
there is no agent. Only an outcome in the report says that nothing touches the job's blocks any more.

A worker's jobs that the agent has, by the numbers that each session gave them.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvagent import messages as m
from kvagent.errors import Busy, Malformed, SessionBroken, SessionEnded
from kvagent.messages import BlockStatus
from kvagent.vllm.link import LISTEN_STEPS
from kvagent.vllm.plan import LoadJob, Outcome, Report, SaveJob, StepPlan, WorkerInfo
from kvagent.vllm.worker.idle_backoff import IdleBackoff
from kvagent.vllm.worker.sync import HostClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.packing import Packed
    from kvagent.shm import SyncWords
    from kvagent.vllm.link import Attachment, Link
    from kvagent.vllm.worker.sync import Clock


@dataclass(eq=False, slots=True)
class InflightJob:
    """A job. A load of many blocks has several parts, each a job of the session; a save has one."""

    plan: SaveJob | LoadJob
    attachment: Attachment | None
    parts: list[bytes | None] = field(default_factory=list)
    """What became of the blocks of each part; None as long as the agent has it."""
    numbers: list[int] = field(default_factory=list)
    """Of the parts that the agent got, in the session."""
    deadline: float = 0.0
    reported: bool = False
    """A load that vLLM does not wait for any more."""
    cancelled: bool = False

    @property
    def done(self) -> bool:
        """Whether the agent has none of its parts."""
        return None not in self.parts

    @property
    def statuses(self) -> bytes:
        """Of all blocks, once it is over."""
        parts = [part for part in self.parts if part is not None]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def cancel(self) -> None:
        """Asks the agent to end it. Its DONE, or the session's end, comes nevertheless."""
        self.cancelled = True
        if self.attachment is None:
            return
        for number in self.numbers:
            try:
                self.attachment.session.cancel(number)
            except (Busy, SessionBroken, SessionEnded):
                return


def lost(part: bytes | None, blocks: int, status: BlockStatus = BlockStatus.FAILED) -> bytes:
    """The statuses of a part that the agent reports no more."""
    return bytes([status]) * blocks if part is None else part


_OK = int(BlockStatus.OK)
MISMATCH_S = 1.0  # that the scheduler plans for another agent, before this worker joins that one
DRAIN_S = 2.0  # at the end, for the agent to let go of this worker's memory

log = logging.getLogger("kvagent.vllm")


@dataclass(slots=True)
class Results:
    """What vLLM is told after a step: requests whose load is over, those among them that failed, and bad blocks."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


NO_RESULTS = Results()  # nobody adds to it


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
        self, link: Link, words: SyncWords, *, per_block: bool, whole_failures: bool, clock: Clock | None = None,
        generation: str = "", use_generation: Callable[[str], None] | None = None, resolved: str = "",
    ) -> None:  # fmt: skip
        """``use_generation`` has the registrations to come made for another generation than ``generation``."""
        self.counts = WorkerCounts()
        self._generation = generation
        self._use_generation = use_generation
        self._serial = 0  # of the generation, as the scheduler counts
        self._link = link
        self._words = words
        self._clock: Clock = clock or HostClock(words)
        self._per_block = per_block
        self._whole_failures = whole_failures
        self._backoff = IdleBackoff()
        self._step = 0
        self._open: StepPlan | None = None
        self._jobs: dict[int, InflightJob] = {}
        self._numbers: dict[tuple[int, int], tuple[int, int]] = {}  # by attachment and number in it: job and part
        self._sessions: list[Attachment] = []
        self._mismatch: tuple[Attachment, float] | None = None  # whose agent is not the scheduler's, and since when
        self._results = Results()
        self._polls = True  # in this step
        path = f"/proc/{os.getpid()}/fd/{words.memory.fd}"
        self._report = Report(workers=(WorkerInfo(path, words.memory.size, words.revoke_off, words.revokes, resolved),))

    def revoke_saves(self, plan: StepPlan) -> None:
        """Revokes the saves that the scheduler took back: their blocks may be overwritten from the next step on."""
        if self._open is not None:  # 0.29 and 0.30 do not end a step without tokens
            self.end(self._open)
        for job in plan.revokes:
            if (inflight := self._jobs.get(job)) and isinstance(inflight.plan, SaveJob):
                self._words.revoke(inflight.plan.revoke)

    def begin(self, plan: StepPlan) -> None:
        """Begins a step, before its kernels are launched."""
        if self._open is not None or plan.revokes:
            self.revoke_saves(plan)  # vLLM has asked for it before; it costs nothing then
        self._step = step = self._step + 1
        self._open = plan
        self._polls = bool(self._jobs) or plan.idle or step % LISTEN_STEPS == 0
        self._backoff.step(idle=plan.idle)
        self._clock.begin(step)
        if plan.generation is not None:
            self._move(*plan.generation)
        for job in plan.cancels:
            if inflight := self._jobs.get(job):
                inflight.cancel()
        if plan.stopped:
            for inflight in self._jobs.values():
                inflight.deadline = 0.0

    def start(self, plan: StepPlan) -> None:
        """Hands in the loads. The step in flight may still write to their destination: each names it."""
        for load in plan.loads:
            self._submit(load, load.parts)

    def end(self, plan: StepPlan) -> None:
        """Ends the step and hands in the saves."""
        if self._open is None:
            return
        self._open = None
        self._clock.end(self._step)
        if plan.saves:
            self._save(plan.saves)

    def results(self) -> Results:
        """What is over since the last call.

        A job of this very step has hardly ended: to look for it would cost more than all the rest of a step.
        """
        if self._polls:
            self._poll()
            patient = self._backoff.active and not self._report.outcomes
            if patient and self._backoff.wait(one.session.fileno() for one in self._sessions):
                self._poll()
            self._expire_loads(time.monotonic())
        if not self._results.received:
            return NO_RESULTS
        results, self._results = self._results, Results()
        return results

    def report(self) -> Report | None:
        """What the scheduler's side has to know since the last call."""
        report = self._report
        if not (report.outcomes or report.late or report.workers or report.moved):
            return None
        self._report = Report()
        return report

    def busy(self) -> bool:
        """Whether the agent has jobs of this worker."""
        return bool(self._jobs)

    def close(self) -> bool:
        """Leaves. Whether the agent has let go of the memory; else its sessions stay open as long as this side is kept.

        To close one would tell the agent that this process touches its memory no more, and would prove nothing here.
        """
        return self.leave()

    def fence(self) -> Callable[[], bool]:
        """After ``leave``: a question whether every agent that has this worker's memory is gone from it.

        The answer is what ``results`` has heard. It is never yes for a registration whose outcome is not known.
        """
        sessions, settled = [attachment.session for attachment in self._sessions], not self._link.busy
        return lambda: settled and all(session.ended for session in sessions)

    def leave(self) -> bool:
        """Ends all sessions and waits, bounded, until the agent has let go of the memory. Whether it has.

        Where it has not, its session is listened to, though nothing is said in it: the end is the fence of its jobs.
        """
        if last := self._link.close():
            self._add_session(last)
        if link_busy := self._link.busy:
            log.warning("a registration is still being made: what becomes of it is not known")
        fenced = [attachment.session.drain(DRAIN_S) for attachment in self._sessions]
        for attachment, free in zip(list(self._sessions), fenced, strict=True):
            if free:
                self._fenced(attachment)
        return all(fenced) and not link_busy

    def rejoin(self, link: Link, clock: Clock | None = None) -> None:
        """Goes on with another link, behind ``leave``."""
        self._link = link
        self._clock = clock or self._clock

    def _move(self, serial: int, generation: str) -> None:
        """Goes over to a generation of the weights: another space, in another session.

        The sessions of the one that is left end, and their ends are the fences of the jobs that they have.
        """
        if serial == self._serial:
            return
        self._serial = serial
        self._report.moved = (*self._report.moved, serial)
        if generation == self._generation:
            return
        self._generation = generation
        if self._use_generation is not None:
            self._use_generation(generation)
        if last := self._link.renew():
            self._add_session(last)
        for attachment in self._sessions:
            attachment.session.leave()

    def _save(self, saves: Sequence[SaveJob]) -> None:
        """Hands in the saves of a step, in one piece: what is sent wakes the agent, which costs more than to send."""
        attachment = self._attached()
        if attachment is not None:
            attachment.session.cork()
        try:
            for save in saves:
                self._submit(save, (save.sections,))
        finally:
            if attachment is not None:
                attachment.session.uncork()

    def _submit(self, plan: SaveJob | LoadJob, parts: tuple[Packed, ...]) -> None:
        attachment = self._attached()
        if attachment is not None and attachment.session.boot != plan.boot:
            if plan.boot:  # else it was planned without a session
                self._check_agent(attachment)
            attachment = None
        elif attachment is not None:
            self._mismatch = None
            if attachment.registered.space != plan.space:
                attachment = None
        inflight = InflightJob(plan, attachment)
        for part, sections in enumerate(parts):
            status = self._send(plan, attachment, sections)
            if isinstance(status, BlockStatus) or attachment is None:
                inflight.parts.append(lost(None, sections.blocks, BlockStatus(status)))
                continue
            inflight.parts.append(None)
            inflight.numbers.append(status)
            self._numbers[id(attachment), status] = plan.job, part
        if inflight.done:
            self._finish(inflight)
            return
        if isinstance(plan, LoadJob):
            inflight.deadline = time.monotonic() + plan.deadline_s
        self._jobs[plan.job] = inflight

    def _check_agent(self, attachment: Attachment) -> None:
        """Joins the agent that the scheduler plans for, if it does so for long: plans in flight may be of an older one.

        A session does not end with its agent where a mover of that is left behind: its end, which is the fence of its
        jobs, is listened to all the same.
        """
        now = time.monotonic()
        if self._mismatch is None or self._mismatch[0] is not attachment:
            self._mismatch = attachment, now
        elif now - self._mismatch[1] > MISMATCH_S:
            self._mismatch = None
            self._link.lost(attachment)

    def _send(self, plan: SaveJob | LoadJob, attachment: Attachment | None, sections: Packed) -> int | BlockStatus:
        """Gives the job's number in the session, or why the agent does not have it."""
        if attachment is None:
            return BlockStatus.FAILED
        session, event = attachment.session, self._clock.event(self._step)
        try:
            if isinstance(plan, SaveJob):
                revoke = plan.revoke if session.version > 1 else m.NO_INDEX
                return session.save(sections, epoch=plan.epoch, step=self._step, event=event, revoke=revoke)
            return session.load(sections, epoch=plan.epoch, step=self._step, event=event, lease=plan.lease)
        except Busy:
            return BlockStatus.BUSY
        except (SessionBroken, SessionEnded):
            return BlockStatus.FAILED
        except Malformed as error:
            log.warning("a job of %d blocks is not sent: %s", sections.blocks, error)
            return BlockStatus.FAILED

    def _attached(self) -> Attachment | None:
        current = self._link.current()
        if current is not None and current not in self._sessions:
            self._add_session(current)
        return current

    def _add_session(self, attachment: Attachment) -> None:
        if attachment not in self._sessions:
            self._sessions.append(attachment)

    def _poll(self) -> None:
        self._attached()
        for attachment in list(self._sessions):
            if not self._jobs and attachment.session.quiet():  # else something is there, nearly always
                continue
            try:
                for event in attachment.session.poll():
                    if isinstance(event, m.Done):
                        self._done(attachment, event)
            except SessionEnded:
                self._fenced(attachment)

    def _done(self, attachment: Attachment, event: m.Done) -> None:
        self._backoff.reset()
        job, part = self._numbers.pop((id(attachment), event.job), (0, 0))
        inflight = self._jobs.get(job)
        if inflight is not None:
            inflight.parts[part] = event.statuses
            if inflight.done:
                del self._jobs[job]
                self._finish(inflight)

    def _fenced(self, attachment: Attachment) -> None:
        """The agent's end of the session is gone: it touches nothing any more."""
        self._sessions.remove(attachment)
        attachment.session.close()
        self._link.lost(attachment)
        for job, inflight in list(self._jobs.items()):
            if inflight.attachment is attachment:
                del self._jobs[job]
                for number in inflight.numbers:
                    self._numbers.pop((id(attachment), number), None)
                self._fail_rest(inflight)
                self._finish(inflight)

    @staticmethod
    def _fail_rest(inflight: InflightJob) -> None:
        sections = inflight.plan.parts if isinstance(inflight.plan, LoadJob) else (inflight.plan.sections,)
        inflight.parts = [lost(part, one.blocks) for part, one in zip(inflight.parts, sections, strict=True)]

    def _finish(self, inflight: InflightJob) -> None:
        """A job has ended, and its blocks are free."""
        plan, statuses = inflight.plan, inflight.statuses
        self._report.outcomes[plan.job] = Outcome(1, statuses)
        if isinstance(plan, SaveJob):
            self._words.clear_revoke(plan.revoke)
            self.counts.saved += statuses.count(_OK)
            return
        self.counts.loaded += statuses.count(_OK)
        if not inflight.reported:
            self._report_load(plan, statuses, cancelled=inflight.cancelled)

    def _report_load(self, plan: LoadJob, statuses: bytes, *, cancelled: bool) -> None:
        self._results.received.add(plan.request)
        if cancelled or (statuses and not any(statuses)):
            return
        self.counts.loads_failed += 1
        if self._per_block and statuses:
            self._results.bad_blocks.update(_bad(plan, statuses))
        else:
            self._results.failed.add(plan.request)

    def _expire_loads(self, now: float) -> None:
        """Tells of loads whose deadline has passed. That is no fence: they go on being under way."""
        for inflight in self._jobs.values():
            plan = inflight.plan
            if not isinstance(plan, LoadJob) or inflight.reported or now < inflight.deadline:
                continue
            inflight.reported = True
            self.counts.loads_late += 1
            self._report.late.add(plan.job)
            self._results.received.add(plan.request)
            if not inflight.cancelled:
                if self._whole_failures:
                    self._results.failed.add(plan.request)
                else:  # from its first block on, which is the request's first: it is given other ones
                    self._results.bad_blocks.update(_bad(plan, b"\1" * plan.blocks))
            inflight.cancel()


def _bad(plan: LoadJob, statuses: bytes) -> set[int]:
    blocks = memoryview(plan.ids).cast("I")
    return {block for block, status in zip(blocks, statuses, strict=False) if status != 0}
