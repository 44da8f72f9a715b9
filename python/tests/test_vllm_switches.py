"""Switches of single requests, with the real agent in an engine that a test drives step by step."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent import messages as m
from kvagent.vllm.counters import Counts
from kvagent.vllm.guests.hints import Hints, hints
from kvagent.vllm.guests.switches import MAX_LOGGED, MAX_TOKENS, Switches
from kvagent.vllm.scheduler.requests import NO_LIMIT, USUAL, Tracked
from tests.agent import eventually
from tests.clients import some_params
from tests.sides import side_of
from tests.simulated import BLOCK, SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvagent.vllm.scheduler.side import SchedulerSide
    from tests.agent import AgentProcess


@pytest.fixture
def engines(agent: AgentProcess) -> Iterator[Callable[..., SimulatedEngine]]:
    made: list[SimulatedEngine] = []

    def make(name: str = "one", **more: Any) -> SimulatedEngine:
        made.append(SimulatedEngine(agent, name, **more))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def applied(params: Any, *, transfers: bool = True) -> tuple[Tracked, Counts]:
    side = switched(transfers=transfers)
    return seen(side, params), side.counts


def switched(*, transfers: bool = True) -> SchedulerSide:
    hinted = Hints(1.0)
    return side_of(Switches(hinted, transfers=transfers), hinted)


def wish(action: str, seconds: float) -> dict[str, Any]:
    return {"kvagent.hints": [{"action": action, "seconds": seconds}]}


PINNED = wish("kv.pin", 1000)


def seen(side: SchedulerSide, params: Any) -> Tracked:
    request = SimpleNamespace(request_id="r", kv_transfer_params=params, lora_request=None, mm_features=[])
    side.requests.clear()
    return side._track(request)


def state(tracked: Tracked) -> tuple[int, int]:
    return tracked.saving.most, tracked.asking.most


PLAIN = (NO_LIMIT, NO_LIMIT)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, PLAIN),
        ({"kvagent.save": False}, (0, NO_LIMIT)),
        ({"kvagent": {"save": False, "load": False}}, (0, 0)),
        ({"kvagent.save": True, "kvagent.load": True}, PLAIN),
        ({"kvagent.max_load_tokens": 0}, (NO_LIMIT, 0)),
        ({"kvagent": {"max_load_tokens": 5}, "kvagent.max_load_tokens": MAX_TOKENS}, (NO_LIMIT, MAX_TOKENS)),
        ({"kvagent": {"save": False}, "kvagent.save": True}, PLAIN),
        ({"save": False, "other.load": False}, PLAIN),
    ],
)
def test_switches_are_read_in_both_forms(params: dict[str, Any], expected: tuple[int, int]) -> None:
    tracked, counts = applied(params)
    assert state(tracked) == expected
    assert counts.switches_ignored == 0


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"kvagent.save": "no"}, "kvagent.save: 'no', allowed is true or false"),
        ({"kvagent.save": 0}, "kvagent.save: 0, allowed is true or false"),
        ({"kvagent.load": None}, "kvagent.load: None, allowed"),
        ({"kvagent.max_load_tokens": -1}, "kvagent.max_load_tokens: -1, allowed is an integer 0 to 1073741824"),
        ({"kvagent.max_load_tokens": True}, "True, allowed is an integer"),
        ({"kvagent.max_load_tokens": 1.5}, "1.5, allowed is an integer"),
        ({"kvagent.max_load_tokens": 1 << 80}, "allowed is an integer"),
        ({"kvagent.saves": False}, "'saves': no such switch; there are save, load, max_load_tokens, session, hints"),
        ({"kvagent": 3}, "'': no such switch"),
        ({"kvagent": {7: False}}, "'7': no such switch"),
        ({"kvagent.x\n" + "y" * 500: 1}, "no such switch"),
        ({"kvagent.session": 7}, "kvagent.session: 7, allowed is a string of 1 to 128 bytes"),
        ({"kvagent.session": ""}, "kvagent.session: '', allowed"),
        ({"kvagent.session": "x" * 129}, "allowed is a string"),
        ({"kvagent.hints": "kv.pin"}, "kvagent.hints: 'kv.pin', allowed is a list of actions"),
        ({"kvagent": {"hints": {"action": "kv.pin"}}}, "allowed is a list of actions"),
        ({"kvagent.save": False, "do_remote_decode": True}, "kvagent.save: a prompt for a decode engine is saved"),
        ({"kvagent.load": False, "do_remote_prefill": True}, "kvagent.load: a prompt of a prefill engine is loaded"),
        ({"kvagent.max_load_tokens": 1, "do_remote_prefill": True}, "a prompt of a prefill engine is loaded"),
    ],
)
def test_a_bad_switch_is_counted_logged_and_ignored(
    params: dict[Any, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.kvagent"):
        tracked, counts = applied(params)
    assert state(tracked) == PLAIN
    assert counts == Counts(switches_ignored=1)
    (record,) = caplog.records
    assert said in record.getMessage()
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 300


def test_one_bad_switch_leaves_the_others() -> None:
    tracked, counts = applied({"kvagent.save": False, "kvagent.load": "no"})
    assert state(tracked) == (0, NO_LIMIT)
    assert counts == Counts(requests_unsaved=1, switches_ignored=1)


def test_without_transfers_their_parameters_do_not_matter() -> None:
    tracked, _ = applied({"kvagent.save": False, "do_remote_decode": True}, transfers=False)
    assert state(tracked) == (0, NO_LIMIT)


def test_clients_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    side = switched()
    with caplog.at_level(logging.WARNING, "vllm.kvagent"):
        for i in range(2 * MAX_LOGGED):
            for _ in range(2):
                seen(side, {"kvagent.save": i})
    assert len(caplog.records) == MAX_LOGGED


@pytest.mark.parametrize("given", [[], [{"kvagent.save": False}], "kvagent.save", 3, 0, "", False])
def test_what_is_no_mapping_is_taken_from_the_request(given: Any) -> None:
    """vLLM reads it too."""
    side = switched()
    assert seen(side, given).request.kv_transfer_params is None
    assert side.counts == Counts(switches_ignored=1)


def test_whatever_a_client_sends_its_request_runs(engines: Callable[..., SimulatedEngine]) -> None:
    seed = random.randrange(1 << 32)
    logging.getLogger("tests").info("seed %d", seed)
    dice, engine = random.Random(seed), engines(transfers=True, pin_percent=100.0)
    for i in range(400):
        request = engine.request(f"r{i}", f"p{i % 7}", 1, kv_transfer_params=some_params(dice, i))
        engine.scheduler.on_new_request(request)
        engine.scheduler.matched(request, 0)
        engine.scheduler.finished(request, normally=bool(i % 2))
        engine.step()


def test_a_request_that_is_not_to_be_saved_is_loaded(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines()
    engine.save("secret", "p", 4, 1, kv_transfer_params={"kvagent.save": False})
    engine.quiet()  # what is saved at its end
    assert agent.status()["blocks_stored"] == 0
    engine.save("plain", "p", 4, 1)
    assert agent.status()["blocks_stored"] == 4
    assert engine.matched(engine.request("again", "p", 4, kv_transfer_params={"kvagent.save": False})) == 4 * BLOCK
    assert engine.scheduler.counts.requests_unsaved == 2


def test_its_saves_do_not_begin_with_another_agent(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """A new agent is offered all blocks of running requests again."""
    engine = engines()
    request = engine.request("secret", "p", 4, kv_transfer_params={"kvagent.save": False})
    engine.matched(request)
    engine.admit(request)
    engine.step((request, request.num_tokens - 1))
    agent.kill()
    agent.start()
    engine.matched(engine.request("other", "q", 1))
    engine.step((request, 1))
    engine.quiet()
    engine.scheduler.finished(request, normally=True)
    engine.quiet()
    assert agent.status()["blocks_stored"] == 0


def test_a_request_that_is_not_to_be_loaded_is_saved(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines()
    engine.save("a", "p", 4, 1)
    asked = engine.scheduler.counts.lookups
    off = {"kvagent": {"load": False}}
    assert engine.matched(engine.request("b", "p", 4, kv_transfer_params=off)) == 0
    assert engine.scheduler.counts.lookups == asked
    engine.save("c", "q", 3, 1, kv_transfer_params=off)
    assert agent.status()["blocks_stored"] == 7
    assert engine.scheduler.counts.requests_unloaded == 2


@pytest.mark.parametrize(
    ("most", "own", "promised"),
    [(4, 0, 4), (3, 0, 3), (0, 0, 0), (9, 0, 6), (2, 3, 2), (9, 3, 3), (2, 6, 0)],
)
def test_at_most_so_many_tokens_are_loaded(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, most: int, own: int, promised: int
) -> None:
    engine = engines()
    engine.save("a", "p", 6, 1)
    limited = engine.request("b", "p", 6, kv_transfer_params={"kvagent.max_load_tokens": most * BLOCK + BLOCK - 1})
    assert engine.matched(limited, own * BLOCK) == promised * BLOCK
    assert agent.status()["leases"] == (promised > 0)
    assert engine.scheduler.counts.requests_limited == 1


def test_blocks_of_old_weights_are_known_although_their_request_is_not_saved(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """Another request that finds them in the engine's own cache must not save what follows them."""
    engine = engines()
    request = engine.request("secret", "p", 1, kv_transfer_params={"kvagent.save": False})
    table = engine.admit(request)
    engine.step((request, BLOCK // 2))
    engine.scheduler.reset()
    table[0].block_hash = request.block_hashes[0]  # as the step is scheduled that fills it
    again = engine.request("b", "p", 3)
    engine.tables["b"] = table[:1] + engine.pool.blocks[20:23]
    engine.admit(again)
    engine.step((again, again.num_tokens))
    engine.quiet()
    assert agent.status()["blocks_stored"] == 0


def told(agent: AgentProcess, name: str = "pinned_blocks") -> int:
    return int(agent.status()["hints"][name])


def test_blocks_of_a_request_are_kept_after_its_end(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines()
    engine.save("a", "p", 4, 1)
    asked = engine.request("b", "p", 6, kv_transfer_params=PINNED)
    assert engine.matched(asked) == 4 * BLOCK
    engine.admit(asked, 4 * BLOCK)
    engine.until_received(asked)
    engine.scheduler.allocated(asked, engine.get_blocks("b"), 0)
    engine.step((asked, 2 * BLOCK))
    engine.quiet()
    assert told(agent) == 0, "before its end"
    engine.scheduler.finished(asked, normally=True)
    engine.quiet()
    eventually(lambda: told(agent) == 6, "six kept blocks")
    assert agent.status()["blocks_stored"] == 6
    assert engine.scheduler.counts.requests_hinted == 1
    engine.scheduler.reset()
    eventually(lambda: told(agent) == 0, "no kept blocks after a reset")


def test_its_last_saves_are_waited_for(engines: Callable[..., SimulatedEngine], agent: AgentProcess) -> None:
    engine = engines()
    request = engine.request("a", "p", 4, kv_transfer_params={"kvagent": {"hints": PINNED["kvagent.hints"] * 2}})
    engine.matched(request)
    engine.admit(request)
    engine.fill(request, 1)
    agent.freeze()
    engine.step((request, request.num_tokens))
    engine.scheduler.finished(request, normally=True)
    assert engine.scheduler.pending(), "its saves are in flight"
    agent.thaw()
    engine.quiet()
    eventually(lambda: told(agent) == 4, "four kept blocks")
    assert told(agent, "pending") == 2


def test_what_a_request_stored_first_is_dropped_after_its_time(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engines("other").save("plain", "p", 2, 1)
    engine = engines()
    request = engine.request("brief", "p", 5, kv_transfer_params=wish("kv.drop", 0.5))
    engine.matched(request)
    engine.admit(request)
    engine.fill(request, 1)
    engine.step((request, request.num_tokens))
    engine.quiet()
    assert agent.status()["blocks_stored"] == 5
    engine.scheduler.finished(request, normally=True)  # its time begins
    eventually(lambda: told(agent, "blocks_dropped") == 3, "three dropped blocks")
    assert agent.status()["blocks_stored"] == 2
    assert engine.matched(engine.request("again", "p", 5)) == 2 * BLOCK
    assert engine.scheduler.counts.requests_hinted == 1


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_an_agent_that_goes_is_not_told(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvagent.vllm.guests.hints.MAX_ENDED", 2)
    engine = engines()
    some = [engine.request(f"r{i}", f"p{i}", 4, kv_transfer_params=PINNED) for i in range(4)]
    for request in some:
        engine.matched(request)
        engine.admit(request)
    engine.step()
    (agent.kill if how == "kill" else agent.freeze)()
    engine.step(*((request, request.num_tokens) for request in some))
    for request in some:
        engine.scheduler.finished(request, normally=True)
    if how == "freeze":
        assert engine.scheduler.counts.hints_lost == 2, "those that wait are bounded"
        agent.thaw()
        engine.quiet()
        eventually(lambda: told(agent) == 8, "the blocks of the last two")
    else:
        engine.quiet()
        assert engine.scheduler.counts.hints_lost == 4
        agent.start()
        eventually(lambda: (engine.step(), agent.status()["engine_list"][:1])[1], "an engine")
        eventually(lambda: (engine.step(), agent.status()["engine_list"][0]["complete"])[1], "a complete engine")
        eventually(
            lambda: (engine.step(), engine.scheduler.agent.session and engine.worker_link.current())[1],
            "both sides, once they know of it",
        )
        engine.save("again", "q", 4, 1, kv_transfer_params=PINNED)
        eventually(lambda: told(agent) == 4, "kept blocks")


def test_old_blocks_are_not_kept(engines: Callable[..., SimulatedEngine], agent: AgentProcess) -> None:
    """Neither of a request that runs across a reset, nor of one whose saves were in flight."""
    engine = engines()
    request = engine.request("a", "p", 4, kv_transfer_params=PINNED)
    engine.matched(request)
    engine.admit(request)
    engine.step((request, request.num_tokens))
    engine.scheduler.reset()
    engine.save("b", "p", 4, 2)
    assert agent.status()["blocks_stored"] == 4
    engine.scheduler.finished(request, normally=True)
    engine.quiet()
    assert told(agent) == 0


def test_many_blocks_are_told_with_several_messages() -> None:
    hashes = [i.to_bytes(4, "big") for i in range(8193)]
    todo, own = (m.HintAction("a", m.Action.PIN, ms=5),), {hashes[1], hashes[8192]}
    about = m.Hint(7, "s", m.Finish.STOP, 3, todo, ())
    parts = list(hints(about, [[], hashes], {(1, key) for key in own}))
    assert [(one.req, one.session, one.finish, one.output, one.actions) for one in parts] == [(7, "s", 1, 3, todo)] * 2
    first, second = (one.chains[0] for one in parts)
    assert (first.group, first.hashes, first.own) == (1, b"".join(hashes[:8192]), b"\2" + bytes(1023))
    assert second == m.HintChain(1, 4, hashes[8192], b"\1")
    assert list(hints(about, [[]], None)) == []


def test_an_engine_on_several_nodes_takes_no_hints() -> None:
    hinted = Hints(1.0, nodes=2)
    side = side_of(Switches(hinted, transfers=False), hinted)
    tracked = seen(side, {"kvagent.hints": [{"id": "a", "action": "kv.fetch", "from": "there:1"}]})
    assert tracked.asking.terms == USUAL
    (receipt,) = hinted._told[tracked].receipts
    assert (receipt["id"], receipt["state"], receipt["reason"]) == ("a", "rejected", "the engine is on several nodes")
