"""Real engines with other numbers of pipeline stages share their blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm import engine as real
from tests.vllm.engine import PROMPTS, WHOLE_BLOCKS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine
TWO_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
LEAST = WHOLE_BLOCKS - 2 * len(PROMPTS)  # blocks, if some are computed together
SHARED: dict[str, Any] = {"options": {"weights_fixed": True, "share_pp": 2}}


@pytest.mark.parametrize("first", [True, False], ids=["two stages save", "one stage saves"])
def test_stages_share(opt: Path, agent: AgentProcess, reference: list[list[int]], *, first: bool) -> None:
    shapes: list[dict[str, Any]] = [TWO_STAGES, {}] if first else [{}, TWO_STAGES]
    assert real.run_elsewhere(opt, agent.folder, **shapes[0], **SHARED) == reference
    loaded = agent.status()["blocks_loaded"]
    assert real.run_elsewhere(opt, agent.folder, **shapes[1], **SHARED) == reference
    loaded = agent.status()["blocks_loaded"] - loaded
    workers = 1 if first else 2
    assert loaded >= workers * LEAST, f"{workers} workers loaded {loaded} blocks that the other shape saved"
