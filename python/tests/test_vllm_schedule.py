"""Requests become due in the step in which they fill a block, and hardly ever before."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvagent.vllm.scheduler.requests import Tracked
from kvagent.vllm.scheduler.save_plan import (
    CHECKS,
    DECODE_TOKENS,
    GATHER_STEPS,
    MAX_EXPIRED,
    MAX_RECENT,
    RECENT_S,
    RecentOffers,
    SaveSchedule,
)
from kvagent.vllm.worker.sync import FREE_STEPS, MAX_WAIT_MS, IdleBackoff

BLOCK = 16


def tracked(name: str) -> Tracked:
    return Tracked(SimpleNamespace(request_id=name), False, [0], BLOCK, admitted=True)


@pytest.mark.parametrize("most", [1, 4, DECODE_TOKENS + 40])
def test_no_step_that_fills_a_block_is_missed(most: int) -> None:
    """Against an oracle that checks all requests, with steps of up to ``most`` tokens."""
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    schedule, all_of_them = SaveSchedule(), {f"{i}": tracked(f"{i}") for i in range(20)}
    tokens = dict.fromkeys(all_of_them, 0)
    for one in all_of_them.values():
        schedule.add(one)
    looked = 0
    for _ in range(400):
        scheduled = {name: dice.randint(1, most) for name in all_of_them if dice.random() < 0.8}
        for name, count in scheduled.items():
            tokens[name] += count
        schedule.step(scheduled, all_of_them, dice.choice((0, sum(scheduled.values()))))
        now = schedule.take()
        looked += len(now)
        assert len(set(now)) == len(now)
        for name, one in all_of_them.items():
            assert tokens[name] < one.next_tokens or one in now, f"request {name}, seed {seed}"
        for one in now:
            count = tokens[one.request.request_id]
            one.next_tokens = (count // BLOCK + 1) * BLOCK
            schedule.defer(one, one.next_tokens - count)
    if most == 1:
        assert looked < 20 * 400 / 4, "it is looked at requests that cannot have filled a block"


def test_requests_are_removed_or_requeued() -> None:
    schedule, one, other = SaveSchedule(), tracked("1"), tracked("2")
    schedule.defer(one, 2)
    schedule.defer(other, 2)
    schedule.remove(one)
    schedule.step({"1": 2, "2": 2}, {})
    assert schedule.take() == [other]
    schedule.requeue([other])
    assert schedule.take() == [other]
    assert schedule.take() == []
    schedule.defer(one, 1)
    schedule.add(one)  # put elsewhere: not twice
    schedule.step({"1": 1}, {})
    assert schedule.take() == [one]
    schedule.defer(one, 1)
    schedule.clear()
    schedule.step({"1": 1}, {})
    assert schedule.take() == []


def test_blocks_of_answers_gather_and_nothing_else_waits() -> None:
    """Requests that fill blocks in different steps are checked within GATHER_STEPS steps, between
    two steps that send.
    """
    schedule, some = SaveSchedule(), [tracked(f"{i}") for i in range(3 * GATHER_STEPS)]
    for i, one in enumerate(some):
        schedule.defer(one, 2 * (i + 1))
    looked = []
    for _ in range(2 * len(some)):
        schedule.step({"1": 1}, {})
        if schedule.ready():
            assert not schedule.sends()
            looked.append(len(schedule.take()))
    assert looked == [GATHER_STEPS // 4] + [GATHER_STEPS // 2] * 5
    for _ in range(GATHER_STEPS // 2):
        schedule.step({"1": 1}, {})
    assert len(schedule.take()) == GATHER_STEPS // 4
    schedule.step({"1": 1}, {})
    assert not schedule.ready()
    schedule.add(some[0])  # it has a prompt, or is offered again
    assert schedule.ready()
    schedule.take()
    assert not schedule.ready()
    schedule.requeue([])
    assert not schedule.ready()
    schedule.requeue([some[0]])
    assert schedule.ready()
    schedule.remove(some[0])
    schedule.clear()
    assert not schedule.ready()
    schedule.step({"1": DECODE_TOKENS + 1}, {"1": some[1]})
    assert schedule.ready()


def test_a_step_that_sends_checks_nothing() -> None:
    """Both take their time, and CHECKS requests come due by the time of each."""
    schedule, some = SaveSchedule(), [tracked(f"{i}") for i in range(4 * CHECKS)]
    for i, one in enumerate(some):
        schedule.defer(one, 1 + i * GATHER_STEPS // (2 * CHECKS))
    looked: list[Tracked] = []
    for step in range(1, 3 * GATHER_STEPS):
        schedule.step({"1": 1}, {})
        assert schedule.sends() == (step % GATHER_STEPS == 0)
        if schedule.ready():
            assert not schedule.sends()
            looked += schedule.take()
    assert looked == some


def test_removed_requests_are_dropped_without_takes() -> None:
    """If saves are off, nothing takes due requests for hours, while requests come and go."""
    schedule, stays = SaveSchedule(), tracked("stays")
    schedule.defer(stays, 1)
    for i in range(4 * MAX_EXPIRED):
        one = tracked(f"{i}")
        schedule.defer(one, 1)
        schedule.step({"1": 1}, {})
        schedule.remove(one)
        assert sum(len(some) for _, some in schedule._expired) + len(schedule._ready) <= MAX_EXPIRED + 3
    assert schedule.take() == [stays]


def test_keys_are_forgotten_after_a_time_or_when_they_are_too_many() -> None:
    known = RecentOffers()
    known.rotate(100)
    known.young.update((b"a", b"b"))
    assert b"a" in known
    assert not known.disjoint([b"x", b"b"])
    known.discard([b"b"])
    assert known.disjoint([b"b"])
    known.rotate(100 + RECENT_S)
    assert b"a" in known
    known.rotate(100 + 2 * RECENT_S)
    assert b"a" not in known
    known.young.update(i.to_bytes(4, "big") for i in range(MAX_RECENT + 1))
    known.rotate(100 + 2 * RECENT_S)
    known.rotate(100 + 2 * RECENT_S)
    assert len(known.young) + len(known.old) <= MAX_RECENT + 1
    known.clear()
    assert known.disjoint([bytes(4)])


def test_an_idle_engine_waits_longer_and_longer_and_a_busy_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []

    class Poller:
        def register(self, fd: int, events: int) -> None:
            pass

        def poll(self, ms: int) -> list[int]:
            waits.append(ms)
            return []

    monkeypatch.setattr("kvagent.vllm.worker.sync.select.poll", Poller)
    patience = IdleBackoff()
    for _ in range(30):
        patience.step(idle=False)
        assert not patience.wait([0])
    assert waits == []
    for _ in range(FREE_STEPS + 6):
        patience.step(idle=True)
        patience.wait([0])
    assert waits == [1, 2, 4, 8, MAX_WAIT_MS, MAX_WAIT_MS]
    patience.reset()
    patience.step(idle=True)
    patience.wait([0])
    assert waits[-1] == 1
    patience.step(idle=False)
    patience.wait([0])
    assert len(waits) == 7


def test_requests_that_fill_blocks_at_once_are_checked_over_some_steps() -> None:
    """The oldest come first, and none waits for long."""
    schedule, some = SaveSchedule(), [tracked(f"{i}") for i in range(6 * CHECKS)]
    for one in some:
        schedule.defer(one, 1)
    looked: list[Tracked] = []
    for _ in range(GATHER_STEPS - 1):
        schedule.step({"1": 1}, {})
        if schedule.ready():
            now = schedule.take()
            assert len(now) <= CHECKS + (len(some) - len(looked) - CHECKS) // 8
            looked += now
    assert looked == some[: len(looked)]
    assert len(some) - CHECKS < len(looked) < len(some), "the last ones wait for others"
    steps = 0
    while not schedule.ready():
        schedule.step({"1": 1}, {})
        steps += 1
    assert steps == 1 + GATHER_STEPS // 2, "not in the step that sends"
    assert looked + schedule.take() == some
