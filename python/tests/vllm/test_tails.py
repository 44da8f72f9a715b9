"""Long prompts on a busy engine: what finds no room in the saves when a request ends is not saved,
and counted. Each test prints the share of the prompts' blocks that the agent has in the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.setting import BLOCK
from tests.vllm.world import clean

if TYPE_CHECKING:
    from tests.agent import AgentProcess
    from tests.vllm.world import World

# Blocks of the engine, blocks of each prompt, generated tokens, requests, and requests that arrive
# every fourth step. All prompts fit in the first engine.
LOADS = {
    "all fit": (1024, 60, 2, 16, 2),
    "half as many": (512, 60, 2, 16, 2),
    "decoding": (512, 60, 24, 24, 1),
    "a quarter": (256, 60, 4, 16, 2),
    "preempted": (256, 20, 400, 16, 16),
}


def prompt(number: int, blocks: int) -> list[int]:
    """Return a prompt of so many blocks and a token, which shares no block with another one's."""
    return [number + 5, *((number * 31 + i * 7) % 400 + 5 for i in range(blocks * BLOCK))]


def run(world: World, blocks: int, tokens: int, requests: int, arrive: int) -> None:
    """Serve the requests."""
    left = list(range(requests))
    for step in range(20_000):
        if step % 4 == 0:
            for number in left[:arrive]:
                world.add(f"r{number}", prompt(number, blocks), tokens)
            del left[:arrive]
        if not (left or world.scheduler.has_requests()):
            world.settle()
            return
        world.step()
    raise AssertionError("the engine does not come to rest")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("load", LOADS)
def test_no_block_of_a_long_prompt_is_lost_uncounted(
    worlds: Any, agent: AgentProcess, load: str, asynchronous: bool
) -> None:
    """One whose save was revoked is counted though the agent may have stored it."""
    blocks, size, tokens, requests, arrive = LOADS[load]
    world = worlds(
        blocks=blocks, max_batched=2048, asynchronous=asynchronous, depth=2 if asynchronous else 1,
        extra={"save_decode": False},
    )  # fmt: skip
    run(world, size, tokens, requests, arrive)
    stored = agent.status()["blocks_stored"]
    share = stored / (requests * size)
    counts = world.side.counts
    print(f"{load}, {'async' if asynchronous else 'sync'}: {share:.3f} of {requests * size} blocks, {counts}")
    assert world.preempted or load != "preempted"
    assert requests * size - counts.saves_missed - counts.saves_revoked <= stored <= requests * size
    for number in range(requests):
        first = size * BLOCK + 1
        assert world.outputs[f"r{number}"] == world.sequences[f"r{number}"].tokens[first : first + tokens]
    clean(world, agent)
