"""Look-ups: how much of a prompt the agent has, and how much of it will be loaded.

Waiting for answers is bounded per step, and a silent agent is not asked at all.
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

STEP_WAIT_S = 0.002  # budget of waiting for answers in one schedule()
BREAK_AFTER = 2  # consecutive unanswered look-ups that open the breaker
BREAK_FIRST_S = 0.2  # the breaker's first pause, doubled at each failure up to BREAK_LAST_S
BREAK_LAST_S = 2.0
MAX_PROBES = 32  # probes in flight


class Breaker:
    """A circuit breaker: requests do not wait for an agent that does not answer."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = 0.0
        self._until = 0.0

    def open(self, now: float) -> bool:
        """Return whether look-ups are suspended."""
        return now < self._until

    def failed(self, now: float) -> None:
        """Record an unanswered look-up."""
        self._failures += 1
        if self._failures >= BREAK_AFTER:
            self._pause_s = min(max(2 * self._pause_s, BREAK_FIRST_S), BREAK_LAST_S)
            self._until = now + self._pause_s

    def succeeded(self) -> None:
        """Record an answered look-up."""
        self.__init__()  # type: ignore[misc]


class Lookups:
    """The look-ups of one session. ``close`` ends them; their leases end with the session."""

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
        """Begin a step: renew the budget of waiting and read late answers."""
        self._budget_s = STEP_WAIT_S
        if self._probes:
            self._collect_probes()
        late = self._client.late_leases()
        if late:
            self._release(late)

    def awaits_leases(self) -> bool:
        """Return whether late answers may still bring leases, which begin_step releases."""
        return self._client.late > 0

    def silent(self) -> bool:
        """Return whether look-ups are suspended."""
        return self._breaker.open(time.monotonic())

    def probe(self, tokens: int, hashes: Sequence[bytes]) -> None:
        """Tell the agent which blocks a look-up will ask for, without waiting."""
        if len(self._probes) >= MAX_PROBES or self.silent():
            return
        try:
            self._probes.append(self._client.submit(self._request(Want.PROBE, tokens, 0, hashes)))
        except (Busy, Malformed):
            return  # a probe is only a hint

    def ask(self, tokens: int, own: int, hashes: Sequence[bytes]) -> Ticket | None:
        """Send a look-up that reserves blocks. Return None if that is not possible now."""
        try:
            return self._client.submit(self._request(Want.RESERVE, tokens, own, hashes))
        except Busy:
            self._breaker.failed(time.monotonic())
        except Malformed:
            return None  # more hashes than a look-up may have
        return None

    def answer(self, ticket: Ticket, *, first: bool) -> Answer | None:
        """Return the answer, or None while it may still come; raise TimedOut when it may not.

        The first call for a look-up waits briefly.
        """
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
            raise TimedOut("another run of the agent answered")
        if answer.status == LookupStatus.OVERLOADED:
            raise TimedOut("the agent is overloaded")
        return answer

    def abandon(self, ticket: Ticket) -> None:
        """Abandon a look-up; a lease in its late answer is released."""
        self._client.abandon(ticket)

    def close(self) -> None:
        """Abandon all look-ups, without waiting."""
        self._client.close()  # before the tickets, whose sockets close with them
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
            return  # the leases end with the session


_LEAST_WAIT_S = 0.001  # a shorter wait is skipped: polling the socket takes that long anyway


class Promises:
    """How many tokens of each request will be loaded.

    The state of a look-up is kept with its request.
    """

    def __init__(self, agent: AgentSession, geometry: Geometry, options: Options, counts: Counts) -> None:
        self._agent = agent
        self._hash_tokens = geometry.hash_tokens
        self._align = geometry.align
        self._options = options
        self._counts = counts

    def promise(self, tracked: Tracked, own: int, now: float) -> int | None:
        """Return the tokens beyond the ``own`` ones that will be loaded; None if not known yet."""
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
        """Return the promise and pass its lease to the caller."""
        self.abandon_lookup(tracked)
        promised, tracked.promised = tracked.promised, None
        return promised

    def forget(self, tracked: Tracked) -> None:
        """Drop the promise or the look-up, and release its lease."""
        promised = self.take(tracked)
        if promised is not None and promised.lease:
            self._agent.release(promised.lease)

    def abandon_lookup(self, tracked: Tracked) -> None:
        """Abandon a look-up in flight; a lease in its answer is released on arrival."""
        if tracked.ticket is not None and self._agent.lookups is not None:
            self._agent.lookups.abandon(tracked.ticket)
        tracked.ticket = None
        tracked.pending_since = 0.0

    def _ask(self, lookups: Lookups, tracked: Tracked, own: int, now: float) -> Promise | None:
        """Send a look-up, or read the answer to the one in flight. None: not known yet."""
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
                return None  # the next step asks again
            self._counts.lookups_pending += 1
        hit = answer.status in (LookupStatus.HIT, LookupStatus.PENDING) and answer.lease != 0
        return self._answered(tracked, Promise(own, answer.tokens if hit else 0, answer.lease, now))

    @staticmethod
    def _answered(tracked: Tracked, promised: Promise) -> Promise:
        tracked.promised = promised
        tracked.pending_since = 0.0
        return promised

    def _cut(self, tracked: Tracked, tokens: int, own: int, now: float) -> int:
        """Limit an answer to whole blocks of every group, before the last token and before any key
        that failed.
        """
        tokens = self._whole(min(tokens, tracked.request.num_tokens - 1))
        if tracked.failed:
            size, hashes = self._hash_tokens, tracked.request.block_hashes
            for i in range(own // size, tokens // size):
                if tracked.failing(hashes[i], now):
                    tokens = self._whole(i * size)
                    break
        return tokens - own if tokens - own >= self._options.min_load_tokens else 0

    def _whole(self, tokens: int) -> int:
        """Round tokens down to whole blocks of every group."""
        return tokens // self._align * self._align


_NONE = Promise(0, 0, 0, 0.0)
