"""A real engine over two nodes, with a pipeline stage on each: it loads what both agents have, and
goes on without one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.agent import eventually
from tests.vllm.engine import PROMPTS, WHOLE_BLOCKS
from tests.vllm.over_nodes import OverNodes

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine
PATIENCE_S = 300.0  # for a running engine to serve all prompts several times
LEAST = (WHOLE_BLOCKS - 2 * len(PROMPTS)) * 32  # tokens, if some are computed together


def test_an_engine_over_two_nodes(
    opt: Path, agent: AgentProcess, far: AgentProcess, reference: list[list[int]]
) -> None:
    engine = OverNodes(opt, [agent.folder, far.folder], pipeline_parallel_size=2)

    def loads() -> bool:
        said, loaded = engine.says()
        assert said == reference
        engine.settle()
        return loaded >= LEAST

    def released() -> bool:
        engine.settle()  # what was answered late is released in a step
        return not (agent.status()["leases"] or far.status()["leases"])

    try:
        engine.settle()  # after its start, which takes longest
        eventually(loads, "hits", PATIENCE_S)
        for one in (agent, far):
            assert one.status()["blocks_loaded"] >= LEAST // 32, "a node's ranks have not loaded"
            assert one.status()["regions"] == 2
        for one in (far, agent):
            one.kill()
            said, loaded = engine.says()
            assert (said, loaded) == (reference, 0)
            engine.settle()
            one.start()
            eventually(loads, "hits with the agent that is back", PATIENCE_S)
            one.freeze()
            assert engine.says()[0] == reference
            one.thaw()
            engine.settle()
            eventually(loads, "hits with the agent that goes on", PATIENCE_S)
        eventually(released, "the end of all leases", PATIENCE_S)
    finally:
        engine.close()
    eventually(lambda: not (agent.status()["regions"] or far.status()["regions"]), "the end of its memory")
