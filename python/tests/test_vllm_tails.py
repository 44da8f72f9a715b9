"""Saves of ended and of preempted requests: what is saved, and what is revoked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

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


def test_the_end_of_a_request_saves_what_there_is_room_for(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines(pin_percent=10.0)  # 6 of 64 blocks
    counts = engine.scheduler.counts
    request = admitted(engine, "a", 20)
    agent.freeze()  # no save is over before it ends
    engine.step((request, request.num_tokens))
    end(engine, request)
    agent.thaw()
    engine.quiet()
    assert (agent.status()["blocks_stored"], counts.saves_missed) == (6, 14)
    request = computed(engine, "b", 9)
    engine.quiet()
    end(engine, request)
    engine.quiet()
    assert (agent.status()["blocks_stored"], counts.saves_missed) == (6 + 9, 14)
    assert engine.scheduler.blocks.saving == 0


def test_a_preemption_revokes_the_saves_of_its_request_alone(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines(pin_percent=40.0)
    one, two = admitted(engine, "a", 4), admitted(engine, "b", 4)
    agent.freeze()
    for request in (one, two):
        engine.step((request, request.num_tokens))
    counts, blocks = engine.scheduler.counts, engine.scheduler.blocks
    assert blocks.saving == 8
    engine.pool.free_blocks(engine.tables["a"])  # by vLLM
    step = engine.step((two, 1), preempted=["a"])
    assert len(step.plan.revokes) == 1
    assert (blocks.saving, counts.saves_revoked) == (4, 4)
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
    for free, saving in ((4, 4), (3, 0)):
        monkeypatch.setattr(engine.pool, "get_num_free_blocks", lambda free=free: free)
        engine.step((request, 1))
        assert blocks.saving == saving
