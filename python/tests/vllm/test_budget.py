"""Engines with a budget of the agent's memory, beside engines without one: the schedulers and
drivers of vLLM, and the real agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import eventually
from tests.vllm.setting import BLOCK
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from tests.agent import AgentProcess

TOKENS = 100
PER_PROMPT = TOKENS // BLOCK


def prompt(i: int) -> list[int]:
    return [(j * 7 + 31 * i) % 400 + 5 for j in range(TOKENS)]


def ask(world: World, name: str, i: int) -> int:
    """Run a request of one new token. Return the tokens of its prompt that it loaded."""
    before = int(world.side.counts.tokens_loaded)
    world.add(name, prompt(i), 1)
    world.run()
    assert world.outputs[name] == world.sequences[name].tokens[TOKENS : TOKENS + 1]
    assert not world.gpu.bad, world.gpu.bad[:3]
    return int(world.side.counts.tokens_loaded) - before


def owner(agent: AgentProcess, name: str) -> dict[str, Any]:
    owners: list[dict[str, Any]] = agent.status()["pool"]["owners"]["list"]
    return next((one for one in owners if one["name"] == name), {})


def block_bytes(agent: AgentProcess) -> int:
    """Return the bytes of a stored block, of all ranks."""
    pool = agent.status()["pool"]
    assert pool["used_bytes"] % pool["entries"] == 0
    return int(pool["used_bytes"] // pool["entries"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_keeps_to_its_budget_and_leaves_others_theirs(worlds: Any, agent: AgentProcess, ranks: int) -> None:
    split = {"ranks": ranks, "split": ranks > 1}
    free = worlds(**split)
    for i in range(3):
        ask(free, f"free {i}", i)
    whole = block_bytes(agent)
    budget = 2 * PER_PROMPT * whole // ranks
    capped = worlds(
        extra={"cpu_bytes_to_use_per_rank": budget}, transfer={"engine_id": "capped"}, **split
    )  # fmt: skip
    for i in range(10, 15):
        assert ask(capped, f"own {i}", i) == 0
        assert owner(agent, "capped")["bytes"] <= budget * ranks
    found = owner(agent, "capped")
    assert found["bytes"] == found["budget_bytes"] == 2 * PER_PROMPT * whole
    assert found["evicted"] == 3 * PER_PROMPT
    assert found["refused"] == 0
    later = worlds(**split)
    assert [ask(later, f"free {i}", i) for i in range(3)] == [PER_PROMPT * BLOCK] * 3, "another engine's blocks went"
    assert [ask(later, f"own {i}", i) for i in (14, 13)] == [PER_PROMPT * BLOCK] * 2, "the budget is not used"
    assert ask(later, "gone", 10) == 0, "the oldest is still stored"
    for world in (free, capped, later):
        clean(world, agent)


def test_a_budget_holds_after_the_agent_was_started_again(worlds: Any, agent: AgentProcess) -> None:
    free = worlds()
    ask(free, "free", 0)
    budget = PER_PROMPT * block_bytes(agent)
    clean(free, agent)
    capped = worlds(extra={"cpu_bytes_to_use_per_rank": budget}, transfer={"engine_id": "capped"})
    ask(capped, "first", 10)
    agent.kill()
    agent.start()
    number = 20

    def saved() -> dict[str, Any]:
        nonlocal number
        number += 1
        ask(capped, f"more {number}", number)
        return owner(agent, "capped")

    eventually(lambda: saved().get("evicted"), "a save beyond the budget")
    found = owner(agent, "capped")
    assert (found["bytes"], found["budget_bytes"]) == (budget, budget)
    clean(capped, agent)


def test_with_a_budget_of_less_than_a_block_nothing_is_saved(worlds: Any, agent: AgentProcess) -> None:
    world = worlds(extra={"cpu_bytes_to_use_per_rank": 1, "start_wait_ms": 100})
    ask(world, "uncached", 0)
    assert agent.status()["blocks_stored"] == 0
