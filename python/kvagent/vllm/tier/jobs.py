"""The jobs of the tier. For a save the agent reads vLLM's rows. For a load it writes into staging
memory, and what verified is copied on into vLLM's rows.

A save that was given up is revoked by its word: the agent reads the word after it has copied and
before it commits, so nothing that it reads from a row later on is stored, however long it was
stopped. So a row can be given back without waiting for the agent.

A frozen agent may wake at any time and write on. If it wrote into vLLM's rows, a row could not be
given back without the agent's word, and requests would wait for it. So it never sees them for
writing: it writes into slots of a staging memory. Slots of loads that were given up stay out of use
until the agent reports them, or until its session has ended; each session has a memory of its own.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from kvagent.errors import Busy, SessionBroken, SessionEnded
from kvagent.limits import MAX_JOB_BLOCKS, MAX_SECTIONS
from kvagent.messages import BlockStatus, Done, Region, RegionKind
from kvagent.shm import SharedMemory, SyncWords
from kvagent.vllm.link import Link
from kvagent.vllm.scheduler.agent_session import AgentSession
from kvagent.vllm.tier.questions import Finished, Key, Load, Questions, Store, hash_of, kind_of
from kvagent.wire import packed, section

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.registration import Registration
    from kvagent.session import Session
    from kvagent.vllm.tier.options import TierOptions
    from kvagent.vllm.tier.questions import Result

    Register = Callable[[], tuple[Registration, "SessionMemory"]]
    """Makes what a session registers, and its memory."""

REGION = 1  # region 0 holds the words
STEP = 1  # the step that every job names; the step word has it from the begin
_PR_SET_PTRACER = 0x59616D61  # from linux/prctl.h
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class SessionMemory:
    """The words of a session, whose step has been reached, and the slots of its staging memory, if
    it has some. ``close`` frees both in this process; words that are set stay so for the agent.
    """

    def __init__(self, *, revokes: int = 1, slots: int = 0, row_bytes: int = 0) -> None:
        self.words = SyncWords(revokes)
        self.words.step = STEP
        self.free = list(range(slots or revokes))
        """The slots that are free, or else the revocation words."""
        self.staging = SharedMemory(slots * row_bytes, "kvagent-staging") if slots else None
        self._row_bytes = row_bytes
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.staging.view)) if self.staging else 0

    def copy(self, slot: int, address: int) -> None:
        """Copy a slot to an address. Other threads run meanwhile."""
        ctypes.memmove(address, self._address + slot * self._row_bytes, self._row_bytes)

    def close(self) -> None:
        """Unmap the memory; the agent's mapping is unaffected."""
        self.words.close()
        if self.staging is not None:
            self.staging.close()


class Rows:
    """The rows. ``close`` drops the descriptor; nothing else refers to vLLM's memory."""

    def __init__(self, view: memoryview, fd: int | None) -> None:
        """``view`` has one row for each chunk. ``fd``: the file that it maps from its begin."""
        if view.strides is None or view.ndim != 2 or not view.c_contiguous:
            raise ValueError(f"primary_kv_view: {view.ndim} dimensions, allowed is a contiguous view of 2")
        self.count, self.bytes = view.shape[0] if view.shape else 0, view.strides[0]
        self.size = self.count * self.bytes
        flat = view.cast("B") if view.format == "B" else view.cast("B", (self.size,))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(flat)) if self.size else 0
        flat.release()
        whole = fd is not None and os.fstat(fd).st_size >= self.size
        self._fd = os.dup(fd) if whole and fd is not None else None

    def region(self) -> tuple[Region, int | None]:
        """Return the region for REGISTER with its descriptor."""
        if self._fd is None:
            # The agent's process is not known yet, so any one may access this one's memory.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
            return Region(REGION, RegionKind.PEER, self.size, addr=self._address), None
        return Region(REGION, RegionKind.FD, self.size), self._fd

    def address(self, row: int) -> int:
        """Return where a row begins. IndexError if there is no such row."""
        if not 0 <= row < self.count:
            raise IndexError(f"row {row}, allowed is 0 to {self.count - 1}")
        return self._address + row * self.bytes

    def close(self) -> None:
        """Close the descriptor. Repeated calls do nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


PART_BYTES = 8 << 20  # of a load's message, so that copying here begins while the agent copies the next one
MAX_PART = 1024  # blocks in a save's message
_STORED = frozenset((BlockStatus.OK, BlockStatus.EXISTS, BlockStatus.IN_PROGRESS))


@dataclass(eq=False, slots=True)
class Job:
    """One of vLLM's jobs."""

    number: int
    leases: set[int] = field(default_factory=set)
    """Of a load."""
    word: int = -1
    """Of a save that was sent."""
    began: float = field(default_factory=time.monotonic)
    parts: int = 0
    """Those that have not ended."""
    flying: int = 0
    """Of them, those at the agent."""
    done: list[Key] = field(default_factory=list)
    """What was stored, or has arrived."""
    reported: bool = False


@dataclass(eq=False, slots=True)
class Part:
    """A part of a job, in one message to the agent."""

    job: Job
    keys: list[Key] = field(default_factory=list)
    sections: list[bytes] = field(default_factory=list)
    """Of a save."""
    lease: int = 0
    rows: list[int] = field(default_factory=list)
    """Of a load, as are its slots."""
    slots: list[int] = field(default_factory=list)


class Jobs(AgentSession):
    """The jobs of one kind, and their session, which is renewed when it ends. Used by one thread.
    The memory is made anew for each session, so what a former agent still writes to is not used
    again.
    """

    def __init__(
        self, options: TierOptions, owner: str, register: Register, report: Callable[[Result], None]
    ) -> None:  # fmt: skip
        self.memory: SessionMemory | None = None
        """That of the session; None without one."""
        self._deadline_s = options.load_deadline_ms / 1e3
        self._register, self._report_result = register, report
        self._made: list[SessionMemory] = []  # by the link's thread, the last one for the session that it attaches
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[Part] = deque()
        self._flying: dict[int, Part] = {}  # by the session's number
        self.link = Link(options.socket_dir, owner, self._registration, pool=options.pool)
        super().__init__(self.link, options)

    @property
    def session(self) -> Session | None:
        """Return the session of an agent that answers, or None."""
        return None if self.silent else self._session

    @property
    def open(self) -> bool:
        """Whether jobs of vLLM's have not ended."""
        return bool(self._jobs)

    def awaited(self) -> bool:
        """Return whether something is expected of the agent."""
        return self.open

    def fileno(self) -> int | None:
        """Return the descriptor of the session, if there is one."""
        return None if self._session is None else self._session.fileno()

    def listen(self, now: float) -> None:
        """Read what the agent says, and give up what it does not answer."""
        change = self.poll()
        done = self.take(Done)
        if change.began or done:
            self.heard(now)
        for one in done:
            self._ended(one.job, one.statuses)
        self.silent = (self.awaited() or self.silent) and self.stopped(now)
        if self.silent:
            self.abandon()

    def turn(self, now: float) -> None:
        """Send what there is room for, and give up what is overdue."""
        while (session := self.session) is not None and self.memory is not None and self._waiting:
            part = self._waiting[0]
            if not part.job.reported:
                try:
                    number = self._send(session, self.memory, part)
                except (Busy, SessionEnded, SessionBroken):
                    break  # the next turn notices the end of the session
                if number is None:
                    break
                self._flying[number] = part
                part.job.flying += 1
            self._waiting.popleft()
        for job in [job for job in self._jobs.values() if now >= job.began + self._deadline_s]:
            self._report(job)

    def abandon(self) -> None:
        """Give all jobs up. What was done is reported."""
        for job in list(self._jobs.values()):
            self._report(job)
        self._waiting.clear()

    def close(self) -> None:
        """Leave the agent."""
        super().close()
        while self._made:
            self._made.pop().close()

    def _begin(self, job: Job, parts: list[Part]) -> None:
        self._jobs[job.number] = job
        self._waiting.extend(parts)
        job.parts = len(parts)
        if not parts:
            self._report(job)

    def _ended(self, number: int, statuses: bytes) -> None:
        """Take the agent's report of a part: it does not touch the part's memory any more."""
        part = self._flying.pop(number, None)
        if part is None or self.memory is None:
            return
        job = part.job
        job.flying -= 1
        job.parts -= 1
        self._take(part, statuses, self.memory)
        if job.reported:
            self._over(job)
        elif not job.parts:
            self._report(job)

    def _report(self, job: Job) -> None:
        """Report a job: nothing is written to its rows, or stored of them, from now on."""
        job.reported = True
        del self._jobs[job.number]
        self._over(job)
        self._report_result(Finished(job.number, tuple(job.done), time.monotonic() - job.began))

    def _registration(self) -> Registration:
        """Make what an attempt registers. The link's thread calls it, while there is no session."""
        registration, memory = self._register()
        while self._made:
            self._made.pop().close()
        self._made.append(memory)
        return registration

    def _attach(self, session: Session) -> bool:
        self.memory = self._made.pop()
        return super()._attach(session)

    def _close_lookups(self) -> None:
        """Handle the end of the session: the agent has nothing more to say of its jobs."""
        self.abandon()
        self._flying.clear()
        super()._close_lookups()
        memory, self.memory, self.silent = self.memory, None, False
        if memory is not None:
            memory.close()

    def _send(self, session: Session, memory: SessionMemory, part: Part) -> int | None:
        """Send a part and return its number; None if there is no room."""
        raise NotImplementedError

    def _take(self, part: Part, statuses: bytes, memory: SessionMemory) -> None:
        """Take what became of a part."""
        raise NotImplementedError

    def _over(self, job: Job) -> None:
        """Free what a reported job has, as far as no part of it is at the agent."""
        raise NotImplementedError


class Loads(Jobs):
    """The loads, and the questions for them."""

    def __init__(
        self, options: TierOptions, rows: Rows, slots: int, tokens: int, register: Register,
        report: Callable[[Result], None],
    ) -> None:  # fmt: skip
        """``slots``: of the staging memory. ``tokens`` of a chunk, as registered."""
        self._rows = rows
        self._most = max(1, min(PART_BYTES // rows.bytes, MAX_JOB_BLOCKS, slots))  # chunks of a part
        self.questions = Questions(self, options, tokens, report)
        super().__init__(options, "tier, loads", register, report)

    def awaited(self) -> bool:
        """Return whether something is expected of the agent."""
        return self.open or self.questions.open

    def add(self, load: Load) -> None:
        """Take a job, with the leases of its request's questions."""
        leases = self.questions.take_lease(load.request, load.keys)
        job = Job(load.job, set(leases.values()))
        by_lease: dict[int, list[int]] = {}
        for i in sorted(range(len(load.keys)), key=lambda i: kind_of(load.keys[i])):
            by_lease.setdefault(leases.get(load.keys[i], 0), []).append(i)
        parts = []
        for lease, places in by_lease.items():
            for start in range(0, len(places), self._most):
                some = places[start : start + self._most]
                keys, rows = [load.keys[i] for i in some], [load.rows[i] for i in some]
                parts.append(Part(job, keys, lease=lease, rows=rows))
        self._begin(job, parts)

    def turn(self, now: float) -> None:
        """Ask, send what there is room for, and give up what is overdue."""
        super().turn(now)
        self.questions.turn(now)

    def abandon(self) -> None:
        """Give up all jobs and questions."""
        super().abandon()
        self.questions.abandon()

    def _close_lookups(self) -> None:
        super()._close_lookups()
        self.questions.leases.clear()

    def _send(self, session: Session, memory: SessionMemory, part: Part) -> int | None:
        count = len(part.keys)
        if len(memory.free) < count:
            return None
        part.slots = memory.free[-count:]
        # The agent reports statuses in the order of the sections, which is that of the keys.
        sections = []
        for (group, _), pairs in groupby(zip(part.keys, part.slots, strict=True), lambda pair: kind_of(pair[0])):
            run, ids = zip(*pairs, strict=True)
            sections.append(section(group, b"", [hash_of(key) for key in run], ids))
        number = session.load(packed(sections, count), epoch=session.epoch, step=STEP, lease=part.lease)
        del memory.free[-count:]
        return number

    def _take(self, part: Part, statuses: bytes, memory: SessionMemory) -> None:
        if not part.job.reported:
            for key, row, slot, status in zip(part.keys, part.rows, part.slots, statuses, strict=True):
                if status == BlockStatus.OK:
                    memory.copy(slot, self._rows.address(row))
                    part.job.done.append(key)
        memory.free += part.slots

    def _over(self, job: Job) -> None:
        self.questions.release(job.leases)
        job.leases = set()


class Saves(Jobs):
    """The saves."""

    def add(self, store: Store) -> None:
        """Take a job. Chunks that follow each other are one section."""
        job, keys = Job(store.job), store.keys
        runs: list[list[int]] = []
        for i in sorted(range(len(keys)), key=lambda i: kind_of(keys[i])):
            before = keys[runs[-1][-1]] if runs else b""
            follows = kind_of(before) == kind_of(keys[i]) and store.parents[i] == hash_of(before)
            if follows and len(runs[-1]) < MAX_PART:
                runs[-1].append(i)
            else:
                runs.append([i])
        parts: list[Part] = []
        for run in runs:
            if not parts or len(parts[-1].sections) == MAX_SECTIONS or len(parts[-1].keys) + len(run) > MAX_PART:
                parts.append(Part(job))
            some = [keys[i] for i in run]
            parts[-1].keys += some
            group, hashes = kind_of(some[0])[0], [hash_of(key) for key in some]
            parts[-1].sections.append(section(group, store.parents[run[0]], hashes, [store.rows[i] for i in run]))
        self._begin(job, parts)

    def _send(self, session: Session, memory: SessionMemory, part: Part) -> int | None:
        job = part.job
        if job.word < 0:
            if not memory.free:
                return None
            job.word = memory.free.pop()
        sections = packed(part.sections, len(part.keys))
        return session.save(sections, epoch=session.epoch, step=STEP, revoke=job.word)

    def _take(self, part: Part, statuses: bytes, memory: SessionMemory) -> None:  # noqa: ARG002
        part.job.done += [key for key, status in zip(part.keys, statuses, strict=True) if status in _STORED]

    def _over(self, job: Job) -> None:
        memory = self.memory
        if job.word < 0 or memory is None:
            return
        if job.flying:
            memory.words.revoke(job.word)
            return
        memory.words.clear_revoke(job.word)
        memory.free.append(job.word)
        job.word = -1
