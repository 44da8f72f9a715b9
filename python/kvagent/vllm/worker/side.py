"""A worker's side: sends the jobs of a step's plan to the agent and reports their outcomes.

In a step, vLLM calls revoke_saves (before any block is overwritten), begin, start (before the
forward pass if the step computes from a load, else maybe after it was launched), wait_layer (in
each attention layer), end (the pass's kernels are launched; on a CPU they have ended), results and
report. Every promised asynchronous load is among the results exactly once: when the agent has
reported it, when its deadline has passed, when the agent does not respond, or when there is no
agent. A load that a step waits for is among them only if it failed. Only an outcome in the report
means that the job's blocks are no longer accessed.

vLLM keeps stepping while a connector expects a report or a lease. A step with requests does not
wait. Without requests, the worker waits in each step for a message of the agent, longer each time
none arrived, up to MAX_WAIT_MS, which also bounds the delay of a new request.
"""

from __future__ import annotations

import contextlib
import logging
import select
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvagent import cuda
from kvagent import messages as m
from kvagent.errors import Busy, Malformed, SessionBroken, SessionEnded
from kvagent.messages import BlockStatus
from kvagent.shm import SyncWords
from kvagent.vllm.counters import WorkerCounts
from kvagent.vllm.geometry import node
from kvagent.vllm.link import LISTEN_STEPS
from kvagent.vllm.plan import REVOKES, LoadJob, Outcome, Report, SaveJob, StepPlan, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvagent.session import Session
    from kvagent.vllm.hooks import WorkerGuest
    from kvagent.vllm.link import Link
    from kvagent.wire import Packed


STAGE_WORDS = 64  # of a worker, and so the most staged loads in flight


class HostClock:
    """The clock of a CPU, whose kernels have ended when the forward pass returns."""

    def __init__(self, words: SyncWords) -> None:
        self.words = words

    def end(self, step: int) -> None:
        """Mark a step whose kernels have ended."""
        self.words.step = step

    def event(self, step: int) -> int:  # noqa: ARG002
        """Return the event that fires when the step's kernels have ended: there is none."""
        return m.NO_INDEX

    def close(self) -> None:
        """Stop signalling."""
        self.words.close()


def make_clock(device: Any, gpu: cuda.TorchGpu | None = None) -> HostClock | cuda.CudaClock:
    """Return the clock, with its words, for KV caches on a device; None is host memory."""
    if device is None:
        return HostClock(SyncWords(REVOKES, stages=STAGE_WORDS))
    gpu = gpu or cuda.TorchGpu(device)
    words = SyncWords(REVOKES, events=cuda.EVENTS, cell=cuda.IPC_HANDLE, stages=STAGE_WORDS)
    try:
        return cuda.CudaClock(words, gpu)
    except BaseException:
        words.close()
        raise


MAX_WAIT_MS = 10


def wait_idle(descriptors: Iterable[int], steps: int) -> bool:
    """Wait for a descriptor in the last of so many idle steps. Return whether one is readable."""
    poller = select.poll()
    for fd in descriptors:
        poller.register(fd, select.POLLIN)
    return bool(poller.poll(min(steps, MAX_WAIT_MS)))


REPORT_STEPS = 8  # are reported together,
REPORT_S = 0.25  # or fewer that are this old
_MAX_US = 2**32 - 1


class DecodeSteps:
    """The decode steps that have not been reported yet.

    The agent paces copies that can wait by what they do to decode steps, so only steps are reported
    that can be compared: every request computed its next token, and the next step did so too, which
    means that the engine went on at once. The time of a step is that from its begin to the next
    step's begin: on a GPU the launches of one step say nothing of its time, those of many steps in
    a row do.
    """

    def __init__(self) -> None:
        self._requests = 0  # of the step in flight; 0: it is no decode step
        self._begin = 0.0  # of the step in flight
        self._ended: list[tuple[float, float, int]] = []  # end, time, requests

    def begin(self, requests: int, now: float) -> bytes:
        """Begin a step in which ``requests`` decode; 0: it is no decode step. Return the ended
        steps (messages.Steps) when it is time to report them, or nothing.
        """
        ended = self._ended
        if requests and self._requests:
            ended.append((now, now - self._begin, self._requests))
        self._requests, self._begin = requests, now
        if not ended or (len(ended) < REPORT_STEPS and now - ended[0][0] < REPORT_S):
            return b""
        self._ended = []
        return b"".join(struct.pack("<III", _us(now - end), max(_us(took), 1), count) for end, took, count in ended)


def _us(seconds: float) -> int:
    return min(round(seconds * 1e6), _MAX_US)


@dataclass(eq=False, slots=True)
class InflightJob:
    """A job at the agent: a load of one or more jobs of the session, or a save of one."""

    plan: SaveJob | LoadJob
    session: Session | None
    parts: list[bytes | None] = field(default_factory=list)
    """The statuses of each part's blocks; None while the part is at the agent."""
    numbers: list[int] = field(default_factory=list)
    """The session's numbers of the parts that were sent."""
    deadline: float = 0.0
    reported: bool = False
    """Whether a load was already reported to vLLM."""
    cancelled: bool = False

    def cancel(self) -> None:
        """Ask the agent to end the job. Its DONE, or the session's end, still follows."""
        self.cancelled = True
        if self.session is not None:
            with contextlib.suppress(Busy, SessionBroken, SessionEnded):
                for number in self.numbers:
                    self.session.cancel(number)


def _lost(part: Packed, status: BlockStatus = BlockStatus.FAILED) -> bytes:
    """Return the statuses of a part that the agent will not report."""
    return bytes([status]) * part.blocks


_OK = int(BlockStatus.OK)
DRAIN_S = 2.0  # timeout at the end for the agent to let go of this worker's memory

log = logging.getLogger("vllm.kvagent")


@dataclass(slots=True)
class Results:
    """The results of a step for vLLM: requests with ended and failed loads, and bad blocks."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


NO_RESULTS = Results()  # shared: never modified


class WorkerSide:
    """A worker's side. ``per_block``: failures are reported block by block."""

    def __init__(
        self, link: Link, clock: HostClock | cuda.CudaClock, *, per_block: bool, generation: str = "",
        identity: tuple[tuple[str, str], ...] = (), guests: Sequence[WorkerGuest] = (),
    ) -> None:  # fmt: skip
        """``generation``: of the first weights. ``identity``: if the scheduler is to learn it."""
        self.guests = guests
        self.counts = WorkerCounts()
        self.generation = generation
        """Of the weights, for registrations."""
        self._serial = 0  # the generation's number in the scheduler
        self._link = link
        self.words = clock.words
        self._clock = clock
        self._left = False
        self.per_block = per_block
        self._idle = 0  # steps in a row without requests, since the agent last sent something
        self._decode_steps = DecodeSteps()
        self.step = 0
        """The number of the step in progress."""
        self._open: StepPlan | None = None
        self.jobs: dict[int, InflightJob] = {}
        self.started: set[int] = set()
        """The jobs of the step in progress that were sent, or have failed."""
        self._parts: dict[tuple[int, int], tuple[InflightJob, int]] = {}  # by session and its number: job and part
        self._sessions: list[Session] = []
        self.pending_results = Results()
        self._polls = True  # whether this step polls the sessions
        self.pending_report = Report(workers=(WorkerInfo(node(), identity),))
        for guest in guests:
            guest.join(self)

    def revoke_saves(self, plan: StepPlan) -> None:
        """Set the words of revoked saves: their blocks may be overwritten from the next step on."""
        if self._open is not None:  # an error kept the last step from its end, and its saves from theirs
            self.end(self._open)
        for job in plan.revokes:
            if (inflight := self.jobs.get(job)) and isinstance(inflight.plan, SaveJob):
                self.words.revoke(inflight.plan.revoke)

    def begin(self, plan: StepPlan) -> None:
        """Begin a step, before its kernels are launched."""
        if self._open is not None or plan.revokes:
            self.revoke_saves(plan)  # usually a repetition, which costs nothing
        self.step = step = self.step + 1
        self._open = plan
        self.started.clear()
        self._polls = bool(self.jobs) or plan.idle or step % LISTEN_STEPS == 0
        self._idle = self._idle + 1 if plan.idle else 0
        steps = self._decode_steps.begin(plan.decoding, time.monotonic())
        if steps and (session := self._attached()) is not None:
            with contextlib.suppress(Busy, SessionBroken, SessionEnded):  # the agent then paces without them
                session.send(m.Steps(steps))
        if plan.generation is not None:
            self._move(*plan.generation)
        for guest in self.guests:
            guest.begin(plan)
        for job in plan.cancels:
            if inflight := self.jobs.get(job):
                inflight.cancel()
        if plan.stopped:
            for inflight in self.jobs.values():
                inflight.deadline = 0.0

    def start(self, plan: StepPlan) -> None:
        """Send the loads, each with the step in flight, which may still write to their blocks."""
        loads: Sequence[LoadJob] = plan.loads
        for guest in self.guests:
            loads = guest.start(plan, loads)
        for load in loads:
            self.submit(load, self.step)

    def wait_layer(self, name: str) -> None:
        """Handle that a layer is about to read its KV cache."""
        for guest in self.guests:
            guest.layer(name)

    def end(self, plan: StepPlan) -> None:
        """End the step and send the saves."""
        if self._open is None:
            return
        for guest in self.guests:
            guest.end()
        self._open = None
        if not self._left:  # vLLM unmaps the memory of a CUDA clock while the engine sleeps
            self._clock.end(self.step)
        session = self._attached() if plan.saves else None
        if session is not None:
            session.cork()  # one message: waking the agent costs more than sending
        try:
            for save in plan.saves:
                self.submit(save, self.step)
        finally:
            if session is not None:
                session.uncork()

    def results(self) -> Results:
        """Return what has ended since the last call. Jobs of this very step have rarely ended, and
        looking for them would cost more than the rest of the step.
        """
        for guest in self.guests:
            guest.end()
        if self._polls:
            self.poll()
            patient = self._idle and not self.pending_report.outcomes
            if patient and wait_idle(self.descriptors(), self._idle):
                self.poll()
            self._expire_loads(time.monotonic())
        if not (self.pending_results.received or self.pending_results.bad_blocks):
            return NO_RESULTS
        results, self.pending_results = self.pending_results, Results()
        return results

    def report(self) -> Report | None:
        """Return what the scheduler's side has to learn since the last call, or None."""
        report = self.pending_report
        for guest in self.guests:
            if told := guest.news():
                report.news[guest.name] = told
        jobs = report.outcomes or report.late
        if not (jobs or report.workers or report.unsupported or report.news):
            return None
        self.pending_report = Report()
        return report

    def refuse(self, reason: str) -> None:
        """Report why this worker cannot be served."""
        self.pending_report.unsupported = reason

    def busy(self) -> bool:
        """Return whether the agent has jobs of this worker."""
        return bool(self.jobs)

    def fence(self) -> Callable[[], bool]:
        """Return a function for use after ``leave``: whether every agent has let go of this
        worker's memory, as far as ``results`` has read; False for good if a registration's outcome
        is unknown.
        """
        sessions, settled = list(self._sessions), not self._link.busy
        return lambda: settled and all(session.ended for session in sessions)

    def leave(self) -> bool:
        """End all sessions and wait, bounded, for the agent to let go of the memory. Return whether
        it has. Otherwise its sessions stay open as long as this object exists, and are read, though
        nothing is sent: their ends are the fences of their jobs. Closing one would tell the agent
        that this process has stopped using its memory, and would prove nothing here.
        """
        self._left = True
        if last := self._link.close():
            self._add_session(last)
        if link_busy := self._link.busy:
            log.warning("a registration is still in progress: its outcome is unknown")
        for session in [session for session in self._sessions if session.drain(DRAIN_S)]:
            self._fenced(session)
        return not (self._sessions or link_busy)

    def rejoin(self, link: Link) -> None:
        """Continue with another link, after ``leave``."""
        self._link, self._left = link, False

    def _move(self, serial: int, generation: str) -> None:
        """Move to another generation's space. The old sessions' ends are their jobs' fences."""
        if serial == self._serial:
            return
        self._serial = serial
        if generation == self.generation:
            return
        self.generation = generation
        if last := self._link.renew():
            self._add_session(last)
        for session in self._sessions:
            session.shutdown_writing()
        for guest in self.guests:
            guest.moved()

    def fail(self, job: SaveJob | LoadJob) -> None:
        """Report a job as failed without sending it."""
        self._finish(InflightJob(job, None, [_lost(one) for one in _parts_of(job)]))
        self.started.add(job.job)

    def give_up(self, job: int) -> None:
        """Report a load in flight as failed. It stays in flight: that is no fence."""
        inflight = self.jobs[job]
        self.counts.loads_late += 1
        inflight.reported = True
        fail_late(self, inflight)
        inflight.cancel()

    def descriptors(self) -> list[int]:
        """Return what becomes readable with a message of the agent."""
        return [one.fileno() for one in self._sessions]

    def submit(self, plan: SaveJob | LoadJob, step: int) -> None:
        """Send a job that names a step."""
        session = self._attached()
        own = session is not None and (session.boot, session.registered.space) == (plan.boot, plan.space)
        session = session if own and self._serves(plan) else None
        inflight = InflightJob(plan, session)
        for part, sections in enumerate(_parts_of(plan)):
            status = self._send(plan, session, sections, step)
            if isinstance(status, BlockStatus):
                inflight.parts.append(_lost(sections, status))
                continue
            inflight.parts.append(None)
            inflight.numbers.append(status)
            self._parts[id(session), status] = inflight, part
        if None not in inflight.parts:
            self._finish(inflight)
        else:
            if isinstance(plan, LoadJob):
                inflight.deadline = time.monotonic() + plan.deadline_s
            self.jobs[plan.job] = inflight
        self.started.add(plan.job)

    def _serves(self, plan: SaveJob | LoadJob) -> bool:
        return not plan.depends or (bool(self.guests) and all(guest.serves(plan) for guest in self.guests))

    def _send(self, plan: SaveJob | LoadJob, session: Session | None, sections: Packed, step: int) -> int | BlockStatus:
        """Send a job. Return its number in the session, or the status that says why not."""
        if session is None:
            return BlockStatus.FAILED
        event = self._clock.event(step)
        try:
            if isinstance(plan, SaveJob):
                return session.save(sections, epoch=plan.epoch, step=step, event=event, revoke=plan.revoke)
            for guest in self.guests:
                number = guest.send(session, plan, sections, step=step, event=event)
                if number is not None:
                    return number
            return session.load(sections, epoch=plan.epoch, step=step, event=event, lease=plan.lease)
        except Busy:
            return BlockStatus.BUSY
        except (SessionBroken, SessionEnded):
            return BlockStatus.FAILED
        except Malformed as error:
            log.warning("a job of %d blocks is not sent: %s", sections.blocks, error)
            return BlockStatus.FAILED

    def _attached(self) -> Session | None:
        current = self._link.current()
        if current is not None:
            self._add_session(current)
        return current

    def _add_session(self, session: Session) -> None:
        if session not in self._sessions:
            self._sessions.append(session)

    def poll(self) -> None:
        """Read what the agent has sent."""
        self._attached()
        for session in list(self._sessions):
            if not self.jobs and session.quiet():  # else a message is there, nearly always
                continue
            try:
                for event in session.poll():
                    if isinstance(event, m.Done):
                        self._idle = 0
                        self._heard()
                        self._over(session, event.job, event.statuses)
            except SessionEnded:
                self._fenced(session)

    def _fenced(self, session: Session) -> None:
        """Handle the end of the agent's session: the agent has stopped accessing the memory."""
        self._sessions.remove(session)
        self._heard()
        session.close()
        self._link.lost(session)
        for number in [number for one, number in self._parts if one == id(session)]:
            self._over(session, number, None)

    def _over(self, session: Session, number: int, statuses: bytes | None) -> None:
        """Take the end of a part; None: its session has ended."""
        inflight, part = self._parts.pop((id(session), number), (None, 0))
        if inflight is None:
            return
        inflight.parts[part] = _lost(_parts_of(inflight.plan)[part]) if statuses is None else statuses
        if None not in inflight.parts:
            self._finish(inflight)
            del self.jobs[inflight.plan.job]

    def _heard(self) -> None:
        for guest in self.guests:
            guest.heard()

    def _finish(self, inflight: InflightJob) -> None:
        """Record a job's outcome; its blocks are free."""
        plan, statuses = inflight.plan, b"".join(part for part in inflight.parts if part is not None)
        if isinstance(plan, LoadJob) and not self._serves(plan):
            statuses = bytes([BlockStatus.FAILED]) * plan.blocks  # another adapter's than will compute the rest
        self.pending_report.outcomes[plan.job] = Outcome(1, statuses)
        if isinstance(plan, SaveJob):
            self.words.clear_revoke(plan.revoke)
            self.counts.saved += statuses.count(_OK)
            return
        self.counts.loaded += statuses.count(_OK)
        for guest in self.guests:
            guest.over(plan.job)
        if not inflight.reported:
            failed = not inflight.cancelled and (not statuses or any(statuses))
            self.counts.loads_failed += failed
            tell_end(self, plan, statuses, failed=failed)

    def _expire_loads(self, now: float) -> None:
        """Report overdue loads, but those that a step waits for. A deadline is no fence."""
        for job, inflight in self.jobs.items():
            plan = inflight.plan
            if isinstance(plan, LoadJob) and not (plan.sync or inflight.reported or now < inflight.deadline):
                self.give_up(job)


def _parts_of(job: SaveJob | LoadJob) -> tuple[Packed, ...]:
    """Return the parts of a job, each one of the session."""
    return job.parts if isinstance(job, LoadJob) else (job.sections,)


def tell_end(side: WorkerSide, load: LoadJob, statuses: bytes = b"", *, failed: bool) -> None:
    """Add a load's end to the results: of the blocks that failed, or of all."""
    results = side.pending_results
    if not load.sync:
        results.received.add(load.request)
    if failed and (load.sync or (side.per_block and statuses)):
        blocks = memoryview(load.ids).cast("I")
        results.bad_blocks.update(
            b for b, status in zip(blocks, statuses or b"\1" * load.blocks, strict=False) if status
        )
    elif failed:
        results.failed.add(load.request)


def fail_late(side: WorkerSide, inflight: InflightJob) -> None:
    """Report a load as failed whose outcome follows, or has been reported."""
    assert isinstance(inflight.plan, LoadJob)
    side.pending_report.late.add(inflight.plan.job)
    tell_end(side, inflight.plan, failed=not inflight.cancelled)


def abandon(side: WorkerSide, jobs: Iterable[SaveJob | LoadJob]) -> None:
    """Give up what is in flight after an error, and ``jobs`` unless they were started. Loads have
    failed, as at their deadline; the agent may still access their blocks, which stay pinned until
    their outcome. Saves are revoked.
    """
    for inflight in side.jobs.values():
        if isinstance(inflight.plan, SaveJob):
            with contextlib.suppress(Exception):
                side.words.revoke(inflight.plan.revoke)
        elif not inflight.reported:
            inflight.reported = True
            fail_late(side, inflight)
    for job in jobs:
        if job.job not in side.jobs and job.job not in side.started:
            side.pending_report.outcomes[job.job] = Outcome(1, bytes([BlockStatus.FAILED]) * job.blocks)
            if isinstance(job, LoadJob):
                tell_end(side, job, failed=True)
