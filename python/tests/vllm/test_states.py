"""Models with states: a state is saved at the boundaries that vLLM keeps, and a hit ends at one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.setting import BLOCK
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from tests.agent import AgentProcess

PROMPT = [i % 400 + 5 for i in range(100)]
LAST = 96  # tokens: the last end of a block in it, where vLLM keeps a state
SAVED: dict[str, Any] = {"pin_percent": 50}  # room for a whole request: what has none at its end is not saved


def asked(world: World, name: str, prompt: list[int], tokens: int = 4) -> int:
    """Let an engine without blocks of its own answer. Return how many tokens it loaded."""
    before = world.side.counts.tokens_loaded
    assert world.scheduler.reset_prefix_cache()
    world.add(name, prompt, tokens)
    world.run()
    assert not world.gpu.bad, world.gpu.bad[:5]
    assert world.side.counts.loads_failed == 0
    return int(world.side.counts.tokens_loaded - before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_hit_ends_where_vllm_kept_a_state(worlds: Any, agent: AgentProcess, asynchronous: bool) -> None:
    world = worlds(window=1, kind="states", asynchronous=asynchronous, depth=1 + asynchronous, extra=SAVED)
    assert asked(world, "cold", PROMPT) == 0
    assert asked(world, "warm", PROMPT) == LAST
    assert asked(world, "longer", [*PROMPT[: LAST + 2], *range(60)]) == LAST
    # The other groups have all its blocks, but no step has ended where one of them does.
    assert asked(world, "shorter", [*PROMPT[: LAST - 1], *range(60)]) == 0
    clean(world, agent)


def test_states_after_generated_tokens_are_found(worlds: Any, agent: AgentProcess) -> None:
    world = worlds(window=1, kind="states", dense=True, extra=SAVED)
    assert asked(world, "cold", PROMPT, 80) == 0
    said = PROMPT + world.outputs["cold"]
    assert asked(world, "next", [*said, *range(20)]) == len(said) // BLOCK * BLOCK
    for end in range(LAST + BLOCK, len(said), BLOCK):
        assert asked(world, f"at {end}", [*said[:end], *range(20)]) == end


def test_vllm_keeps_no_states_after_generated_tokens_unless_asked_to(worlds: Any, agent: AgentProcess) -> None:
    world = worlds(window=1, kind="states", extra=SAVED)
    assert asked(world, "cold", PROMPT, 80) == 0
    assert asked(world, "next", [*PROMPT, *world.outputs["cold"]]) == LAST
    clean(world, agent)


def test_only_states_of_prompts_are_saved_where_the_options_say_so(worlds: Any, agent: AgentProcess) -> None:
    world = worlds(window=1, kind="states", dense=True, extra=SAVED | {"save_decode": False})
    assert asked(world, "cold", PROMPT, 80) == 0
    assert asked(world, "next", [*PROMPT, *world.outputs["cold"]]) == LAST
    clean(world, agent)


def test_a_chunk_that_has_begun_is_needed_whole(worlds: Any, agent: AgentProcess) -> None:
    world = worlds(window=64, kind="chunked", extra=SAVED)
    assert asked(world, "cold", PROMPT) == 0
    assert asked(world, "warm", PROMPT) == LAST
    assert asked(world, "shorter", [*PROMPT[:70], *range(60)]) == 64
    clean(world, agent)


@pytest.mark.parametrize("end", ["killed", "frozen"])
def test_an_agent_that_is_gone_costs_no_state(worlds: Any, agent: AgentProcess, end: str) -> None:
    world = worlds(window=1, kind="states", asynchronous=True, depth=2, extra=SAVED | {"load_deadline_ms": 300})
    assert asked(world, "cold", PROMPT) == 0
    assert world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 4)
    while not world.promised["warm"]:
        world.step()
    (agent.kill if end == "killed" else agent.freeze)()
    while "warm" not in world.reasons:
        world.step()
    (agent.start if end == "killed" else agent.thaw)()
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert not world.gpu.bad, world.gpu.bad[:5]
