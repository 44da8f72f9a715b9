"""Real schedulers and worker drivers of engines with other tensor parallel sizes share blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.setting import BLOCK

if TYPE_CHECKING:
    from tests.agent import AgentProcess

PROMPTS = [[(i * (7 + n)) % 450 + 10 for i in range(90 + 40 * n)] for n in range(4)]
BLOCKS = 512  # so many that all blocks of the prompts may be pinned by saves at once
SHARED = {"weights_version": "same", "share_tp": 2}


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLHNC", "BLNHC", "LHBNC", "BHLNC"])
@pytest.mark.parametrize("window", [0, 48])
def test_ranks_of_any_number_share(worlds: Any, layout: str, window: int) -> None:
    common = {"layout": layout, "window": window, "split": True, "extra": SHARED, "blocks": BLOCKS}
    two, one = worlds(ranks=2, **common), worlds(ranks=1, **common)
    for saver, loader, prompts in ((two, one, PROMPTS[:2]), (one, two, PROMPTS[2:])):
        loaded = loader.side.counts.tokens_loaded
        for world in (saver, loader):
            for i, prompt in enumerate(prompts):
                world.add(f"{i} of {len(prompt)}", prompt, 4)
            world.run()
            assert world.gpu.bad == []
        assert loader.side.counts.tokens_loaded > loaded, "nothing was loaded that the other shape saved"
    assert two.gpu.checked > 0


def test_tp_8_with_pp_4_loads_what_another_engine_saved(worlds: Any, agent: AgentProcess) -> None:
    """Every one of the 32 ranks has a shard of its own, with bytes of its own."""
    common = {"ranks": 32, "stages": 4, "extra": {"weights_version": "same"}, "blocks": BLOCKS}
    saver, loader = worlds(**common), worlds(**common)
    for world in (saver, loader):
        for i, prompt in enumerate(PROMPTS[:2]):
            world.add(f"r{i}", prompt, 2)
        world.run()
        assert world.gpu.bad == []
    whole = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS[:2])
    assert loader.side.counts.tokens_loaded == whole
    assert saver.side.counts.tokens_loaded == 0
    assert loader.gpu.checked > 0
    status = agent.status()
    assert status["blocks_loaded"] == 32 * whole // BLOCK
    assert {one["world"] for one in status["engine_list"]} == {32}
