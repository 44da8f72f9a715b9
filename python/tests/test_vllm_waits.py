"""How long requests wait for an agent that is late, frozen or gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.options import Options
from kvagent.vllm.scheduler.loads import LookupWaits
from kvagent.vllm.scheduler.requests import Asking
from tests.agent import AgentProcess, eventually
from tests.simulated import BLOCK, Clock, SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = 10_000  # tokens
LATE: dict[str, Any] = {"lookup_wait_ms": 0.0, "lookup_grace_ms": 2_000.0, "lookup_age_ms": 2_000.0}


def wait(waits: LookupWaits, tokens: int = PROMPT, pending_since: float = 0.0) -> float:
    """Return how long a request waits in vain."""
    begin = now = 100.0
    asking = Asking(at=begin, pending_since=pending_since)
    while waits.may_wait(asking, tokens, now) and now < begin + 10:
        now += 0.001
    waits.in_vain += 1
    return now - begin


def test_a_wait_is_as_long_as_what_a_hit_saves() -> None:
    waits = LookupWaits(Options())
    assert waits.longest_s(PROMPT) == pytest.approx(1.0)
    assert waits.longest_s(PROMPT // 2) == pytest.approx(0.5)
    assert waits.longest_s(60 * PROMPT) == 2.0, "never longer than lookup_age_ms"
    assert waits.longest_s(PROMPT // 100) == 0.2, "never shorter than lookup_grace_ms"
    assert LookupWaits(Options(lookup_age_ms=50.0)).longest_s(PROMPT) == 0.05
    assert LookupWaits(Options(lookup_age_ms=0.0)).longest_s(PROMPT) == 0.0


def test_a_silent_agent_costs_an_engine_a_bounded_time_in_total() -> None:
    waits = LookupWaits(Options())
    assert wait(waits) == pytest.approx(1.0, abs=0.01)
    assert sum(wait(waits) for _ in range(200)) <= 1.0 + 200 * 0.001
    waits.in_vain = 0  # an answer came, however late
    assert wait(waits) == pytest.approx(1.0, abs=0.01)


def test_an_agent_that_has_answered_that_more_may_come_is_waited_for_once_more() -> None:
    assert wait(LookupWaits(Options()), PROMPT // 100, pending_since=99.0) == pytest.approx(2.0, abs=0.01)


@pytest.fixture
def engine(agent: AgentProcess) -> Iterator[SimulatedEngine]:
    """An engine whose prompt "p" is stored."""
    made = SimulatedEngine(agent, "one", **LATE)
    made.save("a", "p", 4, 7)
    yield made
    agent.thaw()
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def ask(engine: SimulatedEngine, name: str) -> tuple[Any, int | None]:
    """Return a request that has just arrived, and what it is promised."""
    request = engine.request(name, "p", 4)
    engine.scheduler.on_new_request(request)
    return request, engine.scheduler.matched(request, 0)[0]


def answered(engine: SimulatedEngine, request: Any) -> int:
    """Return what a request is promised once the answer is there."""

    def found() -> list[int]:
        engine.step()
        tokens, _ = engine.scheduler.matched(request, 0)
        return [] if tokens is None else [tokens]

    return eventually(found, "an answer")[0]


@pytest.mark.stops
def test_a_late_agent_is_waited_for_and_a_frozen_one_once(
    engine: SimulatedEngine, agent: AgentProcess, clock: Clock
) -> None:
    counts = engine.scheduler.counts
    before = counts.lookups
    agent.freeze()
    late, tokens = ask(engine, "late")
    assert tokens is None
    for _ in range(7):
        clock.now += 0.1
        engine.step()
        assert engine.scheduler.matched(late, 0)[0] is None, "an agent that is late is not waited for"
    agent.thaw()
    assert answered(engine, late) == 4 * BLOCK
    assert (counts.lookups - before, counts.lookups_unanswered) == (1, 0)

    agent.freeze()
    frozen, tokens = ask(engine, "frozen")
    assert tokens is None
    begin = clock.now
    while engine.scheduler.matched(frozen, 0)[0] is None:
        clock.now += 0.05
        engine.step()
    assert clock.now - begin < 1.2, "an agent that answers no ping is waited for"
    assert counts.lookups_unanswered == 1
    for i in range(50):
        assert ask(engine, str(i))[1] == 0, "an agent that is gone is asked"
        engine.step()
    assert counts.lookups - before == 2
    agent.thaw()
    eventually(lambda: (engine.step(), counts.lookups_late == 1)[1], "the late answer")
    eventually(lambda: (engine.step(), not engine.scheduler.agent.silent)[1], "an agent that answers pings")
    back, _ = ask(engine, "back")
    assert answered(engine, back) == 4 * BLOCK
    for request in (late, frozen, back):
        engine.scheduler.finished(request, normally=False)
    eventually(lambda: (engine.step(), agent.status()["leases"] == 0)[1], "an agent without leases")


def test_a_killed_agent_is_not_waited_for(engine: SimulatedEngine, agent: AgentProcess, clock: Clock) -> None:
    """The time stands still, so no bound of any wait passes."""
    agent.freeze()
    waiting, tokens = ask(engine, "waiting")
    assert tokens is None
    agent.kill()
    engine.scheduler._steps = 0  # the next step would not listen without a reason
    engine.step()
    assert engine.scheduler.matched(waiting, 0)[0] == 0, "an agent that is gone is waited for"
    asked = engine.scheduler.counts.lookups
    assert [ask(engine, str(i))[1] for i in range(5)] == [0] * 5
    assert (engine.scheduler.counts.lookups, engine.scheduler.counts.lookups_unanswered) == (asked, 1)
    agent.start()


def test_more_requests_than_questions_in_flight_wait_their_turn(
    engine: SimulatedEngine, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr("kvagent.lookup.MAX_OUTSTANDING", 3)
    agent.freeze()
    requests = [ask(engine, str(i)) for i in range(8)]
    assert [tokens for _, tokens in requests] == [None] * 8
    agent.thaw()
    assert [answered(engine, request) for request, _ in requests] == [4 * BLOCK] * 8
    assert engine.scheduler.counts.lookups_unanswered == 0
