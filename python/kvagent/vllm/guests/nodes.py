"""An engine over several nodes: where its ranks are, and its sessions with the nodes' agents.

To its agent, the ranks of one node are an engine of their own: a *part*. The scheduler has a
session with the agent of its own node; on each other node the part's first rank, its delegate, has
one, and does there what the scheduler orders in the step's plan (docs/decisions, several nodes).

The scheduler's sessions are one, the joint session, which is there while each of them is. When a
delegate's ends, the scheduler ends its own too, and all leases with it. Leases at other agents
belong to questions: each delegate releases those of questions that a plan no longer calls open.

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
    """A look-up that reserves blocks, answered once while it is open. ``hashes`` are joined."""

    number: int
    tokens: int
    own: int
    hash_len: int
    hashes: bytes


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
    0. ``lost``: there was none in time, or no agent.
    """

    number: int
    tokens: int
    lease: int
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """A delegate's session."""

    boot: bytes
    number: int
    epoch: int
    space: bytes
    job_blocks: int
    """The most blocks that the agent accepts in one job."""


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
        agent, session = self._agent, self._agent.session
        if session is None:
            return None
        return Facts(session.boot, session.number, session.epoch, agent.space, agent.job_blocks)


def _ask(lookups: Lookups, question: Question) -> Ticket:
    size, joined = question.hash_len, question.hashes
    hashes = [joined[i : i + size] for i in range(0, len(joined), size)]
    return lookups.ask(question.tokens, question.own, hashes)


def _lost(one: _Open) -> Answered:
    return Answered(one.question.number, 0, 0, lost=True)


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
    """The look-ups of a joint session, and the questions to the other agents, as long as there is
    one with the own agent.
    """

    def __init__(self, session: Session, options: Constants, joint: JointSession) -> None:
        super().__init__(session, options.lookup_wait_ms / 1e3, options.lookup_age_ms / 1e3)
        self._joint = joint
        self._tiers_s = options.tier_wait_ms / 1e3
        self.questions: list[Question] = []
        """For the next plan."""
        self.open: dict[int, JointTicket] = {}
        """Questions that are not abandoned, with no lease released."""
        self.leases: dict[int, int] = {}
        """Questions, by the own agent's lease."""

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
        request = self._request(Want.RESERVE, tokens, own, hashes, terms)
        encode_request(request)
        if sum(map(self._lacks, self.open.values())) >= MAX_OUTSTANDING:
            raise Busy(f"{MAX_OUTSTANDING} look-ups are in flight")
        planned = sum(len(one.hashes) for one in self.questions)
        if planned and planned + len(request.hashes) > PLAN_BYTES:
            raise Busy(f"the next plan has {planned} bytes of hashes")
        question = Question(next(self._joint.numbers), tokens, own, len(hashes[0]), request.hashes)
        ticket = JointTicket(None, math.inf, leases=True, question=question, asked=hashes)
        self.questions.append(question)
        self.open[question.number], self._joint.told = ticket, False
        return ticket

    def answer(self, ticket: Ticket, *, first: bool) -> Answer | None:
        """Return the answer, or None without one; raise TimedOut if there will be none."""
        if not isinstance(ticket, JointTicket):
            return super().answer(ticket, first=first)
        if self._lacks(ticket):
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
                self.leases[answer.lease] = question.number
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
        self.drop(ticket.question.number)
        if ticket.here.ticket is not None:
            super().abandon(ticket.here.ticket)

    def drop(self, number: int) -> None:
        """Give a question up, with all leases at other agents."""
        ticket = self.open.pop(number, None)
        if ticket is not None and (self._lacks(ticket) or any(one.lease for one in ticket.answers.values())):
            self._joint.told = False

    def _lacks(self, ticket: JointTicket) -> bool:
        """Return whether a question lacks an answer from another node."""
        return len(ticket.answers) < len(self._joint.others)


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
        self.numbers = itertools.count(1)
        """Of questions."""
        self.told = True
        """Whether the last plan told of the open questions and resets."""
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

    def targets(self, lease: int = 0) -> tuple[tuple[Facts | None, int], ...]:
        """Return the sessions and leases of a job with this lease in the other parts."""
        if not self._up or self._mine is None:
            return ()
        ticket = self._mine.open.get(self._mine.leases.get(lease, 0))
        leases = {} if ticket is None else {part: one.lease for part, one in ticket.answers.items()}
        return tuple((news.session, leases.get(part, 0)) for part, news in self._news.items())

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
        if not self.told:
            mine, self.told = self._mine, True
            asked = () if mine is None else (tuple(mine.open), tuple(mine.questions))
            plan.told[NODES] = Orders(self._resets, *asked)
            if mine is not None:
                mine.questions.clear()

    def hear(self, report: Report) -> bool:
        """Take the news of delegates."""
        every: Sequence[News] = report.news.get(NODES, ())
        for news in every:
            opened = {} if self._mine is None else self._mine.open
            if news.reset:  # nothing promised before is loaded; the next poll returns it
                self._foreign_reset, self._up, self.lookups = True, False, None
            for answered in news.answers:
                if ticket := opened.get(answered.number):
                    ticket.answers[news.part] = answered
            last, now = self._news[news.part].session, news.session
            ended = last is not None and (now is None or (last.boot, last.number) != (now.boot, now.number))
            if ended and (self._up or self._foreign_reset or opened):
                self.begin_anew()
            self._news[news.part] = news
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
        mine = self._mine is not None and self._mine.awaits_leases()
        return mine or not self.told or any(news.late for news in self._news.values())

    def release(self, lease: int, boot: bytes = b"") -> None:
        """Release a lease at all agents. The own agent's successor gives the same numbers again."""
        super().release(lease, boot)
        if self._mine is not None and boot in (b"", self._mine.boot):
            self._mine.drop(self._mine.leases.pop(lease, 0))

    def send(self, message: Message) -> bool:  # noqa: ARG002
        """Send nothing: what is sent so concerns blocks of engines on one node."""
        return False

    def reset(self) -> bool:
        """Start a new epoch everywhere. Until all delegates have reported that, nothing is asked
        and nothing saved.
        """
        self._resets += 1
        self.told, self._up, self.lookups = False, False, None
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
            self._ended, self._up, self.told = True, False, False
