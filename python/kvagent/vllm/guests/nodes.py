"""The sessions of an engine over several nodes with their agents (docs/decisions, several nodes).

The scheduler has a session with the agent of its own node; on each other node the part's first
rank, its delegate, has one, and does there what the scheduler orders in the step's plan.

The scheduler's sessions are one, the joint session, which is there while each of them is. When a
delegate's ends, or the space is reset at any agent, the scheduler ends its own too, and all leases
with it. Leases at other agents belong to questions: each delegate releases those of questions that
a plan no longer calls open.

A hit is what all agents have: the delegates are asked with the next plan, and the own agent after
their answers, for no more than the least of them.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from kvagent.errors import Busy, Malformed, TimedOut
from kvagent.lookup import MAX_OUTSTANDING, Answer, LookupStatus, Ticket, Want, encode_request
from kvagent.vllm.guests.parts import NODES, Answered, Facts, News, Orders, Question
from kvagent.vllm.hooks import WorkerGuest
from kvagent.vllm.scheduler.agent_session import NO_CHANGE, AgentSession, SessionChange
from kvagent.vllm.scheduler.loads import HITS, Lookups
from kvagent.vllm.scheduler.requests import USUAL, Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.session import Session
    from kvagent.vllm.link import Link
    from kvagent.vllm.options import Constants, Options
    from kvagent.vllm.plan import Report, StepPlan
    from kvagent.vllm.scheduler.requests import Terms


@dataclass(eq=False, slots=True, kw_only=True)
class _Asked(Pending):
    """A question that is open, until it is ``answered``, and then its lease."""

    question: Question
    answered: bool = False
    lease: int = 0


class Delegate(WorkerGuest):
    """The delegate of a part."""

    name = NODES

    def __init__(
        self, link: Link, options: Options, part: int, identity: Callable[[], tuple[tuple[str, str], ...]]
    ) -> None:  # fmt: skip
        self._agent = AgentSession(link, options)
        self._part = part
        self._identity = identity
        self._age_s = options.lookup_age_ms / 1e3
        self._tiers_s = options.tier_wait_ms / 1e3
        self._resets = 0
        self._asked: dict[int, _Asked] = {}
        self._answers: list[Answered] = []
        self._reset = False  # another engine has, and the scheduler was not told
        self._told: News | None = None

    def begin(self, plan: StepPlan) -> None:
        """Begin a step with the plan's orders."""
        change = self._agent.poll()
        if change.ended:  # and its leases with it
            self._answers += [Answered(number, None) for number, asked in self._asked.items() if not asked.answered]
            self._asked.clear()
        self._reset |= change.reset
        orders: Orders | None = plan.told.get(NODES)
        if orders is not None:
            self._follow(orders)
        if self._agent.lookups is not None:
            self._agent.lookups.begin_step(idle=plan.idle)
        awaited = self.side.busy() or self._agent.awaited()
        self._agent.silent = awaited and self._agent.stopped(time.monotonic())

    def news(self) -> tuple[News, ...]:
        """Return the news since the last call, with the answers that have arrived."""
        for asked in self._asked.values():
            if not asked.answered:
                self._ask(asked, time.monotonic())
        agent, session, facts = self._agent, self._agent.session, None
        if session is not None:
            facts = Facts(session.boot, session.limits.session, session.epoch, agent.space, agent.job_blocks)
        news = News(self._part, self._resets, facts, self._agent.silent, agent.awaits_leases())
        if news == self._told and not (self._answers or self._reset):
            return ()
        self._told = news
        news = replace(news, reset=self._reset, identity=self._identity(), answers=tuple(self._answers))
        self._answers, self._reset = [], False
        return (news,)

    def moved(self) -> None:
        """Register under another weights generation."""
        self._agent.move()
        self._agent.proceed()

    def close(self) -> None:
        """Leave the agent. The leases end with the session."""
        self._agent.close()

    def _follow(self, orders: Orders) -> None:
        if orders.resets != self._resets:
            self._resets = orders.resets
            self._agent.reset()
        for number in self._asked.keys() - {*orders.open}:
            asked = self._asked.pop(number)
            if self._agent.lookups is not None and asked.ticket is not None:
                self._agent.lookups.abandon(asked.ticket)
            if asked.lease:
                self._agent.release(asked.lease)
        self._asked |= {one.number: _Asked(question=one) for one in orders.questions}

    def _ask(self, asked: _Asked, now: float) -> None:
        """Ask a question, or read its answer."""
        question, lookups, answer = asked.question, self._agent.lookups, None
        waits = lookups is not None and not self._agent.silent and (not asked.at or now - asked.at < self._age_s)
        try:
            if lookups is not None:
                ask = partial(lookups.ask, question.tokens, question.own, question.hashes)
                answer = lookups.advance(asked, now, self._tiers_s, ask)
        except (TimedOut, Malformed):
            waits = False
        if answer is None and waits:
            return
        asked.answered = True
        if answer is None:
            if lookups is not None and asked.ticket is not None:
                lookups.abandon(asked.ticket)
            self._answers.append(Answered(question.number, None))
        else:
            asked.lease, tokens = answer.lease, answer.tokens if answer.status in HITS and answer.lease else 0
            self._answers.append(Answered(question.number, tokens, answer.lease))


@dataclass(eq=False, slots=True, kw_only=True)
class JointTicket(Ticket):
    """A question to all agents. ``answers``: by part, those of the others. ``here``: the question
    to the own agent, once they have answered, and ``lease``, the own agent's.
    """

    question: Question
    answers: dict[int, Answered] = field(default_factory=dict)
    here: Pending = field(default_factory=Pending)
    lease: int = 0


PLAN_HASHES = 1 << 17  # in one plan, which every rank gets: further questions go with the next one


class JointLookups(Lookups):
    """The look-ups of a joint session."""

    def __init__(self, session: Session, options: Constants, joint: JointSession) -> None:
        super().__init__(session, options.lookup_wait_ms / 1e3, options.lookup_age_ms / 1e3)
        self._joint = joint
        self._tiers_s = options.tier_wait_ms / 1e3
        self.open: dict[int, JointTicket] = {}  # questions that are not abandoned, with no lease released

    def outstanding(self) -> bool:
        """Return whether an agent has a question that it has not answered."""
        return super().outstanding() or any(map(self._lacks, self.open.values()))

    def ask(
        self, tokens: int, own: int, hashes: Sequence[bytes], terms: Terms = USUAL, *,
        ready: bool = False,  # noqa: ARG002
    ) -> Ticket:  # fmt: skip
        """Ask all agents, the others with the next plan. Malformed for more hashes than a look-up
        may have; Busy if too many are not answered, or the next plan has too many hashes.
        """
        encode_request(self._request(Want.RESERVE, tokens, own, hashes, terms))
        if sum(map(self._lacks, self.open.values())) >= MAX_OUTSTANDING:
            raise Busy(f"{MAX_OUTSTANDING} look-ups are in flight")
        planned = sum(len(one.hashes) for one in self._joint.untold())
        if planned and planned + len(hashes) > PLAN_HASHES:
            raise Busy(f"the next plan has {planned} hashes")
        question = Question(next(self._joint.numbers), tokens, own, tuple(hashes))
        ticket = self.open[question.number] = JointTicket(None, math.inf, leases=True, question=question)
        return ticket

    def answer(self, ticket: Ticket, *, first: bool) -> Answer | None:
        """Return the answer, or None without one; raise TimedOut if there will be none."""
        if not isinstance(ticket, JointTicket):
            return super().answer(ticket, first=first)
        if self._lacks(ticket):
            return None
        question, found = ticket.question, [one.tokens for one in ticket.answers.values() if one.tokens is not None]
        if len(found) < len(ticket.answers):
            raise TimedOut("an agent of another node did not answer")
        if (least := min(found)) > question.own:
            ask = partial(super().ask, min(question.tokens, least + 1), question.own, question.hashes)
            answer = self.advance(ticket.here, time.monotonic(), self._tiers_s, ask)
            if answer is None:
                return None
            tokens = min(answer.tokens, least)
            if answer.status in HITS and answer.lease and tokens > question.own:
                ticket.lease = answer.lease
                return replace(answer, status=LookupStatus.HIT, tokens=tokens)
            if answer.lease:
                self.release([answer.lease])
        self.abandon(ticket)
        return Answer(self._session.limits.version, LookupStatus.HIT, 0, 0, self.boot)

    def abandon(self, ticket: Ticket) -> None:
        """Abandon a look-up; leases in its answers are released."""
        if isinstance(ticket, JointTicket):
            self.open.pop(ticket.question.number, None)
            if ticket.here.ticket is not None:
                super().abandon(ticket.here.ticket)
        else:
            super().abandon(ticket)

    def of_lease(self, lease: int) -> JointTicket | None:
        """Return the question whose answer has the own agent's lease."""
        return next((one for one in self.open.values() if lease and one.lease == lease), None)

    def _lacks(self, ticket: JointTicket) -> bool:
        return len(ticket.answers) < len(self._joint.others)


class JointSession(AgentSession):
    """The joint session. The base class is the session with the scheduler's own agent."""

    def __init__(self, link: Link, options: Constants, parts: int) -> None:
        super().__init__(link, options)
        self.others = range(1, parts)  # the parts without the scheduler
        self.numbers = itertools.count(1)  # of questions
        self._news = {part: News(part, 0, None) for part in self.others}  # the last of each
        self._joint: JointLookups | None = None  # ``lookups``, from the begin of the joint session to its end
        self._resets = 0
        self._told = Orders(0)  # by the last plan, without its questions
        self._foreign_reset = False  # which poll has not returned

    @property
    def session(self) -> Session | None:
        """Return the session with the own agent while there is one with each other; else None."""
        return super().session if self._joint is not None else None

    @property
    def job_blocks(self) -> int:
        """Return the most blocks that a job may have at each agent."""
        limits = [news.session.job_blocks for news in self._news.values() if news.session is not None]
        return min([super().job_blocks, *limits])

    def targets(self, lease: int = 0) -> tuple[tuple[Facts | None, int], ...]:
        """Return the sessions and leases of a job with this lease in the other parts."""
        if self._joint is None:
            return ()
        ticket = self._joint.of_lease(lease)
        leases = {} if ticket is None else {part: one.lease for part, one in ticket.answers.items()}
        return tuple((news.session, leases.get(part, 0)) for part, news in self._news.items())

    def poll(self, *, listen: bool = True) -> SessionChange:
        """Adopt sessions and their ends, and read messages."""
        change = super().poll(listen=listen)
        others = all(news.session is not None and news.resets == self._resets for news in self._news.values())
        began = False
        if self._session is not None and self._joint is None and others:
            self.lookups = self._joint = JointLookups(self._session, self._options, self)
            began = True
        change = SessionChange(change.ended, began, change.reset or self._foreign_reset)
        self._foreign_reset = False
        return change if any(change) else NO_CHANGE

    def tell(self, plan: StepPlan) -> None:
        """Tell the delegates what they are to do, once."""
        if (orders := self._orders()) != self._told:
            plan.told[NODES] = replace(orders, questions=tuple(self.untold()))
            self._told = orders

    def untold(self) -> list[Question]:
        """Return the questions for the next plan."""
        return [one.question for number, one in self._open().items() if number not in self._told.open]

    def hear(self, report: Report) -> bool:
        """Take the news of delegates. Until poll returns it, nothing promised before is loaded."""
        every: Sequence[News] = report.news.get(NODES, ())
        for news in every:
            opened = self._open()
            for answered in news.answers:
                if ticket := opened.get(answered.number):
                    ticket.answers[news.part] = answered
            last, now = self._news[news.part].session, news.session
            self._news[news.part] = news
            self._foreign_reset |= news.reset
            ended = last is not None and (now is None or (last.boot, last.number) != (now.boot, now.number))
            if self._joint is not None and (ended or news.reset):
                self.begin_anew()
        return bool(every)

    def heard(self, now: float) -> None:
        """Conclude nothing: the jobs may have been other agents'."""

    def pinging(self) -> bool:
        """Return whether a ping is unanswered."""
        return super().pinging() or self._silent()

    def stopped(self, now: float) -> bool:
        """Return whether an agent does not answer."""
        return super().stopped(now) or self._silent()

    def awaits_leases(self) -> bool:
        """Return whether steps are needed to send orders, or to release what comes late."""
        late = any(news.late for news in self._news.values())
        return super().awaits_leases() or late or self._orders() != self._told

    def release(self, lease: int, boot: bytes = b"") -> None:
        """Release a lease at all agents. The own agent's successor gives the same numbers again."""
        super().release(lease, boot)
        if self._joint is not None and boot in (b"", self._joint.boot) and (ticket := self._joint.of_lease(lease)):
            self._joint.abandon(ticket)

    def reset(self) -> None:
        """Start a new epoch everywhere: here in the next session. Until all delegates have reported
        that, nothing is asked and nothing saved.
        """
        self._resets += 1
        self._reset_pending = True
        self.begin_anew()

    def _open(self) -> dict[int, JointTicket]:
        return {} if self._joint is None else self._joint.open

    def _orders(self) -> Orders:
        return Orders(self._resets, tuple(self._open()))

    def _silent(self) -> bool:
        return any(news.stopped for news in self._news.values())

    def _attach(self, session: Session) -> bool:
        attached = super()._attach(session)
        self.lookups = None  # until the joint session begins
        return attached

    def _close_lookups(self) -> None:
        super()._close_lookups()
        self._joint = None
