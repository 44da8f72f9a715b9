"""Long prompts on a busy engine: what finds no room in the saves when a request ends keeps its
turn. Each test prints the share of the prompts' blocks that the agent has in the end.
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
def test_long_prompts_are_saved_to_their_end(worlds: Any, agent: AgentProcess, load: str, asynchronous: bool) -> None:
    """No block is lost without being counted, and none at all where none is evicted. One whose
    save was revoked, and which was evicted then, is counted though the agent may have stored it.
    """
    blocks, size, tokens, requests, arrive = LOADS[load]
    world = worlds(
        blocks=blocks, max_batched=2048, asynchronous=asynchronous, depth=2 if asynchronous else 1,
        extra={"pin_percent": 5, "save_decode": False},
    )  # fmt: skip
    run(world, size, tokens, requests, arrive)
    stored = agent.status()["blocks_stored"]
    share = stored / (requests * size)
    counts = world.side.saves.counts
    print(f"{load}, {'async' if asynchronous else 'sync'}: {share:.3f} of {requests * size} blocks, {counts}")
    assert world.preempted or load != "preempted"
    assert requests * size - counts.missed <= stored <= requests * size
    assert share == 1 or load != "all fit"
    for number in range(requests):
        first = size * BLOCK + 1
        assert world.outputs[f"r{number}"] == world.sequences[f"r{number}"].tokens[first : first + tokens]
    clean(world, agent)


@pytest.mark.parametrize("blocks", [512, 128])
def test_what_waits_for_its_turn_is_served_right(worlds: Any, agent: AgentProcess, blocks: int) -> None:
    """Every block that was saved in its turn is loaded again, and holds what was computed; in an
    engine of two prompts, blocks are evicted while they wait.
    """
    world = worlds(blocks=blocks, max_batched=2048, extra={"pin_percent": 5, "save_decode": False})
    run(world, 60, 2, 8, 4)
    stored, missed = agent.status()["blocks_stored"], world.side.saves.counts.missed
    assert 8 * 60 - missed <= stored <= 8 * 60
    assert bool(missed) == (blocks == 128)
    assert world.scheduler.reset_prefix_cache()
    for number in range(8):
        world.add(f"warm{number}", prompt(number, 60), 2)
        world.run()
    assert missed or world.side.counts.tokens_loaded == 8 * 60 * BLOCK
    for number in range(8):
        assert world.outputs[f"warm{number}"] == world.outputs[f"r{number}"]
    clean(world, agent)


@pytest.mark.parametrize("retrained", [False, True])
def test_what_waits_is_not_saved_after_a_reset(worlds: Any, agent: AgentProcess, retrained: bool) -> None:
    world = worlds(blocks=512, max_batched=2048, extra={"pin_percent": 5})
    world.add("one", prompt(1, 60), 1)
    while not world.side.saves.waits():
        world.step()
    if retrained:
        assert world.retrain()
    else:
        world.settle()
        assert world.scheduler.reset_prefix_cache()
    world.run()
    assert not world.side.saves.waits()
    assert agent.status()["blocks_stored"] < 60
    world.add("again", prompt(1, 60), 1)
    world.run()
    first = 60 * BLOCK + 1
    assert world.outputs["again"] == world.sequences["again"].tokens[first : first + 1]
    clean(world, agent)


def test_an_idle_engine_comes_to_rest_while_the_agent_takes_nothing(worlds: Any, agent: AgentProcess) -> None:
    world = worlds(blocks=512, max_batched=2048, extra={"pin_percent": 5})
    world.add("one", prompt(1, 60), 1)
    while not world.side.saves.waits():
        world.step()
    agent.kill()
    world.run(2_000)
    assert world.free_blocks() == 511
    agent.start()
