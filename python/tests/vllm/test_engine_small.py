"""The real engine with too few blocks: requests are preempted while their blocks are saved and
loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm import engine as real
from tests.vllm.agents import figures
from tests.vllm.engine import PROMPTS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine
ROUNDS = 3  # one cold, others warm


def test_too_few_blocks(opt: Path, node: AgentProcess, reference: list[list[int]]) -> None:
    llm = real.make_engine(opt, str(node.folder), num_gpu_blocks_override=34)
    side, _ = real.sides(llm)
    preempted = real.preemptions(llm)
    try:
        rounds = 0
        while rounds < ROUNDS or not preempted:
            assert rounds < 4 * ROUNDS, "no preemption in all of them"
            assert real.generate(llm, PROMPTS) == reference
            real.settle(llm)
            rounds += 1
            # Requests with answers of different length do not crowd each other out: the reset makes
            # all cold again.
            llm.reset_prefix_cache(reset_connector=rounds >= ROUNDS and not preempted)
        print(f"{len(preempted)} preemptions; {figures(node)}; {side.counts}")
        assert preempted
        assert node.status()["blocks_loaded"] > 0
    finally:
        llm.llm_engine.engine_core.shutdown()
