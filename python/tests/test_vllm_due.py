"""Requests come up in the step in which they fill a block, and hardly ever before."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvagent.vllm.scheduler.requests import Tracked
from kvagent.vllm.scheduler.save_batch import MAX_RECENT, RECENT_S, Known
from kvagent.vllm.scheduler.save_schedule import FEW, GATHER, MOST_CAME, Due
from kvagent.vllm.worker.idle_backoff import FREE, LAST_MS, Patience

BLOCK = 16


def tracked(name: str) -> Tracked:
    return Tracked(SimpleNamespace(request_id=name), False, [0], BLOCK, admitted=True)


@pytest.mark.parametrize("most", [1, 4, FEW + 40])
def test_no_step_that_fills_a_block_is_missed(most: int) -> None:
    """Against an oracle that looks at everybody, with steps of up to that many tokens."""
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    due, all_of_them = Due(), {f"{i}": tracked(f"{i}") for i in range(20)}
    tokens = dict.fromkeys(all_of_them, 0)
    for one in all_of_them.values():
        due.add(one)
    looked = 0
    for _ in range(400):
        scheduled = {name: dice.randint(1, most) for name in all_of_them if dice.random() < 0.8}
        for name, count in scheduled.items():
            tokens[name] += count
        due.step(scheduled, all_of_them, dice.choice((0, sum(scheduled.values()))))
        now = due.take()
        looked += len(now)
        assert len(set(now)) == len(now)
        for name, one in all_of_them.items():
            assert tokens[name] < one.next_tokens or one in now, f"request {name}, seed {seed}"
        for one in now:
            count = tokens[one.request.request_id]
            one.next_tokens = (count // BLOCK + 1) * BLOCK
            due.later(one, one.next_tokens - count)
    if most == 1:
        assert looked < 20 * 400 / 4, "it is looked at requests that cannot have filled a block"


def test_who_is_removed_or_kept() -> None:
    due, one, other = Due(), tracked("1"), tracked("2")
    due.later(one, 2)
    due.later(other, 2)
    due.remove(one)
    due.step({"1": 2, "2": 2}, {})
    assert due.take() == [other]
    due.keep([other])
    assert due.take() == [other]
    assert due.take() == []
    due.later(one, 1)
    due.add(one)  # put elsewhere: not twice
    due.step({"1": 1}, {})
    assert due.take() == [one]
    due.later(one, 1)
    due.clear()
    due.step({"1": 1}, {})
    assert due.take() == []


def test_blocks_of_answers_gather_and_nothing_else_waits() -> None:
    """A request of those that filled a block one after the other is looked at within GATHER steps."""
    due, some = Due(), [tracked(f"{i}") for i in range(3 * GATHER)]
    for i, one in enumerate(some):
        due.later(one, i + 1)
    looked = []
    for _ in some:
        due.step({"1": 1}, {})
        if due.ripe():
            looked.append(len(due.take()))
    assert looked == [GATHER] * 3
    due.step({"1": 1}, {})
    assert not due.ripe()
    due.add(some[0])  # it has a prompt, or is offered again
    assert due.ripe()
    due.take()
    assert not due.ripe()
    due.keep([])
    assert not due.ripe()
    due.keep([some[0]])
    assert due.ripe()
    due.remove(some[0])
    due.clear()
    assert not due.ripe()
    due.step({"1": FEW + 1}, {"1": some[1]})
    assert due.ripe()


def test_nothing_is_kept_of_who_went_where_nobody_looks() -> None:
    """Where nothing may be saved nobody takes them, for hours; requests come and go."""
    due, stays = Due(), tracked("stays")
    due.later(stays, 1)
    for i in range(4 * MOST_CAME):
        one = tracked(f"{i}")
        due.later(one, 1)
        due.step({"1": 1}, {})
        due.remove(one)
        assert sum(len(some) for _, some in due._came) + len(due._now) <= MOST_CAME + 3
    assert due.take() == [stays]


def test_keys_are_forgotten_after_a_time_or_when_they_are_too_many() -> None:
    known = Known()
    known.age(100)
    known.young.update((b"a", b"b"))
    assert b"a" in known
    assert not known.none([b"x", b"b"])
    known.withdraw([b"b"])
    assert known.none([b"b"])
    known.age(100 + RECENT_S)
    assert b"a" in known
    known.age(100 + 2 * RECENT_S)
    assert b"a" not in known
    known.young.update(i.to_bytes(4, "big") for i in range(MAX_RECENT + 1))
    known.age(100 + 2 * RECENT_S)
    known.age(100 + 2 * RECENT_S)
    assert len(known.young) + len(known.old) <= MAX_RECENT + 1
    known.forget()
    assert known.none([bytes(4)])


def test_an_idle_engine_waits_longer_and_longer_and_a_busy_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []

    class Poller:
        def register(self, fd: int, events: int) -> None:
            pass

        def poll(self, ms: int) -> list[int]:
            waits.append(ms)
            return []

    monkeypatch.setattr("kvagent.vllm.worker.idle_backoff.select.poll", Poller)
    patience = Patience()
    for _ in range(30):
        patience.step(idle=False)
        assert not patience.wait([0])
    assert waits == []
    for _ in range(FREE + 6):
        patience.step(idle=True)
        patience.wait([0])
    assert waits == [1, 2, 4, 8, LAST_MS, LAST_MS]
    patience.came()
    patience.step(idle=True)
    patience.wait([0])
    assert waits[-1] == 1
    patience.step(idle=False)
    patience.wait([0])
    assert len(waits) == 7
