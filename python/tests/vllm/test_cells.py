"""Real schedulers and worker drivers of engines with other tensor parallel sizes share blocks."""

from __future__ import annotations

from typing import Any

import pytest

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
        if loader.side._may_load:  # vLLM 0.29 with several groups only saves
            assert loader.side.counts.tokens_loaded > loaded, "nothing was loaded that the other shape saved"
    assert two.gpu.checked > 0
