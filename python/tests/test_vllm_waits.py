"""How long requests wait for an agent that is late, frozen or gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.options import Options
from kvagent.vllm.scheduler.waits import LookupWaits
from tests.agent import AgentProcess, eventually
from tests.sides import running
from tests.simulated import BLOCK, Clock, SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvagent.vllm.scheduler.requests import Tracked

PROMPT = 1000  # tokens
LATE: dict[str, Any] = {"lookup_wait_ms": 0.0, "lookup_grace_ms": 200.0, "lookup_age_ms": 2_000.0}  # the defaults


def tracked() -> Tracked:
    return running(SimpleNamespace())


def measured(compute: float, load: float = 0.0, **options: Any) -> LookupWaits:
    """Return the waits of an engine that computes and loads PROMPT tokens in these times."""
    waits = LookupWaits(Options(**options))
    waits.step({"a": PROMPT}, PROMPT, 10.0)
    waits.step({"a": 1}, 1, 10.0 + compute)
    if load:
        waits.loaded.add(PROMPT, load)
    return waits


def wait(waits: LookupWaits, request: Tracked, tokens: int = PROMPT) -> float:
    """Return how long a request waits in vain."""
    begin = now = 100.0
    while waits.may_wait(request, tokens, now) and now < begin + 10:
        now += 0.001
    waits.in_vain()
    request.asking.polled_at = 0.0
    return now - begin


def test_a_wait_is_as_long_as_what_a_hit_saves() -> None:
    assert LookupWaits(Options()).longest_s(PROMPT) == 2.0, "how fast the engine computes is unknown"
    assert measured(1.5).longest_s(PROMPT) == pytest.approx(1.5)
    assert measured(1.5).longest_s(PROMPT // 2) == pytest.approx(0.75)
    assert measured(1.5, load=1.0).longest_s(PROMPT) == pytest.approx(0.5)
    assert measured(60.0).longest_s(PROMPT) == 2.0, "never longer than lookup_age_ms"
    assert measured(0.01).longest_s(PROMPT) == 0.2, "never shorter than lookup_grace_ms"
    assert measured(1.5, load=3.0).longest_s(PROMPT) == 0.2
    assert measured(1.5, lookup_age_ms=50.0).longest_s(PROMPT) == 0.05
    assert measured(1.5, lookup_age_ms=0.0).longest_s(PROMPT) == 0.0


def test_the_time_per_token_is_of_prefills_and_of_recent_ones() -> None:
    waits = measured(1.0)
    for i in range(40):  # steps that decode say nothing of prefills
        waits.step({str(j): 1 for j in range(64)}, 64, 20.0 + 60 * i)
    assert waits.computed.token_s == pytest.approx(0.001)
    waits.step({"b": PROMPT}, PROMPT, 5000.0)
    waits.end_step(5002.0)  # its only request has ended: the engine idles
    waits.step({"c": 1}, 1, 9000.0)
    assert waits.computed.token_s == pytest.approx(2.8 / 1800)


def test_a_silent_agent_costs_an_engine_a_bounded_time_in_total() -> None:
    waits = measured(1.0)
    assert wait(waits, tracked()) == pytest.approx(1.0, abs=0.01)
    assert sum(wait(waits, tracked()) for _ in range(200)) <= 1.0 + 200 * 0.001
    waits.answered()  # however late
    assert wait(waits, tracked()) == pytest.approx(1.0, abs=0.01)


def test_a_request_waits_a_bounded_time_in_all_its_look_ups() -> None:
    waits, request = measured(1.0), tracked()
    assert wait(waits, request) == pytest.approx(1.0, abs=0.01)
    waits.answered()
    assert wait(waits, request) <= 0.001, "it waits as long again after a preemption"


def test_the_time_of_the_lower_tiers_is_not_that_of_the_agent() -> None:
    waits, request = measured(1.0, tier_wait_ms=30_000.0), tracked()
    request.asking.pending_since = 100.0
    assert all(waits.may_wait(request, PROMPT, 100.0 + i) for i in range(30))
    assert waits.may_wait(request, PROMPT, 130.5)
    assert not waits.may_wait(request, PROMPT, 131.6)


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
    eventually(lambda: (engine.step(), not engine.scheduler._stopped)[1], "an agent that answers pings")
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
