"""Where vLLM 0.33 is told that the tokens of a hit came from."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.scheduler.loads import sources
from kvagent.vllm.scheduler.requests import Promise
from tests.agent import AgentProcess, eventually
from tests.vllm.setting import BLOCK

if TYPE_CHECKING:
    from tests.vllm.world import World

PROMPT = [i % 400 + 5 for i in range(100)]
LOADED = len(PROMPT) // BLOCK * BLOCK


def hits(world: World) -> dict[str, int]:
    """Serve the prompt, and return what the scheduler counts of it by source."""
    stats = pytest.importorskip("vllm.v1.metrics.stats")
    world.scheduler.connector_prefix_cache_stats = stats.PrefixCacheStats()
    world.add("warm", PROMPT, 4)
    world.run()
    return {
        source.value: tokens for source, tokens in world.scheduler.connector_prefix_cache_stats.hits_by_source.items()
    }


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_the_agents_memory_has_is_of_the_host(worlds: Any, agent: AgentProcess, asynchronous: bool) -> None:
    pytest.importorskip("vllm.v1.metrics.cache_hit_source")
    cold = worlds(asynchronous=asynchronous)
    cold.add("cold", PROMPT, 4)
    cold.run()
    eventually(lambda: agent.status()["blocks_stored"] >= LOADED // BLOCK, "the prompt is stored")
    assert hits(worlds(asynchronous=asynchronous)) == {"host": LOADED}


def test_what_only_the_disk_has_is_of_the_disk(worlds: Any) -> None:
    pytest.importorskip("vllm.v1.metrics.cache_hit_source")
    with tempfile.TemporaryDirectory(prefix="kvagent-") as name:
        folder = Path(name) / "run"
        folder.mkdir(mode=0o700)
        options = ("--pool", "16MiB", "--tier", f"disk:{name}/disk?capacity=64MiB&write=save")
        first = AgentProcess(folder, *options)
        cold = worlds(extra={"socket_dir": str(folder)})
        cold.add("cold", PROMPT, 4)
        cold.run()
        eventually(
            lambda: first.status()["tiers"]["list"][0]["puts_stored"] >= LOADED // BLOCK, "the prompt is on the disk"
        )
        cold.close()
        first.close()
        found, lookups = dict[str, int](), 0
        while lookups != 1:  # usually; what is answered too late is asked again, and then memory has the blocks
            second = AgentProcess(folder, *options)
            assert second.status()["blocks_stored"] == 0
            warm = worlds(extra={"socket_dir": str(folder)})
            warm.side.loads.probe = lambda _: None  # with it the disk may be read before the look-up
            found = hits(warm)
            lookups = second.status()["lookups"]
            warm.close()
            second.close()
        assert found == {"disk": LOADED}


def test_what_another_agent_sent_is_of_a_peer_and_what_is_not_known_is_unspecified() -> None:
    promise = Promise(0, 96, 1, 0.0, disk=32, other=16)
    assert sources(promise, 96, from_peer=False) == {"host": 48, "disk": 32, "external_unspecified": 16}
    assert sources(promise, 96, from_peer=True) == {"p2p": 96}
    assert sources(promise, 20, from_peer=False) == {"host": 0, "disk": 4, "external_unspecified": 16}
    assert sources(None, 20, from_peer=False) == {}
