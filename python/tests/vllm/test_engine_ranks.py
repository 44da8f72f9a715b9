"""Real engines with other numbers of tensor-parallel ranks share their blocks.

Ranks add their parts of a layer in another order than one rank does, so bytes and tokens are equal
only as far as that goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm import engine as real
from tests.vllm.engine import PROMPTS, WHOLE_BLOCKS

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
SHARED: dict[str, Any] = {"options": {"weights_fixed": True, "share_tp": 2}}
LEAST = WHOLE_BLOCKS - 2 * len(PROMPTS)  # blocks, if some are computed together
CLOSE = 1e-3  # of the KV cache's values, which are of the order of 1 to 100


def alike(said: list[list[int]], expected: list[list[int]]) -> bool:
    """Return whether answers are equal but for one, which may differ after its first tokens."""
    pairs = list(zip(said, expected, strict=True))
    return all(a[:4] == b[:4] for a, b in pairs) and sum(a != b for a, b in pairs) <= 1


def cached(llm: Any) -> dict[bytes, list[torch.Tensor]]:
    """Return what each layer has of each whole block, by the block's hash."""
    core = llm.llm_engine.engine_core.engine_core
    blocks = core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    layers = core.model_executor.driver_worker.worker.model_runner.kv_caches
    ids = {name: next(iter(one)) if isinstance(one, dict) else one.block_id for name, one in blocks.items()}
    return {name: [layer[number].clone() for layer in layers] for name, number in ids.items()}


def run(model: Path, socket_dir: str | None, **more: Any) -> tuple[list[list[int]], dict[bytes, list[torch.Tensor]]]:
    """Return an engine's answers and its KV cache, of one rank in this process."""
    llm = real.make_engine(model, socket_dir, **more)
    said = real.generate(llm, PROMPTS)
    real.settle(llm)
    blocks = cached(llm)
    llm.llm_engine.engine_core.shutdown()
    return said, blocks


@pytest.mark.parametrize("first", [True, False], ids=["two ranks save", "one rank saves"])
def test_ranks_share(opt: Path, agent: AgentProcess, reference: list[list[int]], *, first: bool) -> None:
    """One rank loads of two the bytes that it computes itself, head by head and layer by layer."""
    folder = str(agent.folder)
    _, own = run(opt, None)
    if first:
        assert alike(real.run_elsewhere(opt, agent.folder, **TWO_RANKS, **SHARED), reference)
        loaded = agent.status()["blocks_loaded"]
        said, blocks = run(opt, folder, **SHARED)
        assert len(blocks) == len(own) >= LEAST
        differences = []
        both = blocks.keys() & own.keys()  # but those of an answer that differs
        assert len(both) >= LEAST
        for name in both:
            for number, (got, wanted) in enumerate(zip(blocks[name], own[name], strict=True)):
                differences.append(float((got - wanted).abs().max()))
                assert differences[-1] < CLOSE, f"layer {number} of a block differs by {differences[-1]}"
                assert float(wanted.abs().max()) > 100 * CLOSE, "values that are this small show nothing"
        print(f"{len(both)} blocks of two ranks differ by {max(differences):.1g} at most from those of one")
    else:
        assert run(opt, folder, **SHARED)[0] == reference
        loaded = agent.status()["blocks_loaded"]
        said = real.run_elsewhere(opt, agent.folder, **TWO_RANKS, **SHARED)
    assert alike(said, reference), f"{said}, not {reference}"
    loaded = agent.status()["blocks_loaded"] - loaded
    workers = 1 if first else 2
    assert loaded >= workers * LEAST, f"{workers} workers loaded {loaded} blocks that the other shape saved"
