"""The attention backend that vLLM chose: workers see it; the scheduler assumes one and is
corrected.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.geometry import is_state
from kvagent.vllm.space import expected_backends, used_backends
from tests.agent import eventually
from tests.vllm.setting import BLOCK
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from tests.agent import AgentProcess

PROMPT = [i % 400 + 5 for i in range(100)]


def joined_anew(world: World) -> None:
    """Wait until the scheduler is registered in its workers' space, and all of them are there."""
    identities = {worker._identity for worker in world.workers}
    assert len(identities) == 1

    def registered() -> bool:
        world.step()
        world.settle()
        here = world.side.agent.session, *(worker._worker._link.current() for worker in world.workers)
        return world.scheduler.connector._identity in identities and None not in here

    eventually(registered, "a scheduler of its workers' space")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scheduler_that_supposed_another_backend_joins_its_workers(
    worlds: Any, agent: AgentProcess, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines with one backend share, engines with another do not, though all assume the same."""
    for name in ("EXPECTED", "OTHER"):
        monkeypatch.setattr("kvagent.vllm.connector.used_backends", lambda *_, name=name: name)
        monkeypatch.setattr("kvagent.vllm.space.expected_backends", lambda *_: "EXPECTED")
        # Until a step corrects the scheduler, its registration is refused.
        engines = [worlds(ranks=ranks, extra={"start_wait_ms": 100}) for _ in range(2)]
        for world in engines:
            world.add("short", [3] * 4, 2)
            world.run()
            joined_anew(world)
            world.add("first", PROMPT, 4)
            world.run()
        assert [world.side.counts.tokens_loaded for world in engines] == [0, 96 // BLOCK * BLOCK], name
        for world in engines:
            assert {dict(one._identity)["resolved"] for one in (world.scheduler.connector, *world.workers)} == {name}
        clean(engines[0], agent, engines[1])


def test_a_scheduler_supposes_what_the_workers_of_a_hybrid_use(worlds: Any) -> None:
    """Or it would be refused at each start: only the layers of states tell their backend."""
    world = worlds(kind="states", window=BLOCK)
    config, kv = world.config, world.kv
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "MAMBA2_ATTN"))
    states = next(group for group in kv.kv_cache_groups if is_state(group.kv_cache_spec))
    config.compilation_config.static_forward_context[states.layer_names[0]] = layer
    assert used_backends(config, kv, {}) == expected_backends(config, kv)
