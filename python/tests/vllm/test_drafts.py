"""Draft models whose KV depends on the next token, as EAGLE's and MTP's: the scheduler and the
drivers are real, the draft model is a layer of the fake GPU.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from tests.vllm.setting import BLOCK
from tests.vllm.world import clean

if TYPE_CHECKING:
    from tests.agent import AgentProcess

pytestmark = pytest.mark.skipif(
    not hasattr(ActiveKVConnector, "finalize_step"), reason="refused: saves do not wait for the draft model's pass"
)
KINDS: dict[str, dict[str, Any]] = {
    "one group": {"asynchronous": False},
    "a group of its own": {"asynchronous": False, "window": 40},
    "async": {"asynchronous": True, "depth": 2},
    "async, a group of its own": {"asynchronous": True, "depth": 2, "window": 40},
}
HEAD = [i * 7 % 300 + 5 for i in range(3 * BLOCK)]
TURNS = 16  # of random requests, at most: what has to occur depends on the times of answers


def ask(world: Any, name: str, prompt: list[int], tokens: int = 40) -> int:
    """Let a request be answered; return how many tokens it loaded. The engine's own cache is empty
    then.
    """
    before = world.side.counts.tokens_loaded
    world.add(name, prompt, tokens)
    world.run()
    sequence, output = world.sequences[name], world.outputs[name]
    assert output == sequence.tokens[len(prompt) : len(prompt) + tokens]
    assert world.scheduler.reset_prefix_cache()
    return int(world.side.counts.tokens_loaded - before)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_part_after_a_block(worlds: Any, agent: AgentProcess, kind: str) -> None:
    """The last common block has other bytes in the draft model's layer: only those before it are
    shared.
    """
    first, second = (worlds(eagle=True, drafts=3, blocks=128, **KINDS[kind]) for _ in range(2))
    assert ask(first, "cold", [*HEAD, 401, *HEAD]) == 0
    assert ask(second, "parted", [*HEAD, 402, *HEAD]) == 2 * BLOCK
    assert ask(second, "warm", [*HEAD, 401, *HEAD]) == 6 * BLOCK
    assert ask(first, "parted warm", [*HEAD, 402, *HEAD]) == 6 * BLOCK
    assert ask(first, "exact", HEAD) == 2 * BLOCK
    assert first.gpu.rejected > 0
    clean(first, agent, second)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_saved_without_what_was_rejected(worlds: Any, agent: AgentProcess, kind: str) -> None:
    first, second = (worlds(eagle=True, drafts=3, blocks=128, **KINDS[kind]) for _ in range(2))
    ask(first, "cold", HEAD, 100)
    whole = first.sequences["cold"].tokens[: len(HEAD) + 100]
    assert ask(second, "next turn", [*whole, 7, 8, 9]) >= 8 * BLOCK
    clean(first, agent, second)


@pytest.mark.parametrize("kind", KINDS)
def test_random_requests_with_preemptions(worlds: Any, agent: AgentProcess, kind: str) -> None:
    """Prompts part within blocks here: where they part at a block's end, vLLM's own cache gives
    them the draft layer's bytes of each other.
    """
    dice, preempted = random.Random(3), 0
    engines = [worlds(eagle=True, drafts=3, blocks=34, max_batched=40, **KINDS[kind]) for _ in range(2)]
    heads = [[dice.randrange(5, 400) for _ in range(BLOCK * n + 5)] for n in (3, 5, 8)]
    for turn in range(TURNS):
        if turn >= 4 and preempted and engines[1].side.counts.tokens_loaded:
            break
        world = engines[turn % 2]
        for i in range(12):
            tail = [dice.randrange(5, 400) for _ in range(dice.randrange(1, 40))]
            world.add(f"{turn}-{i}", dice.choice(heads) + tail, dice.randrange(1, 60))
            for _ in range(dice.randrange(6)):
                world.step()
        world.run()
        preempted += world.preempted
        assert world.scheduler.reset_prefix_cache()
    assert preempted > 0
    assert engines[1].side.counts.tokens_loaded > 0
    clean(engines[0], agent, engines[1])
    print(f"{kind}: {preempted} preempted, {[one.side.counts.tokens_loaded for one in engines]} tokens loaded")
