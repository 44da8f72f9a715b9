"""The real engine with a budget of the agent's memory that its prompts do not fit: its answers are
the same, and what another engine stored stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm import agents
from tests.vllm import engine as real
from tests.vllm.agents import figures
from tests.vllm.engine import BLOCK, HIDDEN, LAYERS, PROMPTS, WHOLE_BLOCKS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine
BLOCK_BYTES = LAYERS * 2 * BLOCK * HIDDEN * 4  # keys and values, float32
BUDGET = 8 * BLOCK_BYTES


def test_answers_are_the_same_with_a_budget_and_others_keep_theirs(
    opt: Path, reference: list[list[int]], node: AgentProcess
) -> None:
    options = {"weights_fixed": True, "cpu_bytes_to_use_per_rank": BUDGET, "save_decode": False}
    llm = real.make_engine(opt, str(node.folder), options=options)
    side, worker = real.sides(llm)
    agents.joined(side, [worker], node)
    try:
        for run in ("cold", "warm"):
            before = side.counts.tokens_loaded
            assert real.generate(llm, PROMPTS) == reference, run
            real.settle(llm)
            (owner,) = node.status()["pool"]["owners"]["list"]
            assert owner["bytes"] <= owner["budget_bytes"] == BUDGET
            loaded = (side.counts.tokens_loaded - before) // BLOCK
            print(f"{run}: {loaded} of {WHOLE_BLOCKS} whole blocks loaded; {owner}; {figures(node)}")
            assert loaded <= BUDGET // BLOCK_BYTES
            assert llm.reset_prefix_cache()
        assert owner["evicted"] + owner["refused"] > 0, "the budget was not reached"
        assert node.status()["pool"]["used_bytes"] == owner["bytes"]
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert real.run_elsewhere(opt, node.folder) == reference
    status = node.status()["pool"]
    (owner,) = status["owners"]["list"]
    assert (owner["open"], owner["bytes"]) == (False, BUDGET), "what the first engine stored was evicted"
    assert status["entries"] >= WHOLE_BLOCKS, "the second engine, which has no budget, stored less"
