"""Real engines with other layers than full attention: windows, chunks, states, drafts, indexers.

Each has the output of an engine without the connector: cold, warm, as a second engine that preempts
requests, and with its agent killed. It loads what it, or the first engine, has saved. The KV of a
draft does not change the output, so its proposals are compared too. A sparse model's request says
something else after a preemption in an engine without the connector, too, so its second engine has
room for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import eventually
from tests.vllm import engine as real
from tests.vllm import kernels, models, sparse
from tests.vllm.agents import figures
from tests.vllm.engine import PROMPTS
from tests.vllm.test_engine_kinds import at_rest, engine

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine

FULL = "FullAttentionSpec"
OF_KIND: dict[str, tuple[set[str], int | None]] = {
    "mamba": ({"MambaSpec", FULL}, 28),
    "sliding window": ({"SlidingWindowSpec", FULL}, 36),
    "chunks": ({"ChunkedLocalAttentionSpec", FULL}, 36),
    "eagle": ({FULL}, 34),
    "sparse": ({"UniformTypeKVCacheSpecs"}, None),
}
"""The specifications of a model's groups, and so few blocks that its requests are preempted. None:
none is.
"""
MOST_ROUNDS = 100
ORDINARY = {"disable_hybrid_kv_cache_manager": False, "compilation_config": {"custom_ops": ["none"]}}


class Proposals:
    """What a draft proposed after the tokens of a request, in all engines."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], list[int]] = {}
        self.repeated = 0
        self.different: list[str] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Runner

        loads = Runner.load_model

        def load(runner: Any, *given: Any, **named: Any) -> Any:
            made = loads(runner, *given, **named)
            propose = runner.speculator.propose

            def called(batch: Any, *more: Any, **others: Any) -> Any:
                drafts = propose(batch, *more, **others)
                if not others.get("dummy_run"):
                    self._note(runner.req_states, batch, more[4].tolist(), drafts.tolist())
                return drafts

            runner.speculator.propose = called
            return made

        monkeypatch.setattr(Runner, "load_model", load)

    def _note(self, states: Any, batch: Any, sampled: list[int], drafts: list[list[int]]) -> None:
        for row, index in enumerate(batch.idx_mapping_np.tolist()):
            if not sampled[row] or min(drafts[row]) < 0:
                continue  # in the middle of its prompt, or in its last step
            length = int(states.total_len.gpu[index])
            tokens = tuple(states.all_token_ids.gpu[index, :length].tolist())
            before = self.known.setdefault(tokens, drafts[row])
            self.repeated += before is not drafts[row]
            if before != drafts[row]:
                self.different.append(f"after {len(tokens)} tokens {drafts[row]}, before {before}")


def groups() -> set[str]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return {type(one.kv_cache_spec).__name__ for one in get_kv_transfer_group()._config.kv_cache_groups}


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    return Proposals()


def written(
    kind: str, folder: Path, proposals: Proposals, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[str, Any]]:
    """Write a model of a kind. Return it, and the options of its engines."""
    if kind == "sparse":
        sparse.let_sparse_attention_run(monkeypatch, models.LATENT)
        # The scheduler supposes another backend: until a step tells it, the agent refuses it.
        options = {"weights_fixed": True, "start_wait_ms": 100}
        return models.write(kind, folder / "model"), ORDINARY | {"block_size": 64, "options": options}
    if kind != "eagle":
        return models.write(kind, folder / "model"), ORDINARY
    kernels.let_the_second_runner_start(monkeypatch)
    proposals.watch(monkeypatch)
    draft = models.write_draft(folder / "draft")
    speculative = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    return models.write("llama", folder / "model"), ORDINARY | {"speculative_config": speculative}


def join(llm: Any) -> None:
    """Step an engine until its scheduler is in the space of its worker, which may use other
    backends than it supposed.
    """
    side, worker = real.sides(llm)

    def joined() -> bool:
        real.generate(llm, [[5, 6, 7]], 2)
        attached = worker._link.current()
        return attached is not None and side.agent.space == attached.registered.space

    eventually(joined, "a scheduler in the space of its worker", 60.0)


@pytest.mark.parametrize("kind", OF_KIND)
def test_every_engine_says_the_same(
    tmp_path: Path, node: AgentProcess, kind: str, proposals: Proposals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1")
    kernels.let_states_be_kept()
    model, more = written(kind, tmp_path, proposals, monkeypatch)
    specs, few = OF_KIND[kind]
    llm = real.make_engine(model, None, **more)
    reference = real.generate(llm, PROMPTS)
    llm.llm_engine.engine_core.shutdown()
    assert len({tuple(said) for said in reference}) == len(reference), "outputs that do not depend on the prompt"

    with engine(model, node, max_model_len=320, **more) as llm:
        side, _ = real.sides(llm)
        assert groups() == specs
        join(llm)
        assert real.generate(llm, PROMPTS) == reference, "cold"
        real.settle(llm)
        llm.reset_prefix_cache()
        assert real.generate(llm, PROMPTS) == reference, "warm"
        warm = side.counts.tokens_loaded
        assert warm * 2 >= sum(len(p) - 1 for p in PROMPTS), f"{warm} tokens loaded"
        at_rest(llm)
        print(f"{kind}: {warm} tokens loaded; {figures(node)}; {side.counts}")

    with engine(model, node, num_gpu_blocks_override=few, max_model_len=320, **more) as llm:
        side, _ = real.sides(llm)
        join(llm)
        preempted, rounds = real.preemptions(llm), 0
        while not ((preempted or few is None) and side.counts.tokens_loaded):
            rounds += 1
            assert rounds <= MOST_ROUNDS, f"{len(preempted)} preemptions, {dict(vars(side.counts))}"
            assert real.generate(llm, PROMPTS) == reference, "a second engine, preempted"
            real.settle(llm)
            llm.reset_prefix_cache()
        assert bool(preempted) == (few is not None)
        print(f"{kind}, {few} blocks: {rounds} rounds, {len(preempted)} preemptions; {side.counts}")
        node.kill()
        try:
            assert real.generate(llm, PROMPTS) == reference, "the agent killed"
        finally:
            node.start()
    assert not proposals.different
    assert bool(proposals.repeated) == (kind == "eagle")
