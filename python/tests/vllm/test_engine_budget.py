"""The real engine with a budget of the agent's memory that its prompts do not fit: its answers are
the same, and what another engine stored stays.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvagent import messages as m
from tests.agent import BLOCK_BYTES as OTHER_BYTES
from tests.agent import LAYERS as OTHER_LAYERS
from tests.agent import Engine, chain
from tests.test_agent import save
from tests.vllm import engine as real
from tests.vllm.agents import figures
from tests.vllm.engine import BLOCK, HIDDEN, LAYERS, WHOLE_BLOCKS
from tests.vllm.test_engine import Alive

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine
BLOCK_BYTES = LAYERS * 2 * BLOCK * HIDDEN * 4  # keys and values, float32
BUDGET = 8 * BLOCK_BYTES
OTHERS = 8  # blocks of the other engine, which is played


def test_answers_are_the_same_with_a_budget_and_others_keep_theirs(
    opt: Path, reference: list[list[int]], node: AgentProcess
) -> None:
    options = {"weights_fixed": True, "cpu_bytes_to_use_per_rank": BUDGET, "save_decode": False}
    theirs = chain("theirs", OTHERS), list(range(OTHERS))
    with closing(Engine(node, "other")) as other:
        assert save(other, *theirs, salt=1) == bytes(OTHERS)
        llm = real.make_engine(opt, str(node.folder), options=options)
        alive = Alive(llm, node)
        try:
            alive.joined()
            for run in ("cold", "warm"):
                before = alive.side.counts.tokens_loaded
                assert alive.says() == reference, run
                alive.forget()
                loaded = (alive.side.counts.tokens_loaded - before) // BLOCK
                pool = node.status()["pool"]
                owner = next(one for one in pool["owners"]["list"] if one["budget_bytes"])
                print(f"{run}: {loaded} of {WHOLE_BLOCKS} whole blocks loaded; {owner}; {figures(node)}")
                assert owner["bytes"] <= owner["budget_bytes"] == BUDGET
            assert owner["evicted"] + owner["refused"] > 0, "the budget was not reached"
            assert pool["used_bytes"] == owner["bytes"] + OTHERS * OTHER_LAYERS * OTHER_BYTES
        finally:
            llm.llm_engine.engine_core.shutdown()
        assert save(other, *theirs, salt=1) == bytes([m.BlockStatus.EXISTS] * OTHERS)
