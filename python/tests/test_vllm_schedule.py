"""In which steps requests are looked at for full blocks."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from kvagent.vllm.scheduler.requests import Phase, Tracked
from kvagent.vllm.scheduler.saves import DECODE_TOKENS, RUN_STEPS, SEND_STEPS, SaveSchedule
from kvagent.vllm.worker.side import MAX_WAIT_MS, wait_idle
from tests.sides import running


def requests(count: int) -> dict[str, Tracked]:
    return {f"{i}": running(SimpleNamespace(request_id=f"{i}")) for i in range(count)}


@pytest.mark.parametrize("count", [1, 5, 16, 100, 256])
def test_each_request_has_a_turn_in_a_run_of_steps(count: int) -> None:
    schedule, some = SaveSchedule(), requests(count)
    for one in some.values():
        schedule.add(one)
    assert schedule.take() == list(some.values()), "an admitted request is looked at in the next step"
    looked: Counter[Tracked] = Counter()
    for step in range(1, 4 * RUN_STEPS + 1):
        schedule.step(dict.fromkeys(some, 1), some, count)
        now = schedule.take()
        assert not now or step % SEND_STEPS == 0, "blocks of answers wake the agent in other steps too"
        assert len(now) <= -(-count * SEND_STEPS // RUN_STEPS), "turns are not spread over the steps"
        looked.update(now)
    assert looked == dict.fromkeys(some.values(), 4)


def test_what_computes_a_part_of_a_prompt_is_looked_at_at_once() -> None:
    schedule, some = SaveSchedule(), requests(3)
    some["2"].phase = Phase.NONE
    schedule.step({"0": DECODE_TOKENS, "1": DECODE_TOKENS + 1, "2": DECODE_TOKENS + 1, "other": 100}, some, 0)
    assert schedule.take() == [some["1"]]
    assert not schedule.ready()


def test_requests_that_are_removed_are_not_looked_at() -> None:
    schedule, some = SaveSchedule(), requests(3)
    for one in some.values():
        schedule.add(one)
    schedule.remove(some["1"])
    assert schedule.take() == [some["0"], some["2"]]
    schedule.remove(some["2"])
    looked = set()
    for _ in range(RUN_STEPS):
        schedule.step({"0": 1}, some, 1)
        looked.update(schedule.take())
    assert looked == {some["0"]}


def test_an_idle_engine_waits_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []

    class Poller:
        def register(self, fd: int, events: int) -> None:
            pass

        def poll(self, ms: int) -> list[int]:
            waits.append(ms)
            return []

    monkeypatch.setattr("kvagent.vllm.worker.side.select.poll", Poller)
    for steps in range(1, MAX_WAIT_MS + 3):
        assert not wait_idle([0], steps)
    assert waits == [*range(1, MAX_WAIT_MS + 1), MAX_WAIT_MS, MAX_WAIT_MS]
