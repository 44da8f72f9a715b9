"""The attention backend that vLLM chose: workers see it; the scheduler assumes one and is
corrected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import eventually
from tests.vllm.setting import BLOCK
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from tests.agent import AgentProcess

PROMPT = [i % 400 + 5 for i in range(100)]


def joined_anew(world: World) -> None:
    """Wait until the scheduler is registered in its workers' space."""
    identities = {worker._identity for worker in world.workers}
    assert len(identities) == 1

    def registered() -> bool:
        world.step()
        world.settle()
        session = world.side._agent.session
        return world.scheduler.connector._identity in identities and session is not None

    eventually(registered, "a scheduler of its workers' space")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scheduler_that_supposed_another_backend_joins_its_workers(
    worlds: Any, agent: AgentProcess, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines with one backend share, engines with another do not, though all assume the same."""
    for name in ("EXPECTED", "OTHER"):
        monkeypatch.setattr("kvagent.vllm.worker.calls.used_backends", lambda *_, name=name: name)
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
