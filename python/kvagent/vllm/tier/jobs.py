"""The jobs of the tier. For a save the agent reads vLLM's rows. For a load it writes into staging
memory, and what verified is copied on into vLLM's rows.

A save that was given up is revoked by its word: the agent reads the word after it has copied and
before it commits, so nothing that it reads from a row later on is stored, however long it was
stopped. So a row can be given back without waiting for the agent.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Generic

from kvagent.errors import Busy, SessionBroken, SessionEnded
from kvagent.limits import MAX_JOB_BLOCKS, MAX_SECTIONS
from kvagent.messages import BlockStatus
from kvagent.vllm.tier.memory import STEP, Memory, SaveMemory, Staging
from kvagent.vllm.tier.orders import Finished, Key, Load, Store, hash_of, kind_of
from kvagent.wire import packed, section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvagent.session import Session
    from kvagent.vllm.tier.memory import Rows

PART_BYTES = 8 << 20  # of a load's message, so that copying here begins while the agent copies the next one
MAX_PART = 1024  # blocks in a save's message
_STORED = frozenset((BlockStatus.OK, BlockStatus.EXISTS, BlockStatus.IN_PROGRESS))


@dataclass(eq=False, slots=True)
class Job:
    """One of vLLM's jobs."""

    number: int
    began: float
    leases: set[int] = field(default_factory=set)
    """Of a load."""
    word: int = -1
    """Of a save that was sent."""
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
    keys: list[Key]
    sections: list[bytes] = field(default_factory=list)
    """Of a save."""
    lease: int = 0
    rows: list[int] = field(default_factory=list)
    """Of a load, as are its slots."""
    slots: list[int] = field(default_factory=list)


class Jobs(Generic[Memory]):
    """The jobs of one session at a time. Used by one thread."""

    def __init__(self, deadline_s: float, finish: Callable[[Finished], None]) -> None:
        self._deadline_s, self._finish = deadline_s, finish
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[Part] = deque()
        self._flying: dict[int, Part] = {}  # by the session's number

    @property
    def open(self) -> bool:
        """Whether jobs of vLLM's have not ended."""
        return bool(self._jobs)

    def turn(self, session: Session | None, memory: Memory | None, now: float) -> None:
        """Send what there is room for, and give up what is overdue."""
        while session is not None and memory is not None and self._waiting:
            part = self._waiting[0]
            if not part.job.reported:
                try:
                    number = self._send(session, memory, part)
                except (Busy, SessionEnded, SessionBroken):
                    break  # the port's next turn notices the end of the session
                if number is None:
                    break
                self._flying[number] = part
                part.job.flying += 1
            self._waiting.popleft()
        for job in [job for job in self._jobs.values() if now >= job.began + self._deadline_s]:
            self._report(job, memory)

    def done(self, number: int, statuses: bytes, memory: Memory) -> None:
        """Take the agent's report of a part: it does not touch the part's memory any more."""
        part = self._flying.pop(number, None)
        if part is None:
            return
        job = part.job
        job.flying -= 1
        job.parts -= 1
        self._end(part, statuses, memory)
        if job.reported:
            self._over(job, memory)
        elif not job.parts:
            self._report(job, memory)

    def abandon(self, memory: Memory | None = None) -> None:
        """Give all jobs up. What was done is reported."""
        for job in list(self._jobs.values()):
            self._report(job, memory)
        self._waiting.clear()

    def lost(self) -> None:
        """Give all jobs up, since their session has ended: the agent touches nothing any more."""
        self.abandon()
        self._flying.clear()

    def _begin(self, job: Job, parts: list[Part]) -> None:
        self._jobs[job.number] = job
        self._waiting.extend(parts)
        job.parts = len(parts)
        if not parts:
            self._report(job, None)

    def _report(self, job: Job, memory: Memory | None) -> None:
        """Report a job: nothing is written to its rows, or stored of them, from now on."""
        job.reported = True
        del self._jobs[job.number]
        self._over(job, memory)
        self._finish(Finished(job.number, tuple(job.done), time.monotonic() - job.began))

    def _send(self, session: Session, memory: Memory, part: Part) -> int | None:
        """Send a part and return its number; None if there is no room."""
        raise NotImplementedError

    def _end(self, part: Part, statuses: bytes, memory: Memory) -> None:
        """Take what became of a part."""
        raise NotImplementedError

    def _over(self, job: Job, memory: Memory | None) -> None:
        """Free what a reported job has, as far as no part of it is at the agent."""
        raise NotImplementedError


class Loads(Jobs[Staging]):
    """The loads."""

    def __init__(
        self, rows: Rows, slots: int, deadline_s: float, finish: Callable[[Finished], None],
        release: Callable[[Iterable[int]], None],
    ) -> None:  # fmt: skip
        """``slots``: of the staging memory."""
        super().__init__(deadline_s, finish)
        self._rows, self._release = rows, release
        self._most = max(1, min(PART_BYTES // rows.bytes, MAX_JOB_BLOCKS, slots))  # chunks of a part

    def add(self, load: Load, leases: Mapping[Key, int], now: float) -> None:
        """Take a job; ``leases`` are this object's from now on."""
        job = Job(load.job, now, set(leases.values()))
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

    def _send(self, session: Session, memory: Staging, part: Part) -> int | None:
        count = len(part.keys)
        if memory.free < count:
            return None
        part.slots = memory.take(count)
        # The agent reports statuses in the order of the sections, which is that of the keys.
        sections = []
        for (group, _), pairs in groupby(zip(part.keys, part.slots, strict=True), lambda pair: kind_of(pair[0])):
            run, ids = zip(*pairs, strict=True)
            sections.append(section(group, b"", [hash_of(key) for key in run], ids))
        try:
            return session.load(packed(sections, count), epoch=session.epoch, step=STEP, lease=part.lease)
        except Busy:
            memory.give(part.slots)
            raise

    def _end(self, part: Part, statuses: bytes, memory: Staging) -> None:
        if not part.job.reported:
            for key, row, slot, status in zip(part.keys, part.rows, part.slots, statuses, strict=True):
                if status == BlockStatus.OK:
                    memory.copy(slot, self._rows.address(row))
                    part.job.done.append(key)
        memory.give(part.slots)

    def _over(self, job: Job, memory: Staging | None) -> None:  # noqa: ARG002
        leases, job.leases = job.leases, set()
        self._release(leases)


class Saves(Jobs[SaveMemory]):
    """The saves."""

    def add(self, store: Store, now: float) -> None:
        """Take a job."""
        job = Job(store.job, now)
        self._begin(job, [Part(job, keys, sections) for keys, sections in _parts(store)])

    def _send(self, session: Session, memory: SaveMemory, part: Part) -> int | None:
        job = part.job
        if job.word < 0:
            if not memory.free:
                return None
            job.word = memory.free.pop()
        sections = packed(part.sections, len(part.keys))
        return session.save(sections, epoch=session.epoch, step=STEP, revoke=job.word)

    def _end(self, part: Part, statuses: bytes, memory: SaveMemory) -> None:  # noqa: ARG002
        part.job.done += [key for key, status in zip(part.keys, statuses, strict=True) if status in _STORED]

    def _over(self, job: Job, memory: SaveMemory | None) -> None:
        if job.word < 0 or memory is None:
            return
        if job.flying:
            memory.revoke(job.word)
            return
        memory.give(job.word)
        job.word = -1


def _parts(store: Store) -> list[tuple[list[Key], list[bytes]]]:
    """Return the parts of a job: their keys in the order of their sections, and these."""
    runs: dict[tuple[int, int], list[list[int]]] = {}
    for i, key in enumerate(store.keys):
        mine = runs.setdefault(kind_of(key), [])
        follows = bool(mine) and store.parents[i] == hash_of(store.keys[mine[-1][-1]])
        if follows and len(mine[-1]) < MAX_PART:
            mine[-1].append(i)
        else:
            mine.append([i])
    parts: list[tuple[list[Key], list[bytes]]] = []
    keys: list[Key] = []
    sections: list[bytes] = []
    for (group, _), places in runs.items():
        for run in places:
            if sections and (len(sections) == MAX_SECTIONS or len(keys) + len(run) > MAX_PART):
                parts.append((keys, sections))
                keys, sections = [], []
            hashes = [hash_of(store.keys[i]) for i in run]
            sections.append(section(group, store.parents[run[0]], hashes, [store.rows[i] for i in run]))
            keys += [store.keys[i] for i in run]
    if sections:
        parts.append((keys, sections))
    return parts
