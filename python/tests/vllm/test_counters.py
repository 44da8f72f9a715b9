"""What the connector counts, as it reaches vLLM with an engine's steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm import connector
from tests.vllm.world import clean

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent import AgentProcess

NEVER_S = 1e9


@pytest.mark.parametrize(
    "kind", [{"v2": False}, {"asynchronous": True, "depth": 3, "ranks": 2}], ids=["v1", "v2-async-deep-ranks"]
)
def test_an_idle_engine_has_exported_all_that_it_counted(
    worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    """Its steps may be over before the interval between two reports is."""
    monkeypatch.setattr(connector, "STATS_INTERVAL_S", NEVER_S)
    world = worlds(**kind)
    exported = [Counter[str]() for _ in range(1 + len(world.workers))]
    for one, counter in zip((world.scheduler.connector, *world.workers), exported, strict=True):
        one.get_kv_connector_stats = _adding(one.get_kv_connector_stats, counter)
    for i in range(3):
        world.add(f"{i}", [(j * 7) % 400 + 5 for j in range(100)], 5)
        world.run()
        assert world.scheduler.reset_prefix_cache()
        counted = [dict(vars(world.side.counts)), *({f"worker_{k}": v for k, v in asdict(w._worker.counts).items()}
                                           for w in world.workers)]  # fmt: skip
        assert exported == [+Counter(one) for one in counted]
    assert exported[0]["tokens_loaded"] > 0
    assert exported[1]["worker_saved"] > 0
    clean(world, agent)


def _adding(call: Callable[[], Any], counter: Counter[str]) -> Callable[[], Any]:
    def added() -> Any:
        stats = call()
        if stats is not None:
            counter.update(stats.data)
        return stats

    return added
