"""The scheduler's sessions with the agents of all nodes, as one, and the look-ups at all of them.

The joint session is there while each of them is. When a delegate's ends, the scheduler ends its own
too, and all leases with it. Those at other agents belong to questions: a plan tells which of them
are open, and each delegate releases the leases of all others.

A hit is what all agents have. The other nodes' delegates are asked with the next plan, and answer
with its report. The own agent is asked after that, for no more than the least of their answers. For
full attention, and so for all models that are served so, the first blocks of a longer hit are a
hit.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from kvagent.errors import Busy, TimedOut
from kvagent.lookup import MAX_OUTSTANDING, Answer, LookupStatus, Ticket, Want
from kvagent.ownform import encode_request
from kvagent.vllm.guests.nodes.parts import NODES, NOWHERE, Orders, Question, Target
from kvagent.vllm.scheduler.agent_session import NO_CHANGE, AgentSession, SessionChange
from kvagent.vllm.scheduler.loads import HITS, Lookups
from kvagent.vllm.scheduler.requests import USUAL, Pending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.messages import Message
    from kvagent.session import Session
    from kvagent.vllm.guests.nodes.parts import Answered, Facts, News
    from kvagent.vllm.link import Link
    from kvagent.vllm.options import Constants
    from kvagent.vllm.plan import Report, StepPlan
    from kvagent.vllm.scheduler.requests import Terms


@dataclass(eq=False, slots=True, kw_only=True)
class JointTicket(Ticket):
    """A question to all agents."""

    number: int = 0
    tokens: int
    own: int
    asked: Sequence[bytes]
    answers: dict[int, Answered] = field(default_factory=dict)
    """By part, those of the other agents."""
    here: Pending = field(default_factory=Pending)
    """The question to the own agent, once the others have answered."""


class JointLookups(Lookups):
    """The look-ups of a joint session."""

    def __init__(self, session: Session, options: Constants, joint: JointSession) -> None:
        super().__init__(session, options.lookup_wait_ms / 1e3, options.lookup_age_ms / 1e3)
        self._joint = joint
        self._tiers_s = options.tier_wait_ms / 1e3

    def outstanding(self) -> bool:
        """Return whether an agent has a question that it has not answered."""
        return super().outstanding() or self._joint.outstanding()

    def ask(
        self,
        tokens: int,
        own: int,
        hashes: Sequence[bytes],
        terms: Terms = USUAL,  # noqa: ARG002
        *,
        ready: bool = False,  # noqa: ARG002
    ) -> Ticket:
        """Ask all agents. Malformed for more hashes than a look-up may have."""
        request = self._request(Want.RESERVE, tokens, own, hashes, USUAL)
        encode_request(request)
        ticket = JointTicket(None, math.inf, leases=True, tokens=tokens, own=own, asked=hashes)
        self._joint.ask(ticket, request.hashes)
        return ticket

    def answer(self, ticket: Ticket, *, first: bool) -> Answer | None:
        """Return the answer, or None without one; raise TimedOut if there will be none."""
        if not isinstance(ticket, JointTicket):
            return super().answer(ticket, first=first)
        if len(ticket.answers) < len(self._joint.others):
            return None
        answers = ticket.answers.values()
        if any(one.lost for one in answers):
            raise TimedOut("an agent of another node did not answer")
        least = min(one.tokens for one in answers)
        if least > ticket.own:
            ask = partial(super().ask, min(ticket.tokens, least + 1), ticket.own, ticket.asked)
            answer = self.advance(ticket.here, time.monotonic(), self._tiers_s, ask)
            if answer is None:
                return None
            tokens = min(answer.tokens, least)
            if answer.status in HITS and answer.lease and tokens > ticket.own:
                self._joint.hold(answer.lease, ticket.number)
                return replace(answer, status=LookupStatus.HIT, tokens=tokens)
            if answer.lease:
                self._joint.release(answer.lease)
        self.abandon(ticket)
        return Answer(self._session.version, LookupStatus.HIT, 0, 0, self.boot)

    def abandon(self, ticket: Ticket) -> None:
        """Abandon a look-up; leases in its answers are released."""
        if isinstance(ticket, JointTicket):
            self._joint.drop(ticket.number)
            if ticket.here.ticket is not None:
                super().abandon(ticket.here.ticket)
        else:
            super().abandon(ticket)


PLAN_BYTES = 4 << 20  # of hashes in one plan, which every rank gets: further questions go with the next one


class JointSession(AgentSession):
    """The joint session. The base class is the session with the scheduler's own agent."""

    def __init__(self, link: Link, options: Constants, parts: int) -> None:
        """``parts``: the nodes that the engine is on."""
        super().__init__(link, options)
        self.others = range(1, parts)
        """The parts without the scheduler."""
        self._facts: dict[int, Facts | None] = dict.fromkeys(self.others)
        self._resets = 0
        self._behind: set[int] = set()  # parts that have not reported the last reset
        self._numbers = itertools.count(1)
        self._questions: list[Question] = []  # for the next plan
        self._open: dict[int, JointTicket] = {}  # questions that are not abandoned, with no lease released
        self._told = True  # whether the last plan told of these
        self._leases: dict[int, int] = {}  # questions, by the own agent's lease
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
        ticket = self._open.get(self._leases.get(lease, 0))
        leases = {} if ticket is None else {part: one.lease for part, one in ticket.answers.items()}
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
        if not self._told:
            plan.told[NODES] = Orders(self._resets, tuple(self._open), tuple(self._questions))
            self._questions, self._told = [], True

    def hear(self, report: Report) -> bool:
        """Take the news of delegates."""
        news: Sequence[News] = report.news.get(NODES, ())
        for one in news:
            if one.reset:  # nothing promised before is loaded; the next poll returns it
                self._foreign_reset, self._up, self.lookups = True, False, None
            for answered in one.answers:
                if ticket := self._open.get(answered.number):
                    ticket.answers[one.part] = answered
            if (self._up or self._foreign_reset or self._open) and _ended(self._facts[one.part], one.session):
                self.begin_anew()
            self._facts[one.part] = one.session
            behind = one.resets != self._resets
            for state, parts in ((behind, self._behind), (one.stopped, self._stopped), (one.late, self._late)):
                (parts.add if state else parts.discard)(one.part)
        return bool(news)

    def heard(self, now: float) -> None:
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
        return mine or not self._told or bool(self._late)

    def outstanding(self) -> bool:
        """Return whether a question lacks an answer from another node."""
        return any(map(self._lacks, self._open.values()))

    def ask(self, ticket: JointTicket, hashes: bytes) -> None:
        """Ask the other agents with the next plan, and collect their answers in the ticket.

        Busy if too many are not answered, or the next plan has too many hashes.
        """
        if sum(map(self._lacks, self._open.values())) >= MAX_OUTSTANDING:
            raise Busy(f"{MAX_OUTSTANDING} look-ups are in flight")
        planned = sum(len(one.hashes) for one in self._questions)
        if planned and planned + len(hashes) > PLAN_BYTES:
            raise Busy(f"the next plan has {planned} bytes of hashes")
        number = ticket.number = next(self._numbers)
        self._questions.append(Question(number, ticket.tokens, ticket.own, len(ticket.asked[0]), hashes))
        self._open[number], self._told = ticket, False

    def drop(self, number: int) -> None:
        """Give a question up, with all leases at other agents."""
        ticket = self._open.pop(number, None)
        if ticket is not None and (self._lacks(ticket) or any(one.lease for one in ticket.answers.values())):
            self._told = False

    def hold(self, lease: int, number: int) -> None:
        """Let the other agents' leases of a question go with one of the own agent."""
        self._leases[lease] = number

    def release(self, lease: int, boot: bytes = b"") -> None:
        """Release a lease at all agents. The own agent's successor gives the same numbers again."""
        super().release(lease, boot)
        if self._session is not None and boot in (b"", self._session.boot):
            self.drop(self._leases.pop(lease, 0))

    def send(self, message: Message) -> bool:  # noqa: ARG002
        """Send nothing: what is sent so concerns blocks of engines on one node."""
        return False

    def reset(self) -> bool:
        """Start a new epoch everywhere. Until all delegates have reported that, nothing is asked
        and nothing saved.
        """
        self._resets += 1
        self._behind.update(self.others)
        self._told, self._up, self.lookups = False, False, None
        return super().reset()

    def _lacks(self, ticket: JointTicket) -> bool:
        """Return whether a question lacks an answer from another node."""
        return len(ticket.answers) < len(self.others)

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
            self._ended, self._up, self._told = True, False, False
            self._open.clear()
            self._questions.clear()
            self._leases.clear()


def _ended(last: Facts | None, now: Facts | None) -> bool:
    return last is not None and (now is None or (last.boot, last.number) != (now.boot, now.number))
