"""The real engine on the CPU with vLLM's own offloading and the agent as its secondary tier.

vLLM's worker refuses to offload on a CPU in all versions ("only supported on CUDA-alike and XPU
GPUs"), so its copies are played; model, engine, scheduler, tiering and the tier are real.
"""

from __future__ import annotations

import os
import random
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import eventually
from tests.vllm import engine as real
from tests.vllm.engine import BLOCK, PROMPTS, WHOLE_BLOCKS
from tests.vllm.routers import Subscribed
from tests.vllm.test_engine_events import events_config, other_prompts
from tests.vllm.test_tier_events import Chunks
from tests.vllm.tiered import AT_ONCE, PlayedWorker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine
TIER = {
    "type": "KVAgentTier", "module_path": "kvagent.vllm.tier", "lookup_age_ms": 10_000, "start_wait_ms": 20_000,
    "weights_fixed": True,
}  # fmt: skip


class AtOnce(PlayedWorker):
    """Copies as soon as it is asked: a CPU's kernels have run by then."""

    def __init__(self, **given: Any) -> None:
        super().__init__(random.Random(0), AT_ONCE, **given)

    def get_finished(self) -> list[Any]:
        self.progress()
        return super().get_finished()


@pytest.fixture(scope="module")
def routers() -> Iterator[Subscribed]:
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        made = Subscribed(f"ipc://{folder}/events", ("STORAGE",))
        yield made
        made.close()


@pytest.fixture(scope="module")
def llm(opt: Path, reference: list[list[int]], node: AgentProcess, routers: Subscribed) -> Iterator[Any]:
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_offload.tiering import spec

    from kvagent.vllm import register
    from tests.vllm import kernels

    def get_worker(self: Any, caches: Any) -> Any:
        if self._worker is None:
            self._worker = self.create_worker(caches)
        return self._worker

    kernels.install()
    register()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "CPUOffloadingWorker", AtOnce)
        patch.setattr(spec.TieringOffloadingSpec, "get_worker", get_worker)
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8 << 20,
                "secondary_tiers": [TIER | {"socket_dir": str(node.folder)}],
            },
        )  # fmt: skip
        made = LLM(
            model=str(opt), skip_tokenizer_init=True, load_format="safetensors", dtype="float32", enforce_eager=True,
            kv_cache_memory_bytes=16 << 20, max_model_len=1024, kv_transfer_config=transfer, block_size=BLOCK,
            disable_log_stats=True, kv_events_config=events_config(routers.endpoint),
        )  # fmt: skip
        yield made
        made.llm_engine.engine_core.shutdown()


def manager(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager


def forget(llm: Any) -> None:
    """Forget the KV cache and the offload region, once all is stored."""
    real.settle(llm)
    assert llm.reset_prefix_cache(reset_connector=True)


def loaded(llm: Any) -> int:
    """Return how many chunks the agent's tier has loaded."""
    return int(manager(llm).secondary_tiers[0]._counts.loaded)


def joined(llm: Any, node: AgentProcess) -> None:
    courier = manager(llm).secondary_tiers[0]._courier
    eventually(lambda: courier.loading and courier.saving, "the tier at the agent")


def test_answers_are_the_same_cold_warm_and_without_the_agent(
    llm: Any, reference: list[list[int]], node: AgentProcess
) -> None:
    joined(llm, node)
    assert real.generate(llm, PROMPTS) == reference
    forget(llm)
    assert real.generate(llm, PROMPTS) == reference
    warm = loaded(llm)
    print(f"tier: {warm} chunks loaded, of {WHOLE_BLOCKS} whole blocks")
    assert warm * 2 >= WHOLE_BLOCKS
    forget(llm)
    node.kill()
    try:
        assert real.generate(llm, PROMPTS) == reference
        assert loaded(llm) == warm
        forget(llm)
    finally:
        node.start()
    joined(llm, node)
    assert real.generate(llm, PROMPTS) == reference
    forget(llm)
    assert real.generate(llm, PROMPTS) == reference
    assert loaded(llm) > warm
    assert not manager(llm)._jobs


def test_routers_agree_with_the_agent(llm: Any, node: AgentProcess, routers: Subscribed) -> None:
    seed = int(os.environ.get("KVAGENT_SEED", random.randrange(1 << 30)))
    print(f"KVAGENT_SEED={seed}")
    dice = random.Random(seed)
    joined(llm, node)
    others = other_prompts()
    while not routers.hear():  # until they are subscribed, each new block is told in vain
        real.generate(llm, [next(others)], 1)
    forget(llm)  # so that all is told again
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    chunks = Chunks(connector, block=BLOCK)

    def until(check: Any, what: str) -> None:
        def look() -> bool:
            llm.llm_engine.step()
            routers.hear()
            return bool(check())

        eventually(look, what, 60.0)

    for end in (False, True, False):
        for _ in range(3):
            prompts = [dice.choice(PROMPTS)[: dice.randint(1, 6) * BLOCK] + [dice.randrange(20, 420)] * BLOCK]
            real.generate(llm, prompts, dice.randint(1, 2 * BLOCK))
            real.settle(llm)
            until(lambda: chunks.credited(routers) == chunks.held(), "routers that agree with the agent")
            routers.check()
            assert routers.known
        if end:
            node.kill()
            until(lambda: not routers.known, "routers that know of the agent's end")
            node.start()
            joined(llm, node)
        forget(llm)
    assert routers.clears >= 3
    assert routers.removes
    print(f"tier: {routers.stores} stores, {routers.removes} removes")
