"""The loads of the tier: the agent writes into staging memory, and what verified is copied on into
vLLM's rows.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from kvagent.errors import Busy, SessionBroken, SessionEnded
from kvagent.limits import MAX_JOB_BLOCKS
from kvagent.messages import BlockStatus
from kvagent.packing import packed, section
from kvagent.vllm.tier.memory import STEP
from kvagent.vllm.tier.orders import Finished, Key, Load, group_of, hash_of, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvagent.session import Session
    from kvagent.vllm.tier.memory import Rows, Staging

PART_BYTES = 8 << 20  # of one message, so that copying here begins while the agent copies the next one


@dataclass(eq=False, slots=True)
class LoadJob:
    """One of vLLM's jobs."""

    number: int
    deadline: float
    began: float
    leases: set[int] = field(default_factory=set)
    parts: int = 0
    """Those that have not ended."""
    arrived: list[Key] = field(default_factory=list)
    reported: bool = False


@dataclass(eq=False, slots=True)
class Part:
    """A part of a job, with one lease, in one message to the agent."""

    job: LoadJob
    lease: int
    keys: list[Key]
    rows: list[int]
    slots: list[int] = field(default_factory=list)


class Loads:
    """The loads of one session at a time. Used by one thread."""

    def __init__(
        self, rows: Rows, slots: int, deadline_s: float, finish: Callable[[Finished], None],
        release: Callable[[Iterable[int]], None],
    ) -> None:  # fmt: skip
        """``slots``: of the staging memory."""
        self._rows, self._deadline_s = rows, deadline_s
        self._most = max(1, min(PART_BYTES // rows.bytes, MAX_JOB_BLOCKS, slots))  # chunks of a part
        self._finish, self._release = finish, release
        self._jobs: dict[int, LoadJob] = {}
        self._waiting: deque[Part] = deque()
        self._flying: dict[int, Part] = {}  # by the session's number

    @property
    def open(self) -> bool:
        """Whether jobs of vLLM's have not ended."""
        return bool(self._jobs)

    def add(self, load: Load, leases: Mapping[Key, int], now: float) -> None:
        """Take a job; ``leases`` are this object's from now on."""
        job = LoadJob(load.job, now + self._deadline_s, now, set(leases.values()))
        self._jobs[job.number] = job
        by_lease: dict[int, list[int]] = {}
        for i in sorted(range(len(load.keys)), key=lambda i: kind_of(load.keys[i])):
            by_lease.setdefault(leases.get(load.keys[i], 0), []).append(i)
        for lease, places in by_lease.items():
            for start in range(0, len(places), self._most):
                some = places[start : start + self._most]
                self._waiting.append(Part(job, lease, [load.keys[i] for i in some], [load.rows[i] for i in some]))
                job.parts += 1
        if not job.parts:
            self._report(job)

    def turn(self, session: Session | None, staging: Staging | None, now: float) -> None:
        """Send what there is room for, and give up what is overdue."""
        while session is not None and staging is not None and self._waiting:
            part = self._waiting[0]
            if part.job.reported:
                self._waiting.popleft()
            elif not self._send(session, staging, part):
                break
        for job in [job for job in self._jobs.values() if now >= job.deadline]:
            self._report(job)

    def done(self, number: int, statuses: bytes, staging: Staging) -> None:
        """Take the agent's report of a part: it does not write to the part's slots any more."""
        part = self._flying.pop(number, None)
        if part is None:
            return
        if not part.job.reported:
            for key, row, slot, status in zip(part.keys, part.rows, part.slots, statuses, strict=True):
                if status == BlockStatus.OK:
                    staging.copy(slot, self._rows.address(row))
                    part.job.arrived.append(key)
        staging.give(part.slots)
        self._ended(part)

    def abandon(self) -> None:
        """Give all jobs up. What has arrived is reported."""
        for job in list(self._jobs.values()):
            self._report(job)
        self._waiting.clear()

    def lost(self) -> None:
        """Give all jobs up, since their session has ended. Its staging memory is gone."""
        self.abandon()
        self._flying.clear()

    def _send(self, session: Session, staging: Staging, part: Part) -> bool:
        """Send a part; return False if it has to wait."""
        count = len(part.keys)
        if staging.free < count:
            return False
        slots = staging.take(count)
        sections = _sections(part.keys, slots)
        try:
            number = session.load(packed(sections, count), epoch=session.epoch, step=STEP, lease=part.lease)
        except Busy:
            staging.give(slots)
            return False
        except (SessionEnded, SessionBroken):
            return False  # the next turn of the port ends the session, and its loads
        self._waiting.popleft()
        part.slots = slots
        self._flying[number] = part
        return True

    def _ended(self, part: Part) -> None:
        part.job.parts -= 1
        if not part.job.parts and not part.job.reported:
            self._report(part.job)

    def _report(self, job: LoadJob) -> None:
        """Report a job: nothing is written to its rows from now on."""
        job.reported = True
        del self._jobs[job.number]
        self._release(job.leases)
        self._finish(Finished(job.number, tuple(job.arrived), time.monotonic() - job.began))


def _sections(keys: list[Key], slots: list[int]) -> list[bytes]:
    """Return the sections of a part, one for each run of keys of one kind.

    The agent reports statuses in the order of the sections, which is that of the keys.
    """
    sections = []
    for _, pairs in groupby(zip(keys, slots, strict=True), lambda pair: kind_of(pair[0])):
        run, ids = zip(*pairs, strict=True)
        sections.append(section(group_of(run[0]), b"", [hash_of(key) for key in run], ids))
    return sections
