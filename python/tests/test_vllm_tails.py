"""Saves of ended and of preempted requests: what is revoked, what keeps its turn, and for how
long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvagent.messages import BlockStatus
from kvagent.vllm.plan import Outcome
from kvagent.vllm.scheduler.saves import RETRY_STEPS
from kvagent.vllm.scheduler.tails import MAX_TRIES
from tests.agent import eventually
from tests.simulated import SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.agent import AgentProcess


@pytest.fixture
def engines(agent: AgentProcess) -> Iterator[Callable[..., SimulatedEngine]]:
    made: list[SimulatedEngine] = []

    def make(name: str = "one", **more: Any) -> SimulatedEngine:
        made.append(SimulatedEngine(agent, name, **more))
        return made[-1]

    yield make
    agent.thaw()
    for engine in made:
        engine.close()


def admitted(engine: SimulatedEngine, name: str, blocks: int, **more: Any) -> Any:
    """Return a request with blocks that vLLM has hashed."""
    request = engine.request(name, name, blocks, **more)
    engine.matched(request)
    engine.admit(request)
    for block, key in zip(engine.tables[name], request.block_hashes, strict=False):
        block.block_hash = key + b"\0\0\0\0"
    return request


def computed(engine: SimulatedEngine, name: str, blocks: int, **more: Any) -> Any:
    """Return a request whose blocks were all computed in one step."""
    request = admitted(engine, name, blocks, **more)
    engine.step((request, request.num_tokens))
    return request


def end(engine: SimulatedEngine, request: Any) -> None:
    """End a request: vLLM frees its blocks."""
    engine.scheduler.finished(request, normally=True)
    engine.pool.free_blocks(engine.tables[request.request_id])


def test_the_rest_of_an_ended_request_is_saved_by_an_idle_engine(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines(pin_percent=10.0)  # 6 of 64 blocks
    end(engine, computed(engine, "a", 20))
    assert engine.scheduler.saves is not None
    assert engine.scheduler.saves.waits()
    assert engine.scheduler.pending()
    engine.quiet()
    assert agent.status()["blocks_stored"] == 20
    assert not engine.scheduler.saves.waits()
    assert engine.scheduler.saves.counts.missed == 0


def test_blocks_that_were_used_again_are_missed_and_counted(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines(pin_percent=10.0)
    end(engine, computed(engine, "a", 20))
    engine.tables["a"][18].block_hash = b"another content"
    engine.tables["a"][19].block_hash = None
    engine.quiet()
    assert agent.status()["blocks_stored"] == 18
    assert engine.scheduler.saves.counts.missed == 2  # type: ignore[union-attr]


def test_a_block_that_was_taken_is_missed_though_its_hash_is_equal(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """Two images may have one identifier, which vLLM hashes; the key is of the content."""
    engine = engines(pin_percent=10.0)
    end(engine, computed(engine, "a", 20))
    free = [block for block in engine.tables["a"][:20] if not block.ref_cnt]
    assert engine.pool.get_new_blocks(3) == free[:3]
    engine.quiet()
    assert agent.status()["blocks_stored"] == 17
    assert engine.scheduler.saves.counts.missed == 3  # type: ignore[union-attr]


def test_a_preemption_revokes_the_saves_of_its_request_alone(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines(pin_percent=40.0)
    one, two = admitted(engine, "a", 4), admitted(engine, "b", 4)
    agent.freeze()
    for request in (one, two):
        engine.step((request, request.num_tokens))
    saves, blocks = engine.scheduler.saves, engine.scheduler.blocks
    assert saves is not None
    assert blocks is not None
    assert blocks.saving == 8
    engine.pool.free_blocks(engine.tables["a"])  # by vLLM
    step = engine.step((two, 1), preempted=["a"])
    assert len(step.plan.revokes) == 1
    assert (blocks.saving, saves.counts.revoked) == (4, 4)
    assert [block.ref_cnt for block in engine.tables["b"][:4]] == [2] * 4
    agent.thaw()
    engine.scheduler.finished(one, normally=False)
    engine.scheduler.finished(two, normally=True)
    engine.quiet()
    assert agent.status()["blocks_stored"] >= 4


def test_pins_of_running_requests_are_released_if_little_else_is_free(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(pin_percent=40.0)
    request = admitted(engine, "a", 4)
    agent.freeze()
    engine.step((request, request.num_tokens))
    blocks = engine.scheduler.blocks
    assert blocks is not None
    for free, saving in ((4, 4), (3, 0)):
        monkeypatch.setattr(engine.pool, "get_num_free_blocks", lambda free=free: free)
        engine.step((request, 1))
        assert blocks.saving == saving


def test_the_saves_of_an_ended_request_that_were_revoked_are_made_again(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines(pin_percent=40.0)
    early, late = admitted(engine, "a", 4), admitted(engine, "b", 4)
    agent.freeze()
    for request in (early, late):
        engine.step((request, request.num_tokens))
    end(engine, early)  # before its save is revoked
    engine.pool.free_blocks(engine.tables["b"])
    saves = engine.scheduler.saves
    assert saves is not None
    saves.revoke()
    most, saves.blocks.max_saving = saves.blocks.max_saving, 0  # no room
    engine.scheduler.finished(late, normally=True)  # after that, and before the report
    assert len(saves.tails.left) == 8  # type: ignore[union-attr]
    saves.blocks.max_saving = most
    agent.thaw()
    engine.quiet()
    assert agent.status()["blocks_stored"] == 8
    assert saves.counts.missed == 0


def test_a_revoked_save_of_blocks_that_a_preemption_took_names_the_new_ones(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """The old blocks hold another content by the time that the request ends."""
    engine = engines(pin_percent=40.0)
    request = admitted(engine, "a", 4)
    agent.freeze()
    engine.step((request, request.num_tokens))
    old = engine.tables.pop("a")
    engine.pool.free_blocks(old)
    assert len(engine.step(preempted=["a"]).plan.revokes) == 1
    for block in old:
        block.block_hash = b"another content"
    new = engine.admit(request)
    assert not {block.block_id for block in new} & {block.block_id for block in old}
    for block, key in zip(new, request.block_hashes, strict=False):
        block.block_hash = key + b"\0\0\0\0"
    engine.fill(request, 9)
    request.num_computed_tokens = request.num_tokens
    assert engine.scheduler.blocks is not None
    engine.scheduler.blocks.max_saving = 0  # no room, so all has to wait for its turn
    end(engine, request)
    noted = engine.scheduler.saves.tails.left  # type: ignore[union-attr]
    assert set(noted) == {block.block_id for block in new[:4]}


def test_what_the_agent_never_takes_is_given_up(
    engines: Callable[..., SimulatedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an idle engine would step for ever."""
    engine = engines(pin_percent=10.0)
    saves = engine.scheduler.saves
    assert saves is not None
    report = saves.report

    def refused(job: int, outcome: Outcome) -> bool:
        return report(job, Outcome(outcome.ranks, bytes([BlockStatus.BUSY]) * len(outcome.statuses)))

    monkeypatch.setattr(saves, "report", refused)
    end(engine, computed(engine, "a", 6))
    for _ in range((MAX_TRIES + 2) * (RETRY_STEPS + 10)):
        engine.step()
    engine.quiet()
    assert not engine.scheduler.pending()
    assert saves.counts.missed == 6


@pytest.mark.parametrize("deliver", [0.0, 20.0])
def test_without_pins_nothing_waits_for_its_turn(engines: Callable[..., SimulatedEngine], deliver: float) -> None:
    """Else an idle engine would step for ever."""
    engine = engines(pin_percent=0.0, deliver_percent=deliver)
    end(engine, computed(engine, "a", 6))
    engine.step()
    assert engine.scheduler.saves is not None
    assert not engine.scheduler.saves.waits()
    assert not engine.scheduler.pending()


def test_nothing_waits_for_its_turn_once_the_engine_is_uncached(engines: Callable[..., SimulatedEngine]) -> None:
    engine = engines(pin_percent=10.0)
    end(engine, computed(engine, "a", 20))
    saves = engine.scheduler.saves
    assert saves is not None
    assert saves.waits()
    engine.scheduler.retire()
    engine.quiet()
    assert not saves.waits()
    engine.pool.get_new_blocks(20)
    assert saves.counts.missed == 0


@pytest.mark.parametrize("params", [{"kvagent.ttl": 5.0}, {"kvagent.save": False}])
def test_blocks_with_a_time_to_live_or_not_to_be_saved_have_no_turn(
    engines: Callable[..., SimulatedEngine], params: dict[str, Any]
) -> None:
    engine = engines(pin_percent=10.0)
    end(engine, computed(engine, "a", 20, kv_transfer_params=params))
    assert not engine.scheduler.saves.waits()  # type: ignore[union-attr]
    engine.quiet()


def until_kept(engine: SimulatedEngine, agent: AgentProcess, blocks: int) -> None:
    """Wait until the agent keeps that many blocks after all that it was told."""
    engine.quiet()
    engine.save("last", "last", 1, 1, kv_transfer_params={"kvagent.pin": 1000})  # told on the same session, later
    eventually(lambda: agent.status()["keep"]["blocks"] == blocks + 1, f"{blocks} kept blocks")


def test_a_block_that_is_saved_in_its_turn_is_kept(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines(pin_percent=10.0)
    end(engine, computed(engine, "a", 20, kv_transfer_params={"kvagent.pin": 1000}))
    again = engine.request("b", "a", 20)  # finds its blocks, and asks for nothing
    engine.tables["b"] = engine.tables["a"]
    engine.pool.touch(engine.tables["b"])
    engine.scheduler.on_new_request(again)
    engine.admit(again)
    again.num_computed_tokens = again.num_tokens
    end(engine, again)
    assert engine.scheduler.saves is not None
    assert engine.scheduler.saves.waits()
    until_kept(engine, agent, 20)
    assert engine.scheduler.counts.keeps_lost == 0


def test_a_block_that_was_found_saved_in_its_turn_is_kept(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """Two requests compute the same prompt, each into blocks of its own."""
    engine = engines(pin_percent=10.0)
    for name in ("a", "b"):
        request = engine.request(name, "a", 20, kv_transfer_params={"kvagent.pin": 1000 if name == "b" else 60})
        engine.matched(request)
        engine.admit(request)
        for block, key in zip(engine.tables[name], request.block_hashes, strict=False):
            block.block_hash = key + b"\0\0\0\0"
        if name == "a":
            engine.step((request, request.num_tokens))
        else:
            request.num_computed_tokens = request.num_tokens
        end(engine, request)
    until_kept(engine, agent, 20)
    assert agent.status()["blocks_stored"] == 21
