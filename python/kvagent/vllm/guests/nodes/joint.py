"""The scheduler's sessions with the agents of all nodes, as one.

The joint session is there while each of them is. They end together, and all leases with them: when
one ends, the scheduler ends its own and begins another *incarnation*, in which each delegate does
the same. So a lease belongs to one incarnation, and no path has to release those of a session that
is left at the others.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from kvagent.errors import Busy
from kvagent.lookup import MAX_OUTSTANDING
from kvagent.vllm.guests.nodes.lookups import JointLookups
from kvagent.vllm.guests.nodes.orders import FIRST, NODES, NOWHERE, Orders, Question, Target
from kvagent.vllm.scheduler.agent_session import NO_CHANGE, AgentSession, SessionChange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.messages import Message
    from kvagent.session import Session
    from kvagent.vllm.guests.nodes.lookups import JointTicket
    from kvagent.vllm.guests.nodes.orders import Answered, Facts, News
    from kvagent.vllm.link import Link
    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import Report, StepPlan

OWED_S = 10.0  # beyond lookup_age_ms and tier_wait_ms: how long the answer to an abandoned question is waited for
PLAN_BYTES = 4 << 20  # of hashes in one plan, which every rank gets: further questions go with the next one


class JointSession(AgentSession):
    """The joint session. The base class is the session with the scheduler's own agent."""

    def __init__(self, link: Link, options: Options, parts: int) -> None:
        """``parts``: the nodes that the engine is on."""
        super().__init__(link, options)
        self.others = range(1, parts)
        """The parts without the scheduler."""
        self._facts: dict[int, Facts | None] = dict.fromkeys(self.others)
        self._owed_s = (options.lookup_age_ms + options.tier_wait_ms) / 1e3 + OWED_S
        self._incarnation = FIRST
        self._resets = 0
        self._behind: set[int] = set()  # parts that have not reported the last reset
        self._numbers = itertools.count(1)
        self._waiting: Orders | None = None  # for the next plan
        self._questions: dict[int, JointTicket] = {}  # those that some part has not answered
        self._leases: dict[int, dict[int, int]] = {}  # of other parts, by that of the own agent
        self._stopped: set[int] = set()
        self._late: set[int] = set()
        self._mine: JointLookups | None = None  # as long as the own session
        self._up = False
        self._ended = False  # the end was not returned by poll
        self._foreign_reset = False  # nor was another engine's reset

    @property
    def session(self) -> Session | None:
        """Return the session with the own agent while there is one with each other; else None."""
        return super().session if self._up else None

    @property
    def job_blocks(self) -> int:
        """Return the most blocks that a job may have at each agent."""
        limits = [facts.job_blocks for facts in self._facts.values() if facts is not None]
        return min([super().job_blocks, *limits])

    def targets(self, lease: int = 0) -> tuple[Target, ...]:
        """Return what a job with this lease is for in the other parts."""
        if not self._up:
            return ()
        leases = self._leases.get(lease, {})
        return tuple(
            Target(facts.boot, facts.epoch, facts.space, leases.get(part, 0)) if facts is not None else NOWHERE
            for part, facts in self._facts.items()
        )

    def poll(self, *, listen: bool = True) -> SessionChange:
        """Adopt sessions and their ends, and read messages."""
        change = super().poll(listen=listen)
        up = self._session is not None and None not in self._facts.values() and not self._behind
        if change is NO_CHANGE and up == self._up and not (self._ended or self._foreign_reset):
            return NO_CHANGE
        ended, reset = change.ended or self._ended, change.reset or self._foreign_reset
        began = up and not self._up
        self._up, self._ended, self._foreign_reset = up, False, False
        self.lookups = self._mine if up else None
        return SessionChange(ended, began, reset) if ended or began or reset else NO_CHANGE

    def tell(self, plan: StepPlan) -> None:
        """Tell the delegates what they are to do, once."""
        self.expire(time.monotonic())
        if self._waiting is not None:
            plan.told[NODES], self._waiting = self._waiting, None

    def hear(self, report: Report) -> bool:
        """Take the news of delegates. What an earlier incarnation has answered is void."""
        news: Sequence[News] = report.news.get(NODES, ())
        for one in news:
            if one.reset:  # nothing promised before is loaded; the next poll returns it
                self._foreign_reset, self._up, self.lookups = True, False, None
            if one.incarnation != self._incarnation:
                continue
            for answered in one.answers:
                self._answered(one.part, answered)
            used = self._up or self._foreign_reset or self._leases or self._questions
            if used and _ended(self._facts[one.part], one.session):
                self.begin_anew()
                continue
            self._facts[one.part] = one.session
            behind = one.resets != self._resets
            for state, parts in ((behind, self._behind), (one.stopped, self._stopped), (one.late, self._late)):
                (parts.add if state else parts.discard)(one.part)
        return bool(news)

    def reported(self, now: float) -> None:
        """Conclude nothing: the jobs may have been other agents'."""

    def awaited(self) -> bool:
        """Return whether an answer is expected from an agent."""
        return super().awaited() or bool(self._stopped)

    def pinging(self) -> bool:
        """Return whether a ping is unanswered."""
        return super().pinging() or bool(self._stopped)

    def stopped(self, now: float) -> bool:
        """Return whether an agent does not answer."""
        return super().stopped(now) or bool(self._stopped)

    def awaits_leases(self) -> bool:
        """Return whether steps are needed to send orders, or to release what comes late."""
        mine = self._mine is not None and self._mine.awaits_leases()
        return mine or bool(self._waiting or self._late or self._questions)

    def outstanding(self) -> bool:
        """Return whether a question that was not abandoned lacks an answer from another node."""
        return any(not ticket.abandoned for ticket in self._questions.values())

    def ask(self, tokens: int, own: int, hash_len: int, hashes: bytes) -> int:
        """Ask the other agents with the next plan. Return the question's number.

        Busy if too many are not answered, or the next plan has too many hashes.
        """
        if len(self._questions) >= MAX_OUTSTANDING:
            raise Busy(f"{len(self._questions)} look-ups are in flight")
        orders = self._order()
        planned = sum(len(one.hashes) for one in orders.questions)
        if planned and planned + len(hashes) > PLAN_BYTES:
            raise Busy(f"the next plan has {planned} bytes of hashes")
        number = next(self._numbers)
        orders.questions = (*orders.questions, Question(number, tokens, own, hash_len, hashes))
        return number

    def expect(self, ticket: JointTicket) -> None:
        """Collect the answers to a question in its ticket."""
        self._questions[ticket.number] = ticket

    def expire(self, now: float) -> None:
        """Begin another incarnation if a report was lost, as with a worker that failed: a lease in
        it would be kept.
        """
        if any(now > ticket.since + self._owed_s for ticket in self._questions.values()):
            self.begin_anew()

    def hold(self, lease: int, leases: dict[int, int]) -> None:
        """Take the other agents' leases that belong to one of the own agent."""
        self._leases[lease] = leases

    def release_at(self, leases: dict[int, int]) -> None:
        """Release leases of other agents, by part."""
        given = tuple((part, lease) for part, lease in leases.items() if lease)
        if given:
            orders = self._order()
            orders.releases += given

    def release(self, lease: int, boot: bytes = b"") -> None:
        """Release a lease at all agents. The own agent's successor gives the same numbers again."""
        super().release(lease, boot)
        if self._session is not None and boot in (b"", self._session.boot):
            self.release_at(self._leases.pop(lease, {}))

    def send(self, message: Message) -> bool:  # noqa: ARG002
        """Send nothing: what is sent so concerns blocks of engines on one node."""
        return False

    def reset(self) -> bool:
        """Start a new epoch everywhere. Until all delegates have reported that, nothing is asked
        and nothing saved.
        """
        self._resets += 1
        self._order().resets = self._resets
        self._behind.update(self.others)
        self._up, self.lookups = False, None
        return super().reset()

    def _order(self) -> Orders:
        if self._waiting is None:
            self._waiting = Orders(self._incarnation, self._resets)
        return self._waiting

    def _answered(self, part: int, answered: Answered) -> None:
        ticket = self._questions.get(answered.number)
        if ticket is None:
            return
        ticket.answers[part] = answered
        if ticket.abandoned:
            self.release_at({part: answered.lease})
        if len(ticket.answers) == len(self.others):
            del self._questions[answered.number]

    def _attach(self, session: Session) -> bool:
        if not super()._attach(session):
            return False
        self.lookups = None
        self._mine = JointLookups(session, self._options, self)
        return True

    def _close_lookups(self) -> None:
        """Handle the end of the own session."""
        super()._close_lookups()
        if self._mine is not None:
            self._mine.close()
            self._mine = None
            self._next()

    def _next(self) -> None:
        """Begin another incarnation."""
        self._ended, self._up = True, False
        self._incarnation += 1
        self._facts = dict.fromkeys(self.others)
        self._behind.clear()
        self._questions.clear()
        self._leases.clear()
        self._stopped.clear()
        self._late.clear()
        self._waiting = Orders(self._incarnation, self._resets)


def _ended(last: Facts | None, now: Facts | None) -> bool:
    """Return whether a delegate's session has ended since its last news."""
    return last is not None and (now is None or (last.boot, last.number) != (now.boot, now.number))
