"""Real engines of other kinds: with drafts, chunked prompts, no prefix cache, other block sizes.

Cold and warm, each has the output of an engine without the connector, and loads what it saved.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm import engine as real
from tests.vllm.agents import figures
from tests.vllm.drafter import Drafter
from tests.vllm.engine import PROMPTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine


@contextlib.contextmanager
def engine(opt: Path, agent: AgentProcess, **more: Any) -> Iterator[Any]:
    llm = real.make_engine(opt, str(agent.folder), **more)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def grew(agent: AgentProcess, what: str, before: dict[str, Any]) -> int:
    return int(agent.status()[what]) - int(before[what])


def at_rest(llm: Any) -> None:
    """Return whether the engine is idle with nothing pinned; one without a prefix cache has all its
    blocks free.
    """
    side, worker = real.sides(llm)
    real.settle(llm)
    assert not worker.busy()
    assert (side.blocks.saving, side.blocks.loading) == (0, 0)
    assert side.blocks.pool.get_num_free_blocks() == side.blocks.pool.num_gpu_blocks - 1


KINDS: dict[str, dict[str, Any]] = {
    "drafts": {
        "speculative_config": {
            "method": "custom_class", "model": "tests.vllm.drafter.Drafter", "num_speculative_tokens": 3,
        },
    },
    "chunks": {"max_num_batched_tokens": 40, "max_num_seqs": 8},
    "without a prefix cache": {"enable_prefix_caching": False},
    "blocks of 64": {"block_size": 64},
    "blocks of 128": {"block_size": 128},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_cold_and_warm(
    opt: Path, node: AgentProcess, reference: list[list[int]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drafter, "says", {tuple(p): r for p, r in zip(PROMPTS, reference, strict=True)})
    monkeypatch.setattr(Drafter, "taken", Counter())
    before = node.status()
    with engine(opt, node, **KINDS[kind]) as llm:
        side, _ = real.sides(llm)
        assert real.generate(llm, PROMPTS) == reference
        real.settle(llm)
        assert grew(node, "blocks_stored", before) > 0 or side.counts.tokens_loaded > 0
        llm.reset_prefix_cache()
        assert real.generate(llm, PROMPTS) == reference
        warm = side.counts.tokens_loaded
        assert warm * 2 >= sum(len(p) - 1 for p in PROMPTS) or kind == "blocks of 128", f"{warm} tokens loaded"
        assert warm > 0
        # Of three drafts one is wrong: the model's own token stands in its place.
        assert max(Drafter.taken, default=0) == (3 if kind == "drafts" else 0)
        at_rest(llm)
        print(f"{kind}: {Drafter.taken}, {warm} tokens loaded; {figures(node)}; {side.counts}")


def test_requests_of_all_kinds(opt: Path, node: AgentProcess, reference: list[list[int]]) -> None:
    """Several answers to a prompt, probabilities of the prompt, salts."""
    from vllm import SamplingParams

    def said(llm: Any, params: SamplingParams, salt: str = "") -> list[list[list[int]]]:
        asked = [{"prompt_token_ids": p} | ({"cache_salt": salt} if salt else {}) for p in PROMPTS]
        results = llm.generate(asked, params, use_tqdm=False)
        assert params.prompt_logprobs is None or all(
            len(r.prompt_logprobs) == len(p) for r, p in zip(results, PROMPTS, strict=True)
        )
        return [[list(one.token_ids) for one in result.outputs] for result in results]

    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "detokenize": False}
    greedy, thrice = SamplingParams(temperature=0.0, **common), SamplingParams(n=3, top_k=1, seed=1, **common)
    with engine(opt, node) as llm:
        side, _ = real.sides(llm)
        for params, salt, times in (
            (thrice, "", 3), (thrice, "", 3),
            (greedy, "one", 1), (greedy, "two", 1), (greedy, "one", 1),
            (SamplingParams(temperature=0.0, prompt_logprobs=1, **common), "", 1),
        ):  # fmt: skip
            loaded = side.counts.tokens_loaded
            assert said(llm, params, salt) == [[one] * times for one in reference]
            print(f"{times} answers, salt {salt!r}: {side.counts.tokens_loaded - loaded} tokens loaded")
            assert not (params.prompt_logprobs and side.counts.tokens_loaded > loaded), (
                "it needs all its tokens computed"
            )
            llm.reset_prefix_cache()
        at_rest(llm)


def test_a_producer_and_a_consumer(opt: Path, node: AgentProcess, reference: list[list[int]]) -> None:
    size = {"block_size": 96}  # no other engine's blocks
    before = node.status()
    with engine(opt, node, kv_role="kv_producer", **size) as producer:
        assert real.generate(producer, PROMPTS) == reference
        at_rest(producer)
    stored = grew(node, "blocks_stored", before)
    assert stored > 0
    with engine(opt, node, kv_role="kv_consumer", **size) as consumer:
        side, _ = real.sides(consumer)
        assert real.generate(consumer, PROMPTS) == reference
        assert side.counts.tokens_loaded > 0
        assert side.counts.saves_planned == 0
        at_rest(consumer)
    assert grew(node, "blocks_stored", before) == stored
