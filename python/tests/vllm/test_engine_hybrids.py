"""Real engines whose models have several kinds of layers: states, sliding windows, chunks.

Each has the output of an engine without the connector, cold, warm, preempted, as a second engine
and while its agent is killed, and loads what it saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm import engine as real
from tests.vllm import models
from tests.vllm.agents import figures
from tests.vllm.engine import PROMPTS
from tests.vllm.test_engine_kinds import at_rest, engine

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine

OF_KIND: dict[str, dict[str, Any]] = {
    "states": {},
    "sliding window": {},
    "chunks": {"disable_hybrid_kv_cache_manager": False},
}
FEW = 30  # blocks, so that requests are preempted


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: models.write(kind, folder / kind.split()[0]) for kind in models.KINDS}


@pytest.mark.parametrize("kind", OF_KIND)
def test_every_engine_says_the_same(
    written: dict[str, Path], node: AgentProcess, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1")
    model, more = written[kind], OF_KIND[kind]
    llm = real.make_engine(model, None, **more)
    reference = real.generate(llm, PROMPTS)
    llm.llm_engine.engine_core.shutdown()
    assert len({tuple(said) for said in reference}) == len(reference), "outputs that do not depend on the prompt"

    with engine(model, node, **more) as llm:
        side, _ = real.sides(llm)
        specs = [type(one.kv_cache_spec).__name__ for one in side_config(llm).kv_cache_groups]
        assert len(set(specs)) == 2, specs
        assert real.generate(llm, PROMPTS) == reference, "cold"
        real.settle(llm)
        llm.reset_prefix_cache()
        assert real.generate(llm, PROMPTS) == reference, "warm"
        warm = side.counts.tokens_loaded
        assert warm * 2 >= sum(len(p) - 1 for p in PROMPTS), f"{warm} tokens loaded"
        assert side.counts.loads_failed == 0
        at_rest(llm)
        print(f"{kind}: {specs}, {warm} tokens loaded; {figures(node)}; {side.counted()}")

    with engine(model, node, num_gpu_blocks_override=FEW, max_model_len=512, **more) as llm:
        side, _ = real.sides(llm)
        assert real.generate(llm, PROMPTS) == reference, "a second engine"
        assert side.counts.tokens_loaded > 0
        long = real.generate(llm, PROMPTS, 100)
        llm.reset_prefix_cache()
        assert real.generate(llm, PROMPTS, 100) == long, "preempted"
        at_rest(llm)
        print(f"{kind}, few blocks: {side.counted()}")


def side_config(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
