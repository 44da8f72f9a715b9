"""The delegate of a node without the scheduler: the scheduler's session with that node's agent.

It is part of the node's first rank, whose thread makes all calls. It waits for nothing except, for
a bounded time, a reset.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from kvagent.errors import Malformed, TimedOut
from kvagent.vllm.guests.nodes.parts import NODES, Answered, Facts, News
from kvagent.vllm.hooks import WorkerGuest
from kvagent.vllm.scheduler.agent_session import AgentSession
from kvagent.vllm.scheduler.loads import HITS
from kvagent.vllm.scheduler.requests import Pending

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.lookup import Ticket
    from kvagent.vllm.guests.nodes.parts import Orders, Question
    from kvagent.vllm.link import Link
    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import StepPlan
    from kvagent.vllm.scheduler.loads import Lookups


@dataclass(eq=False, slots=True)
class _Open(Pending):
    question: Question = field(kw_only=True)


class Delegate(WorkerGuest):
    """The delegate of a part. In a step, ``begin`` follows the plan's orders, ``poll`` reads
    answers, and ``news`` returns what the scheduler has to learn.
    """

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
        self._open: dict[int, _Open] = {}
        self._leases: dict[int, int] = {}  # by question
        self._answers: list[Answered] = []
        self._reset = False  # another engine has, and the scheduler was not told
        self._stopped = False
        self._told: News | None = None

    def begin(self, plan: StepPlan) -> None:
        """Begin a step with the plan's orders."""
        orders: Orders | None = plan.told.get(NODES)
        change = self._agent.poll()
        if change.ended:
            self._lose()
        self._reset |= change.reset
        if orders is not None:
            self._follow(orders)
        lookups = self._agent.lookups
        if lookups is not None:
            lookups.begin_step(idle=plan.idle)
        awaited = self.side.busy() or self._agent.awaited()
        self._stopped = awaited and self._agent.stopped(time.monotonic())

    def poll(self) -> None:
        """Read the answers that have arrived."""
        lookups, now = self._agent.lookups, time.monotonic()
        self._open = {number: one for number, one in self._open.items() if not self._settle(lookups, one, now)}

    def news(self) -> tuple[News, ...]:
        """Return the news since the last call."""
        lookups = self._agent.lookups
        late = lookups is not None and lookups.awaits_leases()
        news = News(self._part, self._resets, self._facts(), self._stopped, late)
        if news == self._told and not (self._answers or self._reset):
            return ()
        self._told = news
        answers, self._answers = tuple(self._answers), []
        reset, self._reset = self._reset, False
        return (replace(news, reset=reset, identity=self._identity(), answers=answers),)

    def moved(self) -> None:
        """Register under another weights generation."""
        self._agent.move()
        self._agent.proceed()
        self._lose()

    def close(self) -> None:
        """Leave the agent. The leases end with the session."""
        self._agent.close()

    def _follow(self, orders: Orders) -> None:
        if orders.resets != self._resets:
            self._resets = orders.resets
            if not self._agent.reset():
                self._lose()
        for number in self._leases.keys() - {*orders.open}:
            self._agent.release(self._leases.pop(number))
        for number in self._open.keys() - {*orders.open}:
            self._abandon(self._open.pop(number))
        self._open |= {question.number: _Open(question=question) for question in orders.questions}

    def _lose(self) -> None:
        self._answers += [_lost(one) for one in self._open.values()]
        self._open.clear()
        self._leases.clear()

    def _settle(self, lookups: Lookups | None, one: _Open, now: float) -> bool:
        """Ask a question, or read its answer. Return whether it is answered."""
        question, answer = one.question, None
        try:
            if lookups is not None:
                answer = lookups.advance(one, now, self._tiers_s, partial(_ask, lookups, question))
        except (TimedOut, Malformed):
            lookups = None
        in_time = not self._stopped and (not one.at or now - one.at < self._age_s)
        if answer is None and lookups is not None and in_time:
            return False
        if answer is None:
            self._abandon(one)
            self._answers.append(_lost(one))
            return True
        if answer.lease:
            self._leases[question.number] = answer.lease
        hit = answer.status in HITS and answer.lease
        self._answers.append(Answered(question.number, answer.tokens if hit else 0, answer.lease))
        return True

    def _abandon(self, one: _Open) -> None:
        if self._agent.lookups is not None and one.ticket is not None:
            self._agent.lookups.abandon(one.ticket)

    def _facts(self) -> Facts | None:
        session = self._agent.session
        if session is None:
            return None
        return Facts(session.boot, session.number, session.epoch, self._agent.space, self._agent.job_blocks)


def _ask(lookups: Lookups, question: Question) -> Ticket:
    size, joined = question.hash_len, question.hashes
    hashes = [joined[i : i + size] for i in range(0, len(joined), size)]
    return lookups.ask(question.tokens, question.own, hashes)


def _lost(one: _Open) -> Answered:
    return Answered(one.question.number, 0, 0, lost=True)
