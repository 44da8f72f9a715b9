"""Asks the agent how much of a prompt it has, within a step's budget of waiting, and not at all while it is silent.

How much of a request's prompt will be loaded: asks the agent, cuts its answer, and gives leases back.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvagent.errors import Busy, Malformed, TimedOut
from kvagent.lookup import LookupClient, LookupStatus, Request, Ticket, Want
from kvagent.vllm.scheduler.requests import ANSWER_S, Promise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.lookup import Answer
    from kvagent.vllm.counters import Counts
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.link import Attachment
    from kvagent.vllm.options import Options
    from kvagent.vllm.scheduler.agent_session import AgentSession
    from kvagent.vllm.scheduler.requests import Tracked

STEP_WAIT_S = 0.002  # of waiting for answers in one schedule()
BREAK_AFTER = 2  # questions in a row without an answer, and the agent is not asked
BREAK_FIRST_S = 0.2  # for that long, doubled at each failure
BREAK_LAST_S = 2.0
MAX_PROBES = 32  # hints under way


class Breaker:
    """Lets no request pay for an agent that does not answer."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = 0.0
        self._until = 0.0

    def open(self, now: float) -> bool:
        """Whether nothing is to be asked now."""
        return now < self._until

    def failed(self, now: float) -> None:
        """A question was not answered."""
        self._failures += 1
        if self._failures >= BREAK_AFTER:
            self._pause_s = min(max(2 * self._pause_s, BREAK_FIRST_S), BREAK_LAST_S)
            self._until = now + self._pause_s

    def succeeded(self) -> None:
        """A question was answered."""
        self.__init__()  # type: ignore[misc]


class Lookups:
    """Questions in one life of the session. ``close`` ends it. A life's leases end with its session."""

    def __init__(self, attachment: Attachment, wait_s: float, age_s: float) -> None:
        self.boot = attachment.session.boot
        self._attachment = attachment
        self._client = LookupClient(attachment.registered.lookup_path, age_s)
        self._wait_s = wait_s
        self._age_s = age_s
        self._budget_s = STEP_WAIT_S
        self._breaker = Breaker()
        self._probes: list[Ticket] = []

    def begin_step(self) -> None:
        """Begins a step: its waiting starts from nothing. Reads what came too late."""
        self._budget_s = STEP_WAIT_S
        if self._probes:
            self._collect_probes()
        late = self._client.late_leases()
        if late:
            self._release(late)

    def awaits_leases(self) -> bool:
        """Whether a lease may still come that has to be given back, which new_step does."""
        return self._client.late > 0

    def silent(self) -> bool:
        """Whether the agent is not asked for now."""
        return self._breaker.open(time.monotonic())

    def probe(self, tokens: int, hashes: Sequence[bytes]) -> None:
        """Tells the agent which blocks will be asked for. Does not wait."""
        if len(self._probes) >= MAX_PROBES or self.silent():
            return
        try:
            self._probes.append(self._client.submit(self._request(Want.PROBE, tokens, 0, hashes)))
        except (Busy, Malformed):
            return  # it is a hint

    def ask(self, tokens: int, own: int, hashes: Sequence[bytes]) -> Ticket | None:
        """Asks and reserves. None if nothing can be asked now."""
        try:
            return self._client.submit(self._request(Want.RESERVE, tokens, own, hashes))
        except Busy:
            self._breaker.failed(time.monotonic())
        except Malformed:
            return None  # more hashes than a look-up takes
        return None

    def answer(self, ticket: Ticket, *, first: bool) -> Answer | None:
        """The answer, None as long as it may come. TimedOut once it may not. The first time it waits a little."""
        begin = time.monotonic()
        wait_s = min(self._wait_s, self._budget_s) if first else 0.0
        try:
            answer = self._client.poll(ticket, wait_s if wait_s >= _LEAST_WAIT_S else 0.0)
        except (TimedOut, Malformed) as error:
            self._breaker.failed(time.monotonic())
            raise TimedOut(str(error)) from error
        finally:
            self._budget_s -= time.monotonic() - begin
        if answer is None:
            return None
        self._breaker.succeeded()
        if answer.boot != self.boot:
            raise TimedOut("another life of the agent answered")
        if answer.status == LookupStatus.OVERLOADED:
            raise TimedOut("the agent is overloaded")
        return answer

    def abandon(self, ticket: Ticket) -> None:
        """Gives a question up; a lease that comes with its answer is given back."""
        self._client.abandon(ticket)

    def close(self) -> None:
        """Ends it. Does not wait."""
        self._client.close()  # before their tickets, and with those their sockets, go
        self._probes.clear()

    def _request(self, want: Want, tokens: int, own: int, hashes: Sequence[bytes]) -> Request:
        return Request(
            version=self._attachment.session.version,
            space=self._attachment.registered.space,
            session=self._attachment.session.number,
            want=want,
            tokens=tokens,
            hbm_tokens=own,
            deadline_us=int(self._age_s * 1e6),
            hash_len=len(hashes[0]),
            hashes=b"".join(hashes),
        )

    def _collect_probes(self) -> None:
        left = []
        for ticket in self._probes:
            try:
                if self._client.poll(ticket) is None:
                    left.append(ticket)
            except (TimedOut, Malformed):
                continue
        self._probes = left

    def _release(self, leases: Sequence[int]) -> None:
        try:
            self._attachment.session.release(leases)
        except Busy:
            return  # they end with the session


_LEAST_WAIT_S = 0.001  # a shorter wait is none: the socket would wait that long nevertheless


class Promises:
    """See the module. What was asked is kept with the request."""

    def __init__(self, agent: AgentSession, geometry: Geometry, options: Options, counts: Counts) -> None:
        self._agent = agent
        self._hash_tokens = geometry.hash_tokens
        self._align = geometry.align
        self._options = options
        self._counts = counts

    def promise(self, tracked: Tracked, own: int, now: float) -> int | None:
        """Tokens beyond the ``own`` ones that will be loaded. None: not known yet."""
        lookups = self._agent.lookups
        if lookups is None or self._whole(tracked.request.num_tokens - 1) <= own:
            return 0
        promised = tracked.promised
        if promised is None or own < promised.own or now - promised.at > ANSWER_S:
            promised = self._ask(lookups, tracked, own, now)
            if promised is None:
                return None
        return self._cut(tracked, promised.tokens, own, now)

    def take(self, tracked: Tracked) -> Promise | None:
        """The answer, whose lease is the caller's from now on."""
        self.abandon_lookup(tracked)
        promised, tracked.promised = tracked.promised, None
        return promised

    def forget(self, tracked: Tracked) -> None:
        """Drops the answer, or the question, and gives its lease back."""
        promised = self.take(tracked)
        if promised is not None and promised.lease:
            self._agent.release(promised.lease)

    def abandon_lookup(self, tracked: Tracked) -> None:
        """Gives up a question under way; a lease that comes with its answer is given back then."""
        if tracked.ticket is not None and self._agent.lookups is not None:
            self._agent.lookups.abandon(tracked.ticket)
        tracked.ticket = None
        tracked.pending_since = 0.0

    def _ask(self, lookups: Lookups, tracked: Tracked, own: int, now: float) -> Promise | None:
        """Asks, or looks for the answer to what was asked. None: not known yet."""
        first = tracked.ticket is None
        if tracked.ticket is None:
            if tracked.promised is not None:
                self.forget(tracked)
            if lookups.silent() or not tracked.request.block_hashes:
                return _NONE
            self._counts.lookups += not tracked.pending_since
            tracked.ticket = lookups.ask(tracked.request.num_tokens, own, tracked.request.block_hashes)
            if tracked.ticket is None:
                return self._answered(tracked, Promise(0, 0, 0, now))
        try:
            answer = lookups.answer(tracked.ticket, first=first)
        except TimedOut:
            self._counts.lookups_unanswered += 1
            tracked.ticket = None
            return self._answered(tracked, Promise(0, 0, 0, now))
        if answer is None:
            return None
        tracked.ticket = None
        return self._read(tracked, answer, own, now)

    def _read(self, tracked: Tracked, answer: Answer, own: int, now: float) -> Promise | None:
        if answer.status == LookupStatus.PENDING:
            tracked.pending_since = tracked.pending_since or now
            if now - tracked.pending_since <= self._options.tier_wait_ms / 1e3:
                if answer.lease:
                    self._agent.release(answer.lease)
                return None  # asked again in the next step
            self._counts.lookups_pending += 1
        hit = answer.status in (LookupStatus.HIT, LookupStatus.PENDING) and answer.lease != 0
        return self._answered(tracked, Promise(own, answer.tokens if hit else 0, answer.lease, now))

    @staticmethod
    def _answered(tracked: Tracked, promised: Promise) -> Promise:
        tracked.promised = promised
        tracked.pending_since = 0.0
        return promised

    def _cut(self, tracked: Tracked, tokens: int, own: int, now: float) -> int:
        """Cuts an answer: never the last token, whole blocks of every group, nothing behind a key that failed."""
        tokens = self._whole(min(tokens, tracked.request.num_tokens - 1))
        if tracked.failed:
            size, hashes = self._hash_tokens, tracked.request.block_hashes
            for i in range(own // size, tokens // size):
                if tracked.failing(hashes[i], now):
                    tokens = self._whole(i * size)
                    break
        return tokens - own if tokens - own >= self._options.min_load_tokens else 0

    def _whole(self, tokens: int) -> int:
        """As many of them as are whole blocks in every group."""
        return tokens // self._align * self._align


_NONE = Promise(0, 0, 0, 0.0)
