"""Look-ups and loads: how much of a prompt the agent has, how much of it will be loaded, and the
loads in flight.

A call blocks only briefly for an answer. A request waits over steps, which does not block the
engine: vLLM passes over it and asks again in its next step. Its wait has a deadline: TOKEN_S for
each token that a hit may bring, between lookup_grace_ms and lookup_age_ms.

An agent that is late is still asked, but a silent one costs an engine a bounded time in total, not
each request: the wait is halved with each look-up that was waited for in vain, so all of them
together are at most twice the longest. Any answer, even one that comes too late for its request,
restores it. An agent that is gone is not waited for at all: its session has ended, or it does not
answer a ping (agent_session).

Loads have their jobs and pinned destinations until every worker has reported them. One that was
given up at its deadline is still in flight: only its report is a fence.
"""

from __future__ import annotations

import contextlib
import logging
import math
import struct
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kvagent.errors import Busy, Malformed, SessionBroken, SessionEnded, TimedOut
from kvagent.limits import MAX_JOB_BLOCKS, MAX_SECTIONS
from kvagent.lookup import LookupClient, LookupStatus, Request, Ticket, Want
from kvagent.vllm.plan import LoadJob
from kvagent.vllm.scheduler.requests import ANSWER_S, USUAL, Phase, Promise
from kvagent.wire import Packed, packed, section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvagent.lookup import Answer
    from kvagent.session import Session
    from kvagent.vllm.counters import Counts
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.options import Options
    from kvagent.vllm.scheduler.agent_session import AgentSession
    from kvagent.vllm.scheduler.requests import Asking, Blocks, Pending, Terms, Tracked
    from kvagent.vllm.scheduler.saves import Named


log = logging.getLogger("vllm.kvagent")

STEP_WAIT_S = 0.002  # budget of blocking for answers in one schedule()
IDLE_WAIT_S = 0.005  # the same if the last step computed nothing, so that blocking delays no request
MAX_PROBES = 32  # probes in flight
AGAIN_FIRST_S, AGAIN_LAST_S = 0.001, 0.02  # from the answer that more may come to the next question
AGAIN_SHARE = 0.25  # between these, it is this share of the time waited so far
TOKEN_S = 1e-4  # of a wait, for each token that a hit may bring: to compute it takes about as long
MAX_HALVINGS = 30
HITS = (LookupStatus.HIT, LookupStatus.READY, LookupStatus.PENDING)

_LEAST_WAIT_S = 0.001  # a shorter wait is skipped: polling the socket takes that long anyway


class Lookups:
    """The look-ups of one session. ``close`` ends them; their leases end with the session."""

    def __init__(self, session: Session, wait_s: float, age_s: float) -> None:
        """``wait_s``: the longest to block for one answer. ``age_s``: how long an answer may take
        the agent.
        """
        self.boot = session.boot
        self._session = session
        self._client = LookupClient(session.registered.lookup_path, age_s)
        self._wait_s = wait_s
        self._age_s = age_s
        self._budget_s = STEP_WAIT_S
        self._idle = False
        self._probes: list[Ticket] = []

    def begin_step(self, *, idle: bool = False) -> tuple[int, int]:
        """Begin a step: renew the budget of blocking, and read answers that no request waits for.
        Return the number of those to probes, and of late ones. ``idle``: it computes nothing.
        """
        self._idle = idle
        self._budget_s = IDLE_WAIT_S if idle else STEP_WAIT_S
        left, failed = [], 0
        for ticket in self._probes:
            try:
                left += [ticket] if self._client.poll(ticket) is None else []
            except (TimedOut, Malformed):
                failed += 1
        probed, self._probes = len(self._probes) - len(left) - failed, left
        late = self._client.late_answers()
        if late and (leases := [answer.lease for answer in late if answer.lease]):
            self.release(leases)
        return probed, len(late)

    def outstanding(self) -> bool:
        """Return whether the agent has questions that it has not answered."""
        return self._client.outstanding > 0

    def awaits_leases(self) -> bool:
        """Return whether late answers may soon bring leases, which begin_step releases."""
        return self._client.late > 0

    def probe(self, tracked: Tracked, own: int, most: int) -> None:
        """Tell the agent which blocks beyond the ``own`` tokens, and up to ``most``, a request's
        look-up will ask for, without waiting.
        """
        hashes = tracked.request.block_hashes
        if hashes and len(self._probes) < MAX_PROBES:
            with contextlib.suppress(Busy, Malformed):  # a probe is only a hint
                request = self._request(Want.PROBE, most + 1, own, hashes, tracked.asking.terms)
                self._probes.append(self._client.submit(request))

    def ask(
        self, tokens: int, own: int, hashes: Sequence[bytes], terms: Terms = USUAL, *, ready: bool = False
    ) -> Ticket:
        """Send a look-up that reserves blocks, to be polled until it is answered or abandoned. Busy
        if too many are in flight, Malformed for more hashes than one may have. ``ready``: the
        answer says whether the blocks can be loaded at once.
        """
        want = Want.READY if ready else Want.RESERVE
        return self._client.submit(self._request(want, tokens, own, hashes, terms), math.inf)

    def advance(self, one: Pending, now: float, pending_s: float, ask: Callable[[], Ticket]) -> Answer | None:
        """Ask, unless that was done, and return the answer, or None without one of use. While the
        agent says that more may come, it is asked again, for ``pending_s``. Raise TimedOut for an
        answer that cannot be used, Malformed for a question that cannot be asked.
        """
        first = one.ticket is None
        if first and now < one.after:
            return None
        one.at = one.at or now
        if one.ticket is None:
            with contextlib.suppress(Busy):  # it is sent in a later step
                one.ticket = ask()
        answer = None if one.ticket is None else self.answer(one.ticket, first=first)
        if answer is None:
            return None
        one.ticket, one.at = None, 0.0
        if answer.status == LookupStatus.PENDING:
            one.pending_since = one.pending_since or now
            waited = now - one.pending_since
            if waited < pending_s:
                one.after = now + min(max(waited * AGAIN_SHARE, AGAIN_FIRST_S), AGAIN_LAST_S)
                if answer.lease:
                    self.release([answer.lease])
                return None
        return answer

    def answer(self, ticket: Ticket, *, first: bool) -> Answer | None:
        """Return the answer, or None without one; raise TimedOut for one that cannot be used. The
        first call for a look-up blocks briefly, as does any while the engine computes nothing.
        """
        begin = time.monotonic()
        wait_s = min(self._wait_s, self._budget_s) if first or self._idle else 0.0
        try:
            answer = self._client.poll(ticket, wait_s if wait_s >= _LEAST_WAIT_S else 0.0)
        except Malformed as error:
            raise TimedOut(str(error)) from error
        finally:
            self._budget_s -= time.monotonic() - begin
        if answer is not None and answer.boot != self.boot:
            raise TimedOut("another run of the agent answered")
        if answer is not None and answer.status == LookupStatus.OVERLOADED:
            raise TimedOut("the agent is overloaded")
        return answer

    def abandon(self, ticket: Ticket) -> None:
        """Abandon a look-up; a lease in its late answer is released."""
        self._client.abandon(ticket)

    def release(self, leases: Sequence[int]) -> None:
        """Release leases. If the message cannot be sent, they end with the session."""
        with contextlib.suppress(Busy, SessionEnded, SessionBroken):
            self._session.release(leases)

    def close(self) -> None:
        """Abandon all look-ups, without waiting."""
        self._client.close()  # before the tickets, whose sockets close with them
        self._probes.clear()

    def _request(self, want: Want, tokens: int, own: int, hashes: Sequence[bytes], terms: Terms) -> Request:
        session, limits = self._session, self._session.limits
        return Request(
            version=limits.version, space=session.registered.space, session=limits.session, want=want,
            tokens=tokens, hbm_tokens=own, deadline_us=int(self._age_s * 1e6), groups=terms.groups,
            hash_len=len(hashes[0]), hashes=b"".join(hashes), transfer=terms.transfer, peer=terms.peer,
            early=int(terms.early),
        )  # fmt: skip


class LookupWaits:
    """The deadlines of look-ups. All times are of time.monotonic."""

    def __init__(self, options: Options) -> None:
        self._tiers_s = options.tier_wait_ms / 1e3
        self._age_s = options.lookup_age_ms / 1e3
        self._grace_s = min(options.lookup_grace_ms / 1e3, self._age_s)
        self.in_vain = 0
        """Look-ups to which no answer came within their bound, since the last answer, whatever that
        said and however late it was.
        """

    def pending_s(self, terms: Terms) -> float:
        """Return how long a request may wait while the agent says that more may come."""
        return terms.pending_s if terms.transfer else self._tiers_s

    def longest_s(self, tokens: int, terms: Terms = USUAL) -> float:
        """Return how long an answer is waited for that may bring so many tokens."""
        worth_s = terms.wait_s if terms.transfer else tokens * TOKEN_S
        return max(self._grace_s, min(worth_s, self._age_s)) / (1 << min(self.in_vain, MAX_HALVINGS))

    def may_wait(self, asking: Asking, tokens: int, now: float) -> bool:
        """Return whether a request without an answer may go on waiting: for lookup_age_ms after the
        agent has said that more may come.
        """
        return now - asking.at < (self._age_s if asking.pending_since else self.longest_s(tokens, asking.terms))


def sources(promised: Promise | None, tokens: int, *, from_peer: bool) -> dict[str, int]:
    """Return how many of the tokens loaded for a promise came from where, by vLLM's names."""
    if promised is None:
        return {}
    if from_peer:
        return {"p2p": tokens}
    other = min(promised.other, tokens)
    disk = min(promised.disk, tokens - other)
    return {"host": tokens - disk - other, "disk": disk, "external_unspecified": other}


def _miss(now: float) -> Promise:
    return Promise(0, 0, 0, now)


@dataclass(eq=False, slots=True)
class _Load:
    """A load in flight."""

    tracked: Tracked
    blocks: list[Any]
    tokens: int
    lease: int
    boot: bytes
    cancelled: bool = False


class _Run(NamedTuple):
    """Consecutive blocks of one group, beginning with the request's block ``first``."""

    group: int
    first: int
    hashes: Sequence[bytes]
    blocks: Sequence[Any]


class Loads:
    """How many tokens of each request will be loaded, and the loads. The state of a look-up is kept
    with its request. ``planned`` and ``_cancels`` wait for the next step's plan.
    """

    def __init__(
        self, agent: AgentSession, geometry: Geometry, options: Options, blocks: Blocks, counts: Counts,
        asks_ready: Callable[[Tracked, int], bool],
    ) -> None:  # fmt: skip
        """``asks_ready``: whether to ask if a request's blocks, of at most so many tokens, are
        ready.
        """
        self.waits = LookupWaits(options)
        self.job_blocks = MAX_JOB_BLOCKS
        """The most blocks that the agent accepts in one job."""
        self.named: list[Named] = []
        """Are told which blocks of a request are to be loaded: group, first block, and number."""
        self.planned: list[LoadJob] = []
        self.taken: list[LoadJob] = []  # by the last plan
        self._cancels: list[int] = []
        self._inflight: dict[int, _Load] = {}
        self._asks_ready = asks_ready
        self._agent = agent
        self._geometry = geometry
        self._windowed = any(group.window for group in geometry.groups)
        self._least = options.min_load_tokens
        self._deadline_s = options.load_deadline_ms / 1e3
        self._blocks = blocks
        self._counts = counts

    def promise(self, tracked: Tracked, own: int, now: float) -> int | None:
        """Return the tokens beyond the ``own`` ones that will be loaded; None if not known yet. The
        last block alone is loaded only if it was computed for the request.
        """
        if not self._usable(tracked):
            if self._agent.silent:
                self._counts.lookups_unanswered += tracked.asking.ticket is not None
                self._abandon(tracked)
            return 0
        lookups, asking = self._agent.lookups, tracked.asking
        least = 1 if asking.terms.transfer else self._least
        most = self._whole(self.most(tracked, own)) - own
        last_alone = not asking.terms.transfer and tracked.request.num_tokens - own <= self._geometry.align
        if lookups is None or most < least or last_alone:
            return 0
        promised = asking.promised
        if promised is None or own < promised.own or now - promised.at > ANSWER_S:
            promised = self._ask(lookups, tracked, own, most, now)
            if promised is None:
                return None
        tokens = self._whole(min(promised.tokens, self.most(tracked, own))) - own
        return tokens if tokens >= least else 0

    def probe(self, tracked: Tracked) -> None:
        """Tell the agent which blocks a look-up of a request that has arrived will ask for. None of
        them is fetched from another agent that the engine's own cache has, which vLLM tells only
        when it schedules the request.
        """
        if self._agent.lookups is not None and self._usable(tracked):
            own, groups, scale = 0, self._geometry.groups, self._geometry.scale(0)
            if self._remote(tracked) and len(groups) == 1:
                own = self._blocks.cached(tracked.request.block_hashes[scale - 1 :: scale], 0) * groups[0].block_tokens
            self._agent.lookups.probe(tracked, own, self.most(tracked, own))

    def most(self, tracked: Tracked, own: int) -> int:
        """Return the most tokens of a request, with the ``own`` ones, that may come from the agent.
        vLLM computes the last one again if all are loaded. A state must not take it twice; for it a
        window or chunk may begin in an earlier block than for the token after it.
        """
        most: int = tracked.request.num_tokens - self._windowed
        return min(most, own + tracked.asking.most)

    def forget(self, tracked: Tracked) -> None:
        """Drop the promise or the look-up, and release its lease."""
        promised = self._take_promise(tracked)
        if promised is not None and promised.lease:
            self._agent.release(promised.lease)

    def lose(self, tracked: Tracked) -> None:
        """Drop the promise and the look-up of a session that has ended."""
        self._counts.lookups_unanswered += tracked.asking.ticket is not None
        tracked.asking.promised = None
        tracked.asking.ends()

    def _take_promise(self, tracked: Tracked) -> Promise | None:
        """Return the promise and pass its lease to the caller."""
        self._abandon(tracked)
        promised, tracked.asking.promised = tracked.asking.promised, None
        return promised

    def _abandon(self, tracked: Tracked) -> None:
        """Abandon a look-up in flight; a lease in its answer is released on arrival."""
        if tracked.asking.ticket is not None and self._agent.lookups is not None:
            self._agent.lookups.abandon(tracked.asking.ticket)
        tracked.asking.ends()

    def _ask(self, lookups: Lookups, tracked: Tracked, own: int, most: int, now: float) -> Promise | None:
        """Return what is answered; None if not known yet. ``most``: tokens that a hit may bring."""
        asking, waits = tracked.asking, self.waits
        if not tracked.request.block_hashes:
            return _miss(0.0)
        if asking.promised is not None:
            self.forget(tracked)
        self._counts.lookups += not (asking.at or asking.pending_since)
        try:
            ask = partial(self._send, lookups, tracked, own, most)
            answer = lookups.advance(asking, now, waits.pending_s(asking.terms), ask)
        except TimedOut:
            waits.in_vain = 0
            return self._unanswered(tracked, now)
        except Malformed:
            return self._answered(tracked, _miss(now))
        if not asking.at:
            waits.in_vain = 0
        elif not waits.may_wait(asking, most, now):
            waits.in_vain += 1
            return self._unanswered(tracked, now)
        return None if answer is None else self._read(tracked, answer, own, now)

    def _send(self, lookups: Lookups, tracked: Tracked, own: int, most: int) -> Ticket:
        request, asking = tracked.request, tracked.asking
        tokens = self.most(tracked, own) + 1  # the agent answers with at most one token less than asked for
        ready = self._asks_ready(tracked, most)
        if log.isEnabledFor(logging.DEBUG):
            # The last look-up of a request is the one to ask `kvagent explain --request` for.
            name = request.block_hashes[-1].hex()[-16:]
            log.debug("look-up %s of request %s: %d tokens, %d of its own", name, request.request_id, tokens, own)
        return lookups.ask(tokens, own, request.block_hashes, asking.terms, ready=ready)

    def _read(self, tracked: Tracked, answer: Answer, own: int, now: float) -> Promise:
        asking, terms = tracked.asking, tracked.asking.terms
        if answer.status == LookupStatus.PENDING:  # it has waited for as long as it may
            self._counts.lookups_pending += not terms.transfer
            self._counts.transfers_overdue += terms.pending_s > 0
            asking.terms = replace(terms, pending_s=0.0)
        tokens = answer.tokens if answer.status in HITS and answer.lease else 0
        ready = answer.status == LookupStatus.READY
        return self._answered(
            tracked, Promise(own, tokens, answer.lease, now, ready, answer.disk, answer.shared)
        )  # fmt: skip

    def _unanswered(self, tracked: Tracked, now: float) -> Promise:
        self._counts.lookups_unanswered += 1
        self._abandon(tracked)
        return self._answered(tracked, _miss(now))

    @staticmethod
    def _answered(tracked: Tracked, promised: Promise) -> Promise:
        tracked.asking.ends()
        tracked.asking.promised = promised
        return promised

    def _usable(self, tracked: Tracked) -> bool:
        """Return whether a request may be loaded now."""
        agent, asking = self._agent, tracked.asking
        answers = agent.switches.loads == 1 and (not agent.silent or bool(asking.terms.transfer))
        wanted = asking.most > 0 and not tracked.request.skip_reading_prefix_cache
        return answers and wanted and not (tracked.barred or tracked.load)

    def _remote(self, tracked: Tracked) -> bool:
        return tracked.asking.terms.peer not in ("", self._agent.peer)

    def _whole(self, tokens: int) -> int:
        """Round tokens down to whole blocks of every group."""
        return tokens // self._geometry.align * self._geometry.align

    # ---- loads

    def busy(self) -> bool:
        """Return whether loads are in flight or wait to be sent."""
        return bool(self._inflight or self._cancels or self.planned)

    def take(self) -> tuple[list[LoadJob], list[int]]:
        """Return the loads to start and those to cancel in the next step."""
        taken = self.taken, _ = self.planned, self._cancels
        self.planned, self._cancels = [], []
        return taken

    def plan(self, job: int, tracked: Tracked, tables: Sequence[Sequence[Any]], external: int) -> dict[str, int]:
        """Plan the load of promised tokens. Return where they come from. The load must be reported,
        so it is planned without a promise too.
        """
        own, promise, request = tracked.own, tracked.asking.promised, tracked.request
        runs = list(self._runs(tracked, tables, own, own + external))
        blocks = [block for run in runs for block in run.blocks]
        for named in self.named:
            for run in runs:
                named(tracked, run.group, run.first, len(run.hashes))
        session = self._agent.session
        boot = session.boot if session and self._complete(tables, own + external) else b""
        lease = promise.lease if promise else 0
        self._blocks.pin(blocks, load=True)
        self._inflight[job] = _Load(tracked, blocks, external, lease, boot)
        self._counts.loads += 1
        self._counts.tokens_promised += external
        tracked.load, tracked.loaded, tracked.phase = job, (own, own + external), Phase.LOADED
        self.planned.append(LoadJob(
            job, boot, session.epoch if session else 0, request.request_id, lease, self._deadline_s,
            tuple(self._parts(runs, request.block_hashes)),
            struct.pack(f"<{len(blocks)}I", *[block.block_id for block in blocks]), self._agent.space,
            tracked.waits, tracked.depends, self._agent.targets(lease) if boot else (),
        ))  # fmt: skip
        # The promise's lease is the load's now.
        return sources(self._take_promise(tracked), external, from_peer=self._remote(tracked))

    def withdraw(self, tracked: Tracked) -> None:
        """Forget the loads of a request that no plan has yet."""
        for load in [one for one in self.planned if self._inflight[one.job].tracked is tracked]:
            self.planned.remove(load)
            self._end(load.job)

    def cancel(self, tracked: Tracked) -> None:
        """Cancel the load of a request that has ended; the load ends with the workers' report."""
        self._inflight[tracked.load].cancelled = True
        self._cancels.append(tracked.load)

    def late(self, job: int) -> None:
        """Handle a load given up at its deadline. Several workers may report that."""
        load = self._inflight.get(job)
        if load is not None and load.tracked.load == job:
            self._counts.loads_late += 1
            load.tracked.asking.most = 0
            load.tracked.load = 0

    def report(self, job: int, statuses: bytes) -> None:
        """Handle the end of a job in all workers, if it is a load."""
        load = self._end(job)
        if load is not None and not any(statuses):
            self._counts.tokens_loaded += load.tokens
        elif load is not None and not load.cancelled:
            self._counts.loads_failed += 1
            load.tracked.asking.most = 0
            load.tracked.loaded = (0, 0)

    def _end(self, job: int) -> _Load | None:
        """Release what a load in flight holds. Return it; None if it is none."""
        load = self._inflight.pop(job, None)
        if load is not None:
            self._blocks.unpin(load.blocks, load=True)
            if load.lease and load.boot:
                self._agent.release(load.lease, load.boot)
            if load.tracked.load == job:
                load.tracked.load = 0
        return load

    def _complete(self, tables: Sequence[Sequence[Any]], end: int) -> bool:
        """Return whether the states at ``end`` have blocks to be loaded into. Without one the load
        has to fail: the rest would be taken for all.
        """
        for group in self._geometry.states:
            last, rest = divmod(end, self._geometry.groups[group].block_tokens)
            table = tables[group]
            if rest or not 0 < last <= len(table) or table[last - 1].is_null:
                return False
        return True

    def _runs(self, tracked: Tracked, tables: Sequence[Sequence[Any]], begin: int, end: int) -> Iterator[_Run]:
        """Yield the destination of the tokens from begin to end, by group, without null blocks."""
        hashes = tracked.request.block_hashes
        for group, spec in enumerate(self._geometry.groups):
            scale, table = self._geometry.scale(group), tables[group]
            at, last = begin // spec.block_tokens, min(end // spec.block_tokens, len(table))
            if group in self._geometry.states:
                at = end // spec.block_tokens - 1  # the state at the end is all that is needed
            while at < last:
                most = min(last, at + self.job_blocks)
                stop = next((i for i in range(at, most) if table[i].is_null), most)
                if at < stop:
                    yield _Run(group, at, hashes[(at + 1) * scale - 1 : stop * scale : scale], table[at:stop])
                at = max(stop, at + 1)

    def _parts(self, runs: Sequence[_Run], hashes: Sequence[bytes]) -> Iterator[Packed]:
        """Yield the runs, cut into jobs that a session accepts."""
        sections: list[bytes] = []
        blocks = 0
        for run in runs:
            if sections and (len(sections) >= MAX_SECTIONS or blocks + len(run.blocks) > self.job_blocks):
                yield packed(sections, blocks)
                sections, blocks = [], 0
            scale = self._geometry.scale(run.group)
            parent = hashes[run.first * scale - 1] if run.first else b""
            sections.append(section(run.group, parent, run.hashes, [block.block_id for block in run.blocks]))
            blocks += len(run.blocks)
        if sections:
            yield packed(sections, blocks)
