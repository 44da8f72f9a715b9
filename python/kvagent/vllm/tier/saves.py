"""The saves of the tier: the agent reads vLLM's rows.

A save that was given up is revoked by its word: the agent reads the word after it has copied and
before it commits, so nothing that it reads from a row later on is stored, however long it was
stopped. So a row can be given back without waiting for the agent.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvagent.errors import Busy, SessionBroken, SessionEnded
from kvagent.limits import MAX_SECTIONS
from kvagent.messages import BlockStatus
from kvagent.packing import packed, section
from kvagent.vllm.tier.memory import STEP, Words
from kvagent.vllm.tier.orders import Finished, Key, Store, hash_of, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.session import Session

REVOKES = 4096  # words of a session, and so the most jobs in flight
MAX_PART = 1024  # blocks in one message
_STORED = frozenset((BlockStatus.OK, BlockStatus.EXISTS, BlockStatus.IN_PROGRESS))


class SaveMemory:
    """The words of one session, and which of them are free."""

    def __init__(self) -> None:
        self.words = Words(REVOKES)
        self.free = list(range(REVOKES))

    def revoke(self, word: int) -> None:
        """Revoke the saves that name a word."""
        self.words.sync.revoke(word)

    def give(self, word: int) -> None:
        """Free a word, whose saves the agent has reported."""
        self.words.sync.clear_revoke(word)
        self.free.append(word)

    def close(self) -> None:
        """Unmap the words; those that are set stay so for the agent."""
        self.words.close()


@dataclass(eq=False, slots=True)
class SaveJob:
    """One of vLLM's jobs."""

    number: int
    deadline: float
    began: float
    word: int = -1
    waiting: int = 0
    """Parts that were not sent."""
    flying: int = 0
    """Parts at the agent."""
    stored: list[Key] = field(default_factory=list)
    reported: bool = False


@dataclass(eq=False, slots=True)
class Part:
    """A part of a job, in one message to the agent."""

    job: SaveJob
    keys: list[Key]
    sections: list[bytes]


class Saves:
    """The saves of one session at a time. Used by one thread."""

    def __init__(self, deadline_s: float, finish: Callable[[Finished], None]) -> None:
        self._deadline_s, self._finish = deadline_s, finish
        self._jobs: dict[int, SaveJob] = {}
        self._waiting: deque[Part] = deque()
        self._flying: dict[int, Part] = {}

    @property
    def open(self) -> bool:
        """Whether jobs of vLLM's have not ended."""
        return bool(self._jobs)

    def add(self, store: Store, now: float) -> None:
        """Take a job."""
        job = SaveJob(store.job, now + self._deadline_s, now)
        self._jobs[job.number] = job
        parts = [Part(job, *one) for one in _parts(store)]
        job.waiting = len(parts)
        self._waiting.extend(parts)

    def turn(self, session: Session | None, memory: SaveMemory | None, now: float) -> None:
        """Send what can be sent, and give up what is overdue."""
        while session is not None and memory is not None and self._waiting:
            part = self._waiting[0]
            if part.job.reported:
                part.job.waiting -= 1
            elif not self._send(session, memory, part):
                break
            self._waiting.popleft()
        for job in [job for job in self._jobs.values() if now >= job.deadline or not (job.waiting or job.flying)]:
            self._report(job, memory)

    def done(self, number: int, statuses: bytes, memory: SaveMemory) -> None:
        """Take the agent's report of a part."""
        part = self._flying.pop(number, None)
        if part is None:
            return
        job = part.job
        job.flying -= 1
        job.stored += [key for key, status in zip(part.keys, statuses, strict=True) if status in _STORED]
        if not (job.waiting or job.flying) and not job.reported:
            self._report(job, memory)
        if job.reported and not job.flying and job.word >= 0:
            memory.give(job.word)
            job.word = -1

    def abandon(self, memory: SaveMemory | None) -> None:
        """Revoke and report all jobs."""
        for job in list(self._jobs.values()):
            self._report(job, memory)
        self._waiting.clear()

    def lost(self) -> None:
        """Report all jobs, since their session has ended: the agent reads no row any more."""
        self.abandon(None)
        self._flying.clear()

    def _send(self, session: Session, memory: SaveMemory, part: Part) -> bool:
        """Send a part; return False if it has to wait."""
        job = part.job
        if job.word < 0:
            if not memory.free:
                return False
            job.word = memory.free.pop()
        try:
            sections = packed(part.sections, len(part.keys))
            number = session.save(sections, epoch=session.epoch, step=STEP, revoke=job.word)
        except (Busy, SessionEnded, SessionBroken):
            return False
        job.waiting -= 1
        job.flying += 1
        self._flying[number] = part
        return True

    def _report(self, job: SaveJob, memory: SaveMemory | None) -> None:
        """Report a job: nothing that is read from its rows from now on is stored."""
        if job.word >= 0 and memory is not None:
            if job.flying:
                memory.revoke(job.word)
            else:
                memory.give(job.word)
                job.word = -1
        job.reported = True
        del self._jobs[job.number]
        self._finish(Finished(job.number, tuple(job.stored), time.monotonic() - job.began))


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
