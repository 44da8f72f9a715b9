"""The sessions with the agents of several nodes as one: when they begin and end, and what becomes
of leases.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.errors import Busy, SessionEnded, TimedOut
from kvagent.lookup import MAX_OUTSTANDING, Answer, LookupStatus
from kvagent.messages import Group, Registered, Welcome
from kvagent.vllm.geometry import Geometry, Unsupported
from kvagent.vllm.guests.nodes import PLAN_HASHES, Delegate, JointSession
from kvagent.vllm.guests.parts import NODES, Answered, Facts, News, NodePart, Orders, Question
from kvagent.vllm.guests.start import joined
from kvagent.vllm.options import Options
from kvagent.vllm.plan import Report, StepPlan
from kvagent.vllm.scheduler import agent_session
from kvagent.vllm.scheduler.side import SchedulerSide
from tests.simulated import Pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.vllm.guests.nodes import JointLookups
    from kvagent.vllm.scheduler.agent_session import AgentSession

HERE, THERE = b"h" * 16, b"t" * 16
HASHES = [bytes([i]) * 32 for i in range(4)]
FACTS = Facts(THERE, 7, 1, b"space there", 100)
NEWS = News(1, 0, FACTS)


class Link:
    """A link that has a new session whenever the last one was left."""

    def __init__(self) -> None:
        self.count = 0
        self.released: list[int] = []
        self._make()

    def current(self) -> Any:
        return self.made

    def lost(self, session: Any) -> None:
        if session is self.made:
            self._make()

    def renew(self, *, hold: bool = False) -> Any:
        last = self.made
        self._make()
        return last

    def close(self) -> None:
        """The session was taken before."""

    def _make(self) -> None:
        self.count += 1
        self.made: Any = SimpleNamespace(
            boot=HERE, epoch=1, quiet=lambda: False, poll=list, close=lambda: None,
            limits=Welcome(3, HERE, self.count), release=self.released.extend, pinging=False,
            reset=lambda _: 2, registered=Registered(1, 0, "", b"space here".ljust(16), 1, "/none"),
        )  # fmt: skip


def hear(joint: JointSession, news: Sequence[News]) -> None:
    joint.hear(Report(news={NODES: tuple(news)}))


def orders_of(session: AgentSession) -> Orders | None:
    """Return what the next plan tells the delegates."""
    plan = StepPlan()
    session.tell(plan)
    found: Orders | None = plan.told.get(NODES)
    return found


def begun(*, parts: int = 2, options: Options | None = None) -> tuple[JointSession, Link]:
    """Return a joint session that is there."""
    link: Any = Link()
    joint = JointSession(link, options or Options(), parts)
    joint.poll()
    assert not there(joint)
    hear(joint, [replace(NEWS, part=part) for part in joint.others])
    change = joint.poll()
    assert (change.began, change.ended) == (True, False)
    assert orders_of(joint) is None, "nobody has anything to do"
    return joint, link


def there(joint: JointSession) -> bool:
    """Return whether the joint session is there; its parts agree on that."""
    found = {joint.session is not None, joint.lookups is not None, bool(joint.targets())}
    assert len(found) == 1, found
    return found.pop()


def asked(joint: JointSession) -> tuple[JointLookups, Any]:
    lookups: Any = joint.lookups
    ticket = lookups.ask(65, 0, HASHES)
    orders = orders_of(joint)
    assert orders is not None
    (question,) = orders.questions
    assert question.hashes == tuple(HASHES)
    assert lookups.answer(ticket, first=True) is None
    return lookups, ticket


def answer(joint: JointSession, ticket: Any, **more: Any) -> None:
    answered = Answered(ticket.question.number, **({"tokens": 64, "lease": 30} | more))
    hear(joint, [replace(NEWS, answers=(answered,))])


def held(joint: JointSession) -> int:
    """Return a question whose answer was found here too, with the lease 5, and there with 30."""
    _, ticket = asked(joint)
    answer(joint, ticket)
    ticket.lease = 5
    return int(ticket.question.number)


def test_it_is_there_while_all_sessions_are() -> None:
    joint, link = begun(parts=3)
    assert joint.targets() == ((FACTS, 0),) * 2
    assert joint.job_blocks == 100
    hear(joint, [replace(NEWS, part=2, session=None)])
    assert not there(joint)
    assert link.count == 2, "the own session goes on, and its leases"
    change = joint.poll()
    assert (change.ended, change.began) == (True, False)
    hear(joint, [replace(NEWS, part=2)])
    assert joint.poll().began


def test_another_session_of_a_delegate_ends_the_joint_one() -> None:
    joint, link = begun()
    hear(joint, [replace(NEWS, session=replace(FACTS, epoch=2))])
    assert there(joint)
    assert joint.targets()[0][0] == replace(FACTS, epoch=2)
    hear(joint, [replace(NEWS, session=replace(FACTS, number=8))])
    assert not there(joint)
    assert link.count == 2


def test_the_end_of_the_own_session_ends_the_others() -> None:
    joint, link = begun()
    link.lost(link.made)
    asked(joint)
    change = joint.poll()
    assert (change.ended, change.began) == (True, True)
    assert orders_of(joint) == Orders(0), "a question stays open"
    assert joint.awaits_leases() is False


def test_an_abandoned_question_gives_its_leases_back() -> None:
    joint, _ = begun(parts=3)
    lookups, ticket = asked(joint)
    answer(joint, ticket)
    assert orders_of(joint) is None
    _, other = asked(joint)
    lookups.abandon(ticket)
    assert joint.awaits_leases(), "no plan has told of it"
    assert orders_of(joint) == Orders(0, (other.question.number,))
    assert not joint.awaits_leases()
    hear(joint, [replace(NEWS, part=2, late=True, answers=(Answered(ticket.question.number, 64, 31),))])
    assert joint.awaits_leases(), "the other one may still get a lease"
    hear(joint, [replace(NEWS, part=2)])
    assert not joint.awaits_leases()


def test_the_own_agent_is_asked_for_no_more_than_the_least() -> None:
    joint, link = begun(parts=3)
    lookups, ticket = asked(joint)
    answer(joint, ticket, tokens=64, lease=30)
    assert lookups.answer(ticket, first=False) is None, "the third node has not answered"
    hear(joint, [replace(NEWS, part=2, answers=(Answered(ticket.question.number, 32, 31),))])
    sent: list[Any] = []
    found = Answer(3, LookupStatus.HIT, 32, 5, HERE)

    def submit(request: Any, _: Any) -> object:
        sent.append(request)
        return object()

    client: Any = SimpleNamespace(submit=submit, poll=lambda *_: found, close=lambda: None)
    lookups._client = client
    assert lookups.answer(ticket, first=False) == found
    assert [one.tokens for one in sent] == [33]
    assert [lease for _, lease in joint.targets(5)] == [30, 31]
    assert link.released == []


@pytest.mark.parametrize("lost", [True, False])
def test_without_a_hit_at_another_node_the_own_agent_is_not_asked(lost: bool) -> None:
    joint, _ = begun()
    lookups, ticket = asked(joint)
    answer(joint, ticket, tokens=None if lost else 0, lease=0)
    if lost:
        with pytest.raises(TimedOut):
            lookups.answer(ticket, first=False)
        lookups.abandon(ticket)
    else:
        found = lookups.answer(ticket, first=False)
        assert found is not None
        assert (found.tokens, found.lease) == (0, 0)
    assert ticket.here.ticket is None
    assert orders_of(joint) == Orders(0)
    assert not joint.awaits_leases()


def test_all_leases_of_a_hit_are_released_as_one() -> None:
    joint, link = begun()
    held(joint)
    assert joint.targets(5)[0][1] == 30
    joint.release(5, HERE)
    assert orders_of(joint) == Orders(0)
    assert link.released == [5]
    joint.release(5, HERE)
    assert orders_of(joint) is None, "it is released once"


def test_the_next_agent_gives_the_same_numbers_to_other_leases() -> None:
    """A load from the last one may end after that."""
    joint, link = begun()
    held(joint)
    joint.release(5, b"l" * 16)
    assert orders_of(joint) is None
    assert joint.targets(5)[0][1] == 30
    assert link.released == []


def test_nothing_is_done_before_a_reset_is_done_everywhere() -> None:
    joint, _ = begun()
    joint.reset()
    assert not there(joint)
    assert orders_of(joint) == Orders(1)
    hear(joint, [NEWS])
    assert not joint.poll().began, "it has not reset"
    hear(joint, [replace(NEWS, resets=1, session=None)])
    assert not joint.poll().began
    hear(joint, [replace(NEWS, resets=1)])
    assert joint.poll().began


def test_a_reset_does_not_hide_that_leases_have_ended() -> None:
    """The delegate's agent was killed while it reset: the next one gives their numbers again."""
    joint, link = begun()
    held(joint)
    joint.reset()
    assert orders_of(joint) == Orders(1)
    hear(joint, [replace(NEWS, resets=1, session=replace(FACTS, boot=b"n" * 16))])
    assert link.count == 2
    change = joint.poll()
    assert (change.ended, change.began) == (True, True)
    assert joint.targets(5)[0][1] == 0
    joint.release(5, HERE)
    assert orders_of(joint) is None


def test_a_request_that_ends_after_a_reset_elsewhere_gives_its_leases_back() -> None:
    """Before the next step, in which the scheduler polls."""
    link: Any = Link()
    options, geometry = Options(min_load_tokens=16), Geometry((Group(16, 8, 0),), 16)
    side = SchedulerSide(
        options,
        geometry,
        2,
        link,
        SimpleNamespace(block_pool=Pool(8)),
        saves=True,
        joined=joined(options, geometry, parts=2),
    )
    side._poll_agent()
    side.report(Report(news={NODES: (NEWS,)}))
    side._poll_agent()
    request = SimpleNamespace(
        request_id="one", num_tokens=65, num_prompt_tokens=65, block_hashes=HASHES, lora_request=None, mm_features=[],
        skip_reading_prefix_cache=False, num_computed_tokens=0, status=None, num_output_tokens=0, output_token_ids=[],
    )  # fmt: skip
    assert side.matched(request, 0) == (None, False)
    orders = orders_of(side.agent)
    assert orders is not None
    answered = Answered(orders.questions[0].number, 64, 30)
    side.report(Report(news={NODES: (replace(NEWS, answers=(answered,)),)}))
    side.report(Report(news={NODES: (replace(NEWS, reset=True),)}))
    side.finished(request, normally=False)
    assert orders_of(side.agent) == Orders(0)


def test_a_reset_elsewhere_is_heard_of_once() -> None:
    """Until it is handled, nothing promised before is loaded."""
    joint, _ = begun()
    hear(joint, [replace(NEWS, reset=True)])
    assert not there(joint)
    assert joint.poll().reset
    assert there(joint)
    assert not joint.poll().reset


def test_a_reset_does_not_hide_an_end() -> None:
    """Nobody would abandon the question to the own agent, whose answer has a lease."""
    joint, link = begun()
    hear(joint, [replace(NEWS, session=None, reset=True)])
    assert link.count == 2, "the own session goes on, and its leases"
    change = joint.poll()
    assert (change.ended, change.began, change.reset) == (True, False, True)


def test_a_late_lease_needs_no_session_to_be_released() -> None:
    """The agent may have ended since the session was read."""
    joint, link = begun()

    def release(_: Any) -> None:
        raise SessionEnded(())

    session: Any = link.made
    session.release = release
    lookups: Any = joint.lookups
    late = [Answer(3, LookupStatus.HIT, 32, 5, HERE)]
    lookups._client = SimpleNamespace(late_answers=lambda: late, close=lambda: None)
    assert lookups.begin_step() == (0, 1)


def test_hashes_in_a_plan_are_bounded() -> None:
    """Each rank gets them."""
    joint, _ = begun()
    lookups: Any = joint.lookups
    hashes = [bytes(32)] * (PLAN_HASHES // 2)
    for _ in range(2):
        lookups.ask(65, 0, hashes)
    with pytest.raises(Busy):
        lookups.ask(65, 0, HASHES)
    orders = orders_of(joint)
    assert orders is not None
    assert len(orders.questions) == 2
    lookups.ask(65, 0, hashes)


def test_a_question_that_no_plan_had_is_abandoned_untold() -> None:
    joint, _ = begun()
    lookups: Any = joint.lookups
    lookups.abandon(lookups.ask(65, 0, HASHES))
    assert orders_of(joint) is None
    kept = lookups.ask(65, 0, HASHES)
    assert orders_of(joint) == Orders(0, (kept.question.number,), (kept.question,))


def test_questions_are_bounded() -> None:
    joint, _ = begun()
    lookups: Any = joint.lookups
    for _ in range(MAX_OUTSTANDING):
        lookups.ask(65, 0, HASHES)
    with pytest.raises(Busy):
        lookups.ask(65, 0, HASHES)


def test_an_agent_elsewhere_that_stands_still_counts() -> None:
    joint, _ = begun()
    assert not joint.awaited()
    hear(joint, [replace(NEWS, stopped=True)])
    assert (joint.awaited(), joint.pinging(), joint.stopped(0.0)) == (True, True, True)
    hear(joint, [NEWS])
    assert (joint.awaited(), joint.pinging(), joint.stopped(0.0)) == (False, False, False)


def test_a_delegate_gives_up_what_it_asked_an_agent_that_stands_still() -> None:
    """Else an engine without requests steps until lookup_age_ms have passed."""
    link: Any = Link()
    session: Any = link.made
    session.start_ping = lambda: None
    delegate = Delegate(link, Options(), 1, tuple)
    side: Any = SimpleNamespace(busy=lambda: False)
    delegate.join(side)
    delegate.begin(StepPlan())
    lookups: Any = delegate._agent.lookups
    ticket, abandoned = object(), list[Any]()
    lookups._client = SimpleNamespace(
        submit=lambda *_: ticket, poll=lambda *_: None, abandon=abandoned.append, outstanding=1, late=0,
        late_answers=list, close=lambda: None,
    )  # fmt: skip
    question = Question(1, 65, 0, tuple(HASHES))
    delegate._age_s = math.inf
    delegate.begin(StepPlan(told={NODES: Orders(0, (1,), (question,))}))
    assert [news.answers for news in delegate.news()] == [()]
    session.pinging = True
    delegate._agent.heard(-math.inf)
    delegate.begin(StepPlan())
    (news,) = delegate.news()
    assert (news.stopped, news.answers) == (True, (Answered(1, None),))
    assert abandoned == [ticket], "a lease may still come"


def test_a_delegate_releases_what_is_open_no_more() -> None:
    """Whether it has answered or not."""
    link: Any = Link()
    delegate = Delegate(link, Options(), 1, tuple)
    side: Any = SimpleNamespace(busy=lambda: False)
    delegate.join(side)
    delegate.begin(StepPlan())
    answers, abandoned = [Answer(3, LookupStatus.HIT, 64, 30, HERE)], list[Any]()
    lookups: Any = delegate._agent.lookups
    lookups._client = SimpleNamespace(
        submit=lambda *_: object(), poll=lambda *_: answers.pop() if answers else None, abandon=abandoned.append,
        outstanding=0, late=0, late_answers=list, close=lambda: None,
    )  # fmt: skip
    questions = tuple(Question(number, 65, 0, tuple(HASHES)) for number in (1, 2))
    delegate.begin(StepPlan(told={NODES: Orders(0, (1, 2), questions)}))
    assert [news.answers for news in delegate.news()] == [(Answered(1, 64, 30),)]
    delegate.begin(StepPlan(told={NODES: Orders(0, (1,))}))
    assert (link.released, len(abandoned)) == ([], 1)
    delegate.begin(StepPlan(told={NODES: Orders(0)}))
    assert (link.released, len(abandoned)) == ([30], 1)


def test_the_own_agent_may_stand_still_while_another_is_away() -> None:
    """Loads in flight are given up then."""
    joint, link = begun()
    hear(joint, [replace(NEWS, session=None)])
    joint.poll()
    assert not there(joint)
    session: Any = link.made
    session.pinging = True
    assert (joint.awaited(), joint.stopped(agent_session.SILENT_S + 0.1)) == (True, True)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"lora_config": SimpleNamespace()}, "LoRA adapters"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "method eagle"),
        ({"speculative_config": SimpleNamespace(method="mtp")}, "method mtp"),
        ({"speculative_config": SimpleNamespace(method="draft_model")}, "method draft_model"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, ""),
        ({}, ""),
    ],
)
def test_adapters_and_draft_models_are_for_one_node(more: dict[str, Any], why: str) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=1), lora_config=None, speculative_config=None)
    vars(config).update(more)
    geometry = Geometry((Group(16, 8, 0),), 16)
    options = Options()
    if not why:
        assert not NodePart(1, 2, 2).check(config, geometry, options, "kv_both").transfers
        return
    with pytest.raises(Unsupported, match=f"over 2 nodes with .*{why}"):
        NodePart(1, 2, 2).check(config, geometry, options, "kv_both")
