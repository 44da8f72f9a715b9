"""An engine over several nodes: where its ranks are, and its sessions with the nodes' agents.

To its agent, the ranks of one node are an engine of their own: a *part*. The scheduler has a
session with the agent of its own node; on each other node the part's first rank, its delegate, has
one, and does there what the scheduler orders in the step's plan (docs/decisions, several nodes).

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
from typing import TYPE_CHECKING, Any, TypeVar

from kvagent.errors import Busy, Malformed, TimedOut
from kvagent.lookup import MAX_OUTSTANDING, Answer, LookupStatus, Ticket, Want, encode_request
from kvagent.registration import identity_pairs
from kvagent.vllm.geometry import WITHOUT_DRAFTS, Part, Ranks, Unsupported, shard
from kvagent.vllm.hooks import WorkerGuest
from kvagent.vllm.options import LAZY
from kvagent.vllm.plan import LoadJob, SaveJob
from kvagent.vllm.scheduler.agent_session import NO_CHANGE, AgentSession, SessionChange
from kvagent.vllm.scheduler.loads import HITS, Lookups
from kvagent.vllm.scheduler.requests import USUAL, Pending
from kvagent.vllm.weight_changes import PAIR as GENERATION
from kvagent.vllm.weight_changes import UNSHARED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.messages import Message
    from kvagent.session import Session
    from kvagent.vllm.geometry import Geometry, Identity
    from kvagent.vllm.link import Link
    from kvagent.vllm.options import Constants, Options
    from kvagent.vllm.plan import Report, StepPlan
    from kvagent.vllm.scheduler.requests import Terms


_Job = TypeVar("_Job", SaveJob, LoadJob)
NODES = "nodes"
"""The name under which the scheduler and the delegates tell each other."""


@dataclass(frozen=True, slots=True)
class Question:
    """A look-up that reserves blocks, answered once while it is open."""

    number: int
    tokens: int
    own: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Orders:
    """What the delegates are to do: the resets ordered so far; to give up the questions that are
    not ``open``, with their leases; to answer new ``questions``.
    """

    resets: int
    open: tuple[int, ...] = ()
    questions: tuple[Question, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a question: the first ``tokens`` are stored, pinned by ``lease`` unless it is
    0. None: there was no answer in time, or no agent.
    """

    number: int
    tokens: int | None
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """A delegate's session. ``job_blocks``: the most that its agent accepts in one job."""

    boot: bytes
    number: int
    epoch: int
    space: bytes
    job_blocks: int


@dataclass(frozen=True, slots=True)
class News:
    """The state of a delegate where it has changed, and its answers."""

    part: int
    resets: int
    """The resets that it has done, or will do before it has a session."""
    session: Facts | None
    stopped: bool = False
    """Whether the agent does not respond though its sockets exist."""
    late: bool = False
    """Whether leases may still come in answers that are late."""
    reset: bool = False
    """Whether another engine has reset the space."""
    identity: tuple[tuple[str, str], ...] = ()
    """Of the part, without its weights generation."""
    answers: tuple[Answered, ...] = ()


def _at(part: int, job: _Job) -> _Job:
    """Return a job as the ranks of another part than the scheduler's read it: it names by part the
    session, or None if it was planned without one, and the lease.
    """
    session, lease = job.elsewhere[part - 1] if job.elsewhere else (None, 0)
    local: dict[str, Any] = {"boot": b"", "epoch": 0, "space": b""}
    if session is not None:
        local = {"boot": session.boot, "epoch": session.epoch, "space": session.space}
    if isinstance(job, LoadJob):
        local["lease"] = lease
    return replace(job, **local)


PAIR = "part"
_OWN = (PAIR, GENERATION, UNSHARED, "resolved")
"""Pairs that may differ between the parts of an engine: the generation is ordered by the scheduler,
and blocks of all attention backends that may have computed other parts are equivalent.
"""


class NodePart(Part):
    """A part of such an engine: to its agent, an engine of its own."""

    __slots__ = ()

    @property
    def text(self) -> str:
        """Return the ranks, for the identity."""
        return f"ranks {self.ranks[0]} to {self.ranks[-1]} of {self.world}"

    def check(self, vllm_config: Any, geometry: Geometry, options: Options, kv_role: str) -> Options:
        """Return the options that hold for the engine. Raise Unsupported."""
        rank, method = int(vllm_config.parallel_config.rank), ""
        if (speculative := getattr(vllm_config, "speculative_config", None)) is not None:
            method = str(getattr(speculative, "method", None) or "of a draft model")
        refused = {
            "windows or states: the least of the nodes' hits is not a hit at all of them":
                geometry.states or any(group.window for group in geometry.groups),
            "share_tp or share_pp: engines of other shapes have their ranks on other nodes":
                options.share_tp or options.share_pp,
            f"kv_role {kv_role}: a transfer has one agent": kv_role != "kv_both",
            "load_mode sync or layerwise: a step would wait for all agents":
                options.load_mode == "sync" or options.layerwise,
            "offload lazy": options.offload == LAZY,
            "LoRA adapters: that all nodes have the same content of each is not proved":
                getattr(vllm_config, "lora_config", None) is not None,
            f"speculative_config.method {method}: what all nodes have of a draft model's blocks is not proved":
                method and method not in WITHOUT_DRAFTS,
            f"rank {rank} on node {self.index}, which has {self.text}": rank % self.world not in self.ranks,
        }  # fmt: skip
        for why in [one for one, is_so in refused.items() if is_so]:
            raise Unsupported(
                f"an engine over {self.count} nodes with {why} (docs/decisions/2026-11-23-several-nodes.md)"
            )
        return replace(options, transfers=False, load_mode="async")

    def of_ranks(self, whole: Ranks, replicas: int) -> Ranks:  # noqa: ARG002
        """Return how the KV cache is distributed over the part's ranks."""
        return Ranks(len(self.ranks), len(self._shards(replicas)))

    def of_identity(self, pairs: Identity) -> Identity:
        """Return the identity of the part."""
        return identity_pairs(dict(pairs) | {PAIR: self.text})

    def of_plan(self, plan: StepPlan) -> StepPlan:
        """Return a plan as the part's ranks read it."""
        if not self.index or not (plan.saves or plan.loads):
            return plan
        saves, loads = [_at(self.index, save) for save in plan.saves], [_at(self.index, load) for load in plan.loads]
        return replace(plan, saves=saves, loads=loads)

    def shard(self, rank: int, replicas: int) -> int:
        """Return a worker's shard among those of its part, in which they are numbered anew."""
        return self._shards(replicas).index(shard(rank, self.tp, replicas))

    def difference(self, own: Identity, report: Report) -> str:
        """Return why a part cannot belong to the scheduler's engine: all that determines the bytes
        of any part has to be equal in all of them.
        """
        for one in [one for one in report.news.get(NODES, ()) if one.identity]:
            here, there = dict(own), dict(one.identity)
            names = [key for key in sorted(here | there) if key not in _OWN and here.get(key) != there.get(key)]
            if names:
                return f"node {one.part} of the engine has another {', '.join(names)} than that of its scheduler"
        return ""

    def _shards(self, replicas: int) -> list[int]:
        return sorted({shard(rank, self.tp, replicas) for rank in self.ranks})


@dataclass(eq=False, slots=True, kw_only=True)
class _Asked(Pending):
    """A question that is open, until it is ``answered``, and then its lease."""

    question: Question
    answered: bool = False
    lease: int = 0


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
        self._asked: dict[int, _Asked] = {}
        self._answers: list[Answered] = []
        self._reset = False  # another engine has, and the scheduler was not told
        self._stopped = False
        self._told: News | None = None

    def begin(self, plan: StepPlan) -> None:
        """Begin a step with the plan's orders."""
        change = self._agent.poll()
        if change.ended:
            self._lose()
        self._reset |= change.reset
        orders: Orders | None = plan.told.get(NODES)
        if orders is not None:
            self._follow(orders)
        if self._agent.lookups is not None:
            self._agent.lookups.begin_step(idle=plan.idle)
        awaited = self.side.busy() or self._agent.awaited()
        self._stopped = awaited and self._agent.stopped(time.monotonic())

    def poll(self) -> None:
        """Read the answers that have arrived."""
        for asked in self._asked.values():
            if not asked.answered:
                self._ask(asked, time.monotonic())

    def news(self) -> tuple[News, ...]:
        """Return the news since the last call."""
        agent, session, facts = self._agent, self._agent.session, None
        if session is not None:
            facts = Facts(session.boot, session.number, session.epoch, agent.space, agent.job_blocks)
        news = News(self._part, self._resets, facts, self._stopped, agent.awaits_leases())
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
        self._lose()

    def close(self) -> None:
        """Leave the agent. The leases end with the session."""
        self._agent.close()

    def _follow(self, orders: Orders) -> None:
        if orders.resets != self._resets:
            self._resets = orders.resets
            if not self._agent.reset():
                self._lose()
        for number in self._asked.keys() - {*orders.open}:
            asked = self._asked.pop(number)
            self._abandon(asked)
            if asked.lease:
                self._agent.release(asked.lease)
        self._asked |= {one.number: _Asked(question=one) for one in orders.questions}

    def _lose(self) -> None:
        """Answer that the session has ended, and its leases."""
        self._answers += [Answered(number, None) for number, asked in self._asked.items() if not asked.answered]
        self._asked.clear()

    def _ask(self, asked: _Asked, now: float) -> None:
        """Ask a question, or read its answer."""
        question, lookups, answer = asked.question, self._agent.lookups, None
        waits = lookups is not None and not self._stopped and (not asked.at or now - asked.at < self._age_s)
        try:
            if lookups is not None:
                ask = partial(lookups.ask, question.tokens, question.own, question.hashes)
                answer = lookups.advance(asked, now, self._tiers_s, ask)
        except (TimedOut, Malformed):
            waits = False
        if answer is None and waits:
            return
        asked.answered, tokens = True, None
        if answer is not None:
            asked.lease = answer.lease
            tokens = answer.tokens if answer.status in HITS and answer.lease else 0
        self._abandon(asked)
        self._answers.append(Answered(question.number, tokens, asked.lease))

    def _abandon(self, asked: _Asked) -> None:
        if self._agent.lookups is not None and asked.ticket is not None:
            self._agent.lookups.abandon(asked.ticket)
            asked.ticket = None


@dataclass(eq=False, slots=True, kw_only=True)
class JointTicket(Ticket):
    """A question to all agents."""

    question: Question
    answers: dict[int, Answered] = field(default_factory=dict)
    """By part, those of the other agents."""
    here: Pending = field(default_factory=Pending)
    """The question to the own agent, once the others have answered."""
    lease: int = 0
    """Of the own agent."""


PLAN_HASHES = 1 << 17  # in one plan, which every rank gets: further questions go with the next one


class JointLookups(Lookups):
    """The look-ups of a joint session."""

    def __init__(self, session: Session, options: Constants, joint: JointSession) -> None:
        super().__init__(session, options.lookup_wait_ms / 1e3, options.lookup_age_ms / 1e3)
        self._joint = joint
        self._tiers_s = options.tier_wait_ms / 1e3
        self.open: dict[int, JointTicket] = {}
        """Questions that are not abandoned, with no lease released."""

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
        return Answer(self._session.version, LookupStatus.HIT, 0, 0, self.boot)

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
        """Return whether a question lacks an answer from another node."""
        return len(ticket.answers) < len(self._joint.others)


class JointSession(AgentSession):
    """The joint session. The base class is the session with the scheduler's own agent."""

    def __init__(self, link: Link, options: Constants, parts: int) -> None:
        """``parts``: the nodes that the engine is on."""
        super().__init__(link, options)
        self.others = range(1, parts)
        """The parts without the scheduler."""
        self._news = {part: News(part, 0, None) for part in self.others}  # the last of each
        self.numbers = itertools.count(1)
        """Of questions."""
        self._joint: JointLookups | None = None  # ``lookups``, from the begin of the joint session to its end
        self._resets = 0
        self._told = Orders(0)  # by the last plan, without its questions
        self._ended = False  # the end was not returned by poll
        self._foreign_reset = False  # nor was another engine's reset

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
        change = SessionChange(self._ended, began, change.reset or self._foreign_reset)
        self._ended = self._foreign_reset = False
        return change if any(change) else NO_CHANGE

    def tell(self, plan: StepPlan) -> None:
        """Tell the delegates what they are to do, once."""
        if (orders := self._orders()) != self._told:
            plan.told[NODES] = replace(orders, questions=tuple(self.untold()))
            self._told = orders

    def untold(self) -> list[Question]:
        """Return the questions for the next plan."""
        opened = {} if self._joint is None else self._joint.open
        return [one.question for number, one in opened.items() if number not in self._told.open]

    def hear(self, report: Report) -> bool:
        """Take the news of delegates. Until poll returns it, nothing promised before is loaded."""
        every: Sequence[News] = report.news.get(NODES, ())
        for news in every:
            opened = {} if self._joint is None else self._joint.open
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

    def send(self, message: Message) -> bool:  # noqa: ARG002
        """Send nothing: what is sent so concerns blocks of engines on one node."""
        return False

    def reset(self) -> bool:
        """Start a new epoch everywhere: here in the next session. Until all delegates have reported
        that, nothing is asked and nothing saved.
        """
        self._resets += 1
        self._reset_pending = True
        self.begin_anew()
        return True

    def _orders(self) -> Orders:
        return Orders(self._resets, () if self._joint is None else tuple(self._joint.open))

    def _silent(self) -> bool:
        """Return whether an agent of another node does not answer."""
        return any(news.stopped for news in self._news.values())

    def _attach(self, session: Session) -> bool:
        attached = super()._attach(session)
        self.lookups = None  # until the joint session begins
        return attached

    def _close_lookups(self) -> None:
        super()._close_lookups()
        self._ended |= self._joint is not None
        self._joint = None
