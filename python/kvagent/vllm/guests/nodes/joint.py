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
from kvagent.vllm.guests.nodes.parts import NODES, NOWHERE, News, Orders, Question, Target
from kvagent.vllm.scheduler.agent_session import NO_CHANGE, AgentSession, SessionChange
from kvagent.vllm.scheduler.loads import HITS, Lookups
from kvagent.vllm.scheduler.requests import USUAL, Pending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.messages import Message
    from kvagent.session import Session
    from kvagent.vllm.guests.nodes.parts import Answered
    from kvagent.vllm.link import Link
    from kvagent.vllm.options import Constants
    from kvagent.vllm.plan import Report, StepPlan
    from kvagent.vllm.scheduler.requests import Terms


@dataclass(eq=False, slots=True, kw_only=True)
class JointTicket(Ticket):
    """A question to all agents."""

    question: Question
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
        return super().outstanding() or self._joint.outstanding() > 0

    def ask(
        self, tokens: int, own: int, hashes: Sequence[bytes], terms: Terms = USUAL, *, ready: bool = False  # noqa: ARG002
    ) -> Ticket:  # fmt: skip
        """Ask all agents. Malformed for more hashes than a look-up may have."""
        request = self._request(Want.RESERVE, tokens, own, hashes, terms)
        encode_request(request)
        return self._joint.ask(tokens, own, hashes, request.hashes)

    def answer(self, ticket: Ticket, *, first: bool) -> Answer | None:
        """Return the answer, or None without one; raise TimedOut if there will be none."""
        if not isinstance(ticket, JointTicket):
            return super().answer(ticket, first=first)
        if self._joint.lacks(ticket):
            return None
        answers, question = ticket.answers.values(), ticket.question
        if any(one.lost for one in answers):
            raise TimedOut("an agent of another node did not answer")
        least = min(one.tokens for one in answers)
        if least > question.own:
            ask = partial(super().ask, min(question.tokens, least + 1), question.own, ticket.asked)
            answer = self.advance(ticket.here, time.monotonic(), self._tiers_s, ask)
            if answer is None:
                return None
            tokens = min(answer.tokens, least)
            if answer.status in HITS and answer.lease and tokens > question.own:
                self._joint.hold(answer.lease, question.number)
                return replace(answer, status=LookupStatus.HIT, tokens=tokens)
            if answer.lease:
                self._joint.release(answer.lease)
        self.abandon(ticket)
        return Answer(self._session.version, LookupStatus.HIT, 0, 0, self.boot)

    def abandon(self, ticket: Ticket) -> None:
        """Abandon a look-up; leases in its answers are released."""
        if not isinstance(ticket, JointTicket):
            super().abandon(ticket)
            return
        self._joint.drop(ticket.question.number)
        if ticket.here.ticket is not None:
            super().abandon(ticket.here.ticket)


PLAN_BYTES = 4 << 20  # of hashes in one plan, which every rank gets: further questions go with the next one


class JointSession(AgentSession):
    """The joint session. The base class is the session with the scheduler's own agent."""

    def __init__(self, link: Link, options: Constants, parts: int) -> None:
        """``parts``: the nodes that the engine is on."""
        super().__init__(link, options)
        self.others = range(1, parts)
        """The parts without the scheduler."""
        self._news = {part: News(part, 0, None) for part in self.others}  # the last of each
        self._resets = 0
        self._numbers = itertools.count(1)
        self._questions: list[Question] = []  # for the next plan
        self._open: dict[int, JointTicket] = {}  # questions that are not abandoned, with no lease released
        self._told = True  # whether the last plan told of these
        self._leases: dict[int, int] = {}  # questions, by the own agent's lease
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
        limits = [news.session.job_blocks for news in self._news.values() if news.session is not None]
        return min([super().job_blocks, *limits])

    def targets(self, lease: int = 0) -> tuple[Target, ...]:
        """Return what a job with this lease is for in the other parts."""
        if not self._up:
            return ()
        ticket = self._open.get(self._leases.get(lease, 0))
        leases = {} if ticket is None else {part: one.lease for part, one in ticket.answers.items()}
        return tuple(
            NOWHERE if (at := news.session) is None else Target(at.boot, at.epoch, at.space, leases.get(part, 0))
            for part, news in self._news.items()
        )

    def poll(self, *, listen: bool = True) -> SessionChange:
        """Adopt sessions and their ends, and read messages."""
        change = super().poll(listen=listen)
        others = all(news.session is not None and news.resets == self._resets for news in self._news.values())
        up = self._session is not None and others
        if change is NO_CHANGE and up == self._up and not (self._ended or self._foreign_reset):
            return NO_CHANGE
        change = SessionChange(change.ended or self._ended, up and not self._up, change.reset or self._foreign_reset)
        self._up, self._ended, self._foreign_reset = up, False, False
        self.lookups = self._mine if up else None
        return change if any(change) else NO_CHANGE

    def tell(self, plan: StepPlan) -> None:
        """Tell the delegates what they are to do, once."""
        if not self._told:
            plan.told[NODES] = Orders(self._resets, tuple(self._open), tuple(self._questions))
            self._questions, self._told = [], True

    def hear(self, report: Report) -> bool:
        """Take the news of delegates."""
        every: Sequence[News] = report.news.get(NODES, ())
        for news in every:
            if news.reset:  # nothing promised before is loaded; the next poll returns it
                self._foreign_reset, self._up, self.lookups = True, False, None
            for answered in news.answers:
                if ticket := self._open.get(answered.number):
                    ticket.answers[news.part] = answered
            last, now = self._news[news.part].session, news.session
            ended = last is not None and (now is None or (last.boot, last.number) != (now.boot, now.number))
            if ended and (self._up or self._foreign_reset or self._open):
                self.begin_anew()
            self._news[news.part] = news
        return bool(every)

    def heard(self, now: float) -> None:
        """Conclude nothing: the jobs may have been other agents'."""

    def awaited(self) -> bool:
        """Return whether an answer is expected from an agent."""
        return super().awaited() or self._silent()

    def pinging(self) -> bool:
        """Return whether a ping is unanswered."""
        return super().pinging() or self._silent()

    def stopped(self, now: float) -> bool:
        """Return whether an agent does not answer."""
        return super().stopped(now) or self._silent()

    def awaits_leases(self) -> bool:
        """Return whether steps are needed to send orders, or to release what comes late."""
        mine = self._mine is not None and self._mine.awaits_leases()
        return mine or not self._told or any(news.late for news in self._news.values())

    def outstanding(self) -> int:
        """Return how many questions lack an answer from another node."""
        return sum(map(self.lacks, self._open.values()))

    def lacks(self, ticket: JointTicket) -> bool:
        """Return whether a question lacks an answer from another node."""
        return len(ticket.answers) < len(self.others)

    def ask(self, tokens: int, own: int, asked: Sequence[bytes], hashes: bytes) -> JointTicket:
        """Ask the other agents with the next plan, and collect their answers in the ticket.

        Busy if too many are not answered, or the next plan has too many hashes.
        """
        if self.outstanding() >= MAX_OUTSTANDING:
            raise Busy(f"{MAX_OUTSTANDING} look-ups are in flight")
        planned = sum(len(one.hashes) for one in self._questions)
        if planned and planned + len(hashes) > PLAN_BYTES:
            raise Busy(f"the next plan has {planned} bytes of hashes")
        question = Question(next(self._numbers), tokens, own, len(asked[0]), hashes)
        ticket = JointTicket(None, math.inf, leases=True, question=question, asked=asked)
        self._questions.append(question)
        self._open[question.number], self._told = ticket, False
        return ticket

    def drop(self, number: int) -> None:
        """Give a question up, with all leases at other agents."""
        ticket = self._open.pop(number, None)
        if ticket is not None and (self.lacks(ticket) or any(one.lease for one in ticket.answers.values())):
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
        self._told, self._up, self.lookups = False, False, None
        return super().reset()

    def _silent(self) -> bool:
        """Return whether an agent of another node does not answer."""
        return any(news.stopped for news in self._news.values())

    def _attach(self, session: Session) -> bool:
        if not super()._attach(session):
            return False
        self.lookups, self._mine = None, JointLookups(session, self._options, self)
        return True

    def _close_lookups(self) -> None:
        super()._close_lookups()
        if self._mine is not None:  # the own session has ended
            self._mine.close()
            self._mine = None
            self._ended, self._up, self._told = True, False, False
            self._open.clear()
            self._questions.clear()
            self._leases.clear()
