"""The real engine with lazy offload: its answers equal those without the connector, whether its
blocks are in its own cache, were evicted to the agent, or were lost with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm import agents
from tests.vllm import engine as real
from tests.vllm.agents import figures
from tests.vllm.engine import BLOCK, PROMPTS, WHOLE_BLOCKS
from tests.vllm.middle import EVENTS, SILENT, middle
from tests.vllm.test_engine import Alive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.holding import HoldingAgent

pytestmark = pytest.mark.engine
BLOCKS = 96  # of the engine's cache
OPTIONS = {"weights_fixed": True, "offload": "lazy", "watermark_percent": 25, "pin_percent": 20}


@pytest.fixture(scope="module")
def llm(opt: Path, reference: list[list[int]], holding: HoldingAgent) -> Iterator[Any]:
    made = real.make_engine(
        opt, str(holding.folder), options=OPTIONS, num_gpu_blocks_override=BLOCKS, max_num_batched_tokens=8 * BLOCK
    )
    yield made
    made.llm_engine.engine_core.shutdown()


def evict(llm: Any, salt: int) -> None:
    """Serve other prompts until nothing that was served before is in the engine's own cache.

    Each evicts fewer blocks than the watermark, and the next one waits for its saves.
    """
    for i in range(0, BLOCKS, 10):
        prompt = [(j * 11 + 13 * i + salt) % 450 + 10 for j in range(10 * BLOCK)]
        real.generate(llm, [prompt], 2)
        real.settle(llm)


def test_answers_are_the_same_from_the_cache_from_the_agent_and_without_it(
    llm: Any, reference: list[list[int]], holding: HoldingAgent
) -> None:
    alive = Alive(llm, holding)
    side, counts = alive.side, alive.side.counts
    alive.joined()
    assert real.generate(llm, PROMPTS) == reference
    real.settle(llm)
    assert counts.saves_stored < WHOLE_BLOCKS, "saved at once"
    assert real.generate(llm, PROMPTS) == reference
    assert side.counts.loads == 0, "what is in the engine's own cache is loaded"
    evict(llm, 1)
    assert counts.saves_stored >= WHOLE_BLOCKS
    assert counts.saves_missed == 0
    before = side.counts.tokens_loaded
    assert real.generate(llm, PROMPTS) == reference
    loaded = (side.counts.tokens_loaded - before) // BLOCK
    assert loaded * 2 >= WHOLE_BLOCKS
    print(f"lazy: {loaded} of {WHOLE_BLOCKS} whole blocks of prompts loaded; {figures(holding)}; {side.counts}")


@pytest.mark.stops
@pytest.mark.parametrize("event", EVENTS)
def test_what_happens_to_a_load(llm: Any, reference: list[list[int]], holding: HoldingAgent, event: str) -> None:
    alive, salt = Alive(llm, holding), 7 * EVENTS.index(event) + 5
    counts = alive.side.counts
    alive.joined()
    assert alive.says() == reference
    evict(llm, salt)
    failed, late = counts.loads_failed, counts.loads_late
    with middle(alive, event, "start") as happened:
        assert alive.says() == reference
        assert happened, "nothing was loaded"
        assert (alive.side.blocks.loading > 0) == (event in SILENT), "pins without a fence to come, or none"
        assert alive.says() == reference
    assert alive.says() == reference  # a new agent is offered what requests use from then on
    evict(llm, salt + 1)
    assert counts.loads_late > late if event in SILENT else counts.loads_failed > failed
    loaded = counts.tokens_loaded
    assert alive.says() == reference
    assert counts.tokens_loaded > loaded, "what was computed anew was not saved"


@pytest.mark.stops
def test_an_agent_that_is_killed_while_blocks_are_saved(
    llm: Any, reference: list[list[int]], holding: HoldingAgent
) -> None:
    side, worker = real.sides(llm)
    agents.joined(side, [worker], holding)
    end = worker.end
    gone: list[Any] = []

    def ended(plan: Any) -> None:
        end(plan)
        if plan.saves and not gone:
            gone.append(plan)
            holding.kill()

    worker.end = ended
    client = side.agent.lookups._client
    age_s, client.timeout_s = client.timeout_s, 0.5
    try:
        evict(llm, 2)
        assert gone, "nothing was saved"
        assert real.generate(llm, PROMPTS) == reference
        assert side.blocks.saving == 0
    finally:
        del worker.end
        client.timeout_s = age_s
        holding.start()
    agents.joined(side, [worker], holding)
    assert real.generate(llm, PROMPTS) == reference
    evict(llm, 4)
    before = side.counts.tokens_loaded
    assert real.generate(llm, PROMPTS) == reference
    assert side.counts.tokens_loaded > before
    pool = side.blocks.pool
    real.settle(llm)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
