"""What the scheduler's thread and the tier's thread tell each other, and the tier's look-ups: which
chunks the agent has, and the leases that keep them until their load.

A question is a list of keys in the order in which vLLM asked; its answer says how many of them are
stored, from the first one on. The chunks need not follow each other in a prompt.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvagent.errors import Malformed, TimedOut
from kvagent.lookup import LookupStatus
from kvagent.vllm.scheduler.requests import Pending, Terms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import zmq

    from kvagent.lookup import Ticket
    from kvagent.vllm.scheduler.agent_session import AgentSession
    from kvagent.vllm.scheduler.loads import Lookups
    from kvagent.vllm.tier.options import TierOptions

GROUP_BYTES = 4  # of a key, at its end
Key = bytes
"""vLLM's OffloadKey: a block hash and the number of its KV cache group, big-endian."""


def hash_of(key: Key) -> bytes:
    """Return the block hash of a key."""
    return key[:-GROUP_BYTES]


def group_of(key: Key) -> int:
    """Return the group of a key."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def kind_of(key: Key) -> tuple[int, int]:
    """Return what the keys of one question, or of one section of a job, have in common."""
    return group_of(key), len(key)


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks how many of the keys, of one group and length, are stored from the first one on."""

    request: str
    serial: int
    """Of the generation of the weights: an answer of an older one is void."""
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Save rows of vLLM's region."""

    job: int
    keys: tuple[Key, ...]
    rows: tuple[int, ...]
    parents: tuple[bytes, ...]
    """For each key the hash before it, or empty."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load into rows of vLLM's region."""

    job: int
    request: str
    keys: tuple[Key, ...]
    rows: tuple[int, ...]


Order = Ask | Store | Load


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to an Ask: the first ``found`` keys are stored, those up to ``known`` are not, and
    the others are to be asked for again.
    """

    ask: Ask
    found: int
    known: int
    late: bool = False
    """Whether the agent did not answer: the keys count as not stored."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a job: the agent does not touch its rows any more, or can make nothing of it."""

    job: int
    done: tuple[Key, ...]
    """The keys that were stored, or that arrived and verified."""
    seconds: float


Result = Answered | Finished


LEASE_S = 10.0  # a lease that no load has named by then is released
_STORED = (LookupStatus.HIT, LookupStatus.READY, LookupStatus.NO_SESSION, LookupStatus.LEASE_CAP)
"""With the last two, what is stored is not pinned: a load may find it gone."""


@dataclass(eq=False, slots=True)
class Question(Pending):
    """A question that is not answered."""

    ask: Ask = field(kw_only=True)


@dataclass(eq=False, slots=True)
class Lease:
    """A lease and what it pins."""

    number: int
    keys: frozenset[Key]
    until: float


class Questions:
    """The questions and leases of a session's loads. Used by one thread."""

    def __init__(
        self, session: AgentSession, options: TierOptions, tokens: int, answer: Callable[[Answered], None]
    ) -> None:
        """``tokens`` of a chunk, as registered."""
        self._session, self._tokens, self._answer = session, tokens, answer
        self._age_s, self._tiers_s = options.lookup_age_ms / 1e3, options.tier_wait_ms / 1e3
        self._open: deque[Question] = deque()
        self.leases: dict[str, list[Lease]] = {}
        """By request; they end with the session."""

    @property
    def open(self) -> bool:
        """Whether the agent has questions that it has not answered."""
        return bool(self._open)

    def sockets(self) -> Iterator[zmq.Socket[bytes]]:
        """Yield the sockets at which answers are awaited."""
        for question in self._open:
            if question.ticket is not None and question.ticket.socket is not None:
                yield question.ticket.socket

    def add(self, ask: Ask) -> None:
        """Take a question."""
        self._open.append(Question(at=time.monotonic(), ask=ask))

    def forget(self, request: str) -> None:
        """Drop the questions and leases of a request."""
        for question in [one for one in self._open if one.ask.request == request]:
            self._end(question, 0, late=True)
        self.release(one.number for one in self.leases.pop(request, ()))

    def abandon(self) -> None:
        """Answer all questions, since the agent does not: nothing counts as stored."""
        for question in list(self._open):
            self._end(question, 0, late=True)

    def take_lease(self, request: str, keys: Iterable[Key]) -> dict[Key, int]:
        """Return the lease of each key that one pins, and pass these leases to the caller."""
        wanted = set(keys)
        found: dict[Key, int] = {}
        kept = []
        for lease in self.leases.pop(request, []):
            mine = wanted & lease.keys
            if mine:
                found.update(dict.fromkeys(mine, lease.number))
            else:
                kept.append(lease)
        if kept:
            self.leases[request] = kept
        return found

    def release(self, leases: Iterable[int]) -> None:
        """Release leases."""
        numbers = [lease for lease in leases if lease]
        if numbers and (lookups := self._session.lookups) is not None:
            lookups.release(numbers)

    def turn(self, now: float) -> None:
        """Send what can be sent, read answers, and end what has waited for too long."""
        lookups = self._session.lookups
        if lookups is None:
            return
        lookups.begin_step()
        for question in list(self._open):
            try:
                self._advance(lookups, question, now)
            except (TimedOut, Malformed):
                self._end(question, 0, late=True)
        for request, leases in list(self.leases.items()):
            if over := [one for one in leases if one.until < now]:
                self.release(one.number for one in over)
                self.leases[request] = [one for one in leases if one.until >= now]

    def _advance(self, lookups: Lookups, question: Question, now: float) -> None:
        keys = question.ask.keys
        answer = lookups.advance(question, now, self._tiers_s, partial(self._ask, lookups, keys))
        if answer is None:
            if question.at and now >= question.at + self._age_s:
                raise TimedOut("no answer in time")
            return
        stored = answer.status in _STORED or (answer.status == LookupStatus.PENDING and answer.lease != 0)
        found = min(answer.tokens // self._tokens, len(keys)) if stored else 0
        if answer.lease:
            held = frozenset(keys[:found])
            self.leases.setdefault(question.ask.request, []).append(Lease(answer.lease, held, now + LEASE_S))
        self._end(question, found)

    def _ask(self, lookups: Lookups, keys: Sequence[Key]) -> Ticket:
        tokens = len(keys) * self._tokens + 1  # at most one token less is answered
        return lookups.ask(tokens, 0, [hash_of(key) for key in keys], Terms(groups=bytes([group_of(keys[0])])))

    def _end(self, question: Question, found: int, *, late: bool = False) -> None:
        if question.ticket is not None and (lookups := self._session.lookups) is not None:
            lookups.abandon(question.ticket)
        self._open.remove(question)
        count = len(question.ask.keys)
        self._answer(Answered(question.ask, found, count if late else min(found + 1, count), late))
