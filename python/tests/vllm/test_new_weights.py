"""Weights that change in place, in the real schedulers and drivers: every rank switches to the new
identity.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.weight_changes import PRIVATE
from tests.agent import eventually
from tests.vllm.setting import BLOCK
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess

PROMPT = [i % 400 + 5 for i in range(100)]
WHOLE = 96 // BLOCK
KINDS: list[dict[str, Any]] = [
    {"v2": True},
    {"v2": False, "ranks": 2},
    {"v2": True, "ranks": 2, "asynchronous": True, "depth": 2},
]


def serve(world: World, name: str, prompt: list[int] = PROMPT) -> int:
    """Run a request past the engine's own cache, and check its every position. Return its hits."""
    eventually(lambda: there(world), "an engine that is registered")
    assert world.scheduler.reset_prefix_cache()
    before = world.side.counts.tokens_loaded
    world.add(name, prompt, 10)
    world.run()
    assert not world.gpu.bad, world.gpu.bad[:3]
    sequence = world.sequences[name]
    assert world.outputs[name] == sequence.tokens[len(prompt) : len(prompt) + 10]
    return int(world.side.counts.tokens_loaded - before)


def there(world: World) -> bool:
    """Run a step. Return whether all parts of an engine are registered."""
    world.step()
    world.settle()
    links = [world.side.agent._link, *(worker._worker._link for worker in world.workers)]
    return world.side.agent.session is not None and all(link.current() is not None for link in links)


def alone(world: World) -> bool:
    """Run a step. Return whether an engine has noticed that its agent is gone."""
    world.step()
    world.settle()
    links = [world.side.agent._link, *(worker._worker._link for worker in world.workers)]
    return all(link.current() is None for link in links)


def generations(agent: AgentProcess) -> set[str]:
    return {engine["identity"]["generation"] for engine in agent.status()["engine_list"]}


@pytest.mark.parametrize("kind", KINDS)
def test_an_updated_engine_and_one_of_the_old_weights_share_nothing(
    worlds: Any, agent: AgentProcess, kind: dict[str, Any]
) -> None:
    first, second = worlds(**kind), worlds(**kind)
    assert serve(first, "old") == 0
    assert serve(second, "hit") == 96, "equal engines share"
    assert first.retrain(named=False)
    assert serve(first, "new") == 0
    assert serve(first, "own") == 96, "an engine of new weights hits its own blocks"
    other = [token + 1 for token in PROMPT]
    assert serve(second, "other", other) == 0
    assert serve(first, "not the other's", other) == 0
    assert serve(second, "still") == 96
    assert generations(agent) == {"", first.side.generations.now}
    assert first.side.generations.now.startswith(PRIVATE)
    agent.kill()
    for world in (first, second):
        eventually(partial(alone, world), "an engine that saw the agent go")
    agent.start()
    assert serve(second, "old again") == 0
    assert serve(first, "after the agent's restart") == 0
    assert serve(first, "own again") == 96
    assert second.retrain()
    assert first.retrain()  # to a version that the second never had
    assert serve(second, "named") == 0
    assert serve(first, "of another name") == 0
    clean(first, agent, second)


@pytest.mark.parametrize("kind", KINDS)
def test_versions_of_one_name_are_shared(worlds: Any, agent: AgentProcess, kind: dict[str, Any]) -> None:
    first, second = worlds(**kind), worlds(**kind)
    serve(first, "old")
    assert first.retrain()
    assert serve(first, "new") == 0
    assert second.retrain()
    assert serve(second, "hit") == 96
    third = worlds(extra={"weights_version": "1"}, **kind)
    third.gpu.weights = 1
    assert serve(third, "named at its start") == 96
    clean(first, agent, second, third)


def test_a_plain_reset_keeps_the_identity(worlds: Any, agent: AgentProcess) -> None:
    first, second = worlds(extra={"weights_fixed": True}), worlds()
    serve(first, "cold")
    assert first.scheduler.reset_prefix_cache(reset_connector=True)
    assert serve(first, "forgotten") == 0
    assert serve(second, "hit") == 96
    assert generations(agent) == {""}
    clean(first, agent, second)


def test_a_process_that_disagrees_is_put_right_by_the_scheduler(worlds: Any, agent: AgentProcess) -> None:
    """Its environment may differ, for example, so that it considers its weights private and is
    refused.
    """
    world = worlds(ranks=2)
    side = world.workers[1]._worker
    side.generation = PRIVATE + 32 * "0"
    link = side._link
    link.renew().close()
    eventually(lambda: link._last_log and not link.current(), "a rank that is refused")
    assert serve(world, "cold") == 0
    assert serve(world, "warm") == 96
    clean(world, agent)


def test_calls_through_the_engine_core_change_the_identity(model: Path, agent: AgentProcess) -> None:
    """The connector patches vLLM's engine core to notify its scheduler's side."""
    from types import SimpleNamespace

    from vllm.v1.engine.core import EngineCore

    world = World(model, str(agent.folder))
    try:
        serve(world, "old")
        core = EngineCore.__new__(EngineCore)
        core.scheduler = world.scheduler
        core.model_executor = SimpleNamespace(collective_rpc=lambda *_: ["done"])
        assert core.collective_rpc("compute_weight_checksums") == ["done"]
        assert serve(world, "hit") == 96
        assert core.collective_rpc("update_weights") == ["done"]
        world.gpu.weights += 1
        private = world.side.generations.now
        assert private.startswith(PRIVATE)
        assert serve(world, "new") == 0
        assert serve(world, "own") == 96
        core.set_weight_version("v1")
        assert world.side.generations.now == "named:v1"
        assert core.get_weight_version() == "v1"
        assert serve(world, "named") == 0
        assert serve(world, "own named") == 96
        clean(world, agent)
    finally:
        world.close()


def test_a_version_speaks_for_one_reset(worlds: Any, agent: AgentProcess) -> None:
    world = worlds()
    assert world.retrain()
    assert world.side.generations.now == "named:1"
    assert world.retrain(named=False)
    assert world.side.generations.now.startswith(PRIVATE), "new weights have the name of the reset before"
    clean(world, agent)


def test_a_save_that_was_planned_before_the_change_is_not_stored_after_it(worlds: Any, agent: AgentProcess) -> None:
    """No vLLM delivers a plan so late, but a job names its space anyway."""
    world = worlds()
    worker, planned = world.workers[0]._worker, []
    end = worker.end

    def seen(plan: Any) -> None:
        planned.extend(plan.saves)
        end(plan)

    worker.end = seen
    serve(world, "cold")
    assert planned
    assert world.retrain(named=False)
    eventually(lambda: there(world), "an engine that is registered")
    before = agent.status()["blocks_saved"]
    worker.submit(planned[0], worker.step)
    eventually(lambda: there(world) and not worker.busy(), "the end of that save")
    assert agent.status()["blocks_saved"] == before, "what was planned before goes out under the new identity"
    clean(world, agent)


def test_a_registration_in_flight_is_not_used(
    worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent takes a while for it, and the weights change meanwhile."""
    import threading

    from kvagent.session import Session

    world = worlds()
    link = world.workers[0]._worker._link
    register, sent, go = Session.register, threading.Event(), threading.Event()

    def slow(session: Session, registration: Any, timeout_s: float) -> Any:
        answer = register(session, registration, timeout_s)
        sent.set()
        go.wait(20)
        return answer

    monkeypatch.setattr(Session, "register", slow)
    world.workers[0]._worker._add_session(link.renew())
    for session in world.workers[0]._worker._sessions:
        session.shutdown_writing()
    assert sent.wait(20)
    old = world.workers[0]._worker.generation
    assert world.retrain(named=False)
    world.step()
    world.settle()
    assert world.workers[0]._worker.generation != old
    go.set()
    current = eventually(link.current, "a session")
    spaces = {engine["space"]: engine["identity"]["generation"] for engine in agent.status()["engine_list"]}
    assert spaces.get(current.registered.space.hex()) == world.side.generations.now, "a session of the old identity"
    assert serve(world, "new") == 0
    clean(world, agent)


def test_a_contradiction_is_refused_at_the_start(model: Path, agent: AgentProcess) -> None:
    from vllm.config import WeightTransferConfig

    world = World(model, str(agent.folder))
    world.close()
    config = world.config
    config.weight_transfer_config = WeightTransferConfig()
    config.kv_transfer_config.kv_connector_extra_config = {"socket_dir": str(agent.folder), "weights_fixed": True}
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    with pytest.raises(ValueError, match="weights_fixed: true, allowed is false where weight_transfer_config is set"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, world.kv)
