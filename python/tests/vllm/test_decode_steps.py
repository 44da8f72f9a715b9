"""Decode steps of the real scheduler and the real worker's driver reach the agent."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import AgentProcess, eventually
from tests.vllm.test_failures import PROMPT

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = [7 + i % 400 for i in range(600)]  # three steps compute it
UNASKED = {"kvagent.load": False}  # else it begins when the agent has answered, perhaps after all other requests


@pytest.mark.parametrize("more", [{}, {"asynchronous": True, "depth": 2}, {"drafts": 2}])
def test_decode_steps(worlds: Callable[..., Any], agent: AgentProcess, more: dict[str, Any]) -> None:
    world = worlds(**more)
    told: list[tuple[int, int]] = []  # of each step with tokens: its requests, and how many decode
    plan = world.side.plan

    def kept(output: Any) -> Any:
        one = plan(output)
        if output.num_scheduled_tokens:
            told.append((len(output.num_scheduled_tokens), one.decoding))
        return one

    world.side.plan = kept
    world.add("a", PROMPT, 60, params=UNASKED)
    while len(world.outputs["a"]) < 9:
        world.step()
    assert told[0] == (1, 0), "the step that computes a prompt"
    alone = len(told)
    assert told[1:] == [(1, 1)] * (alone - 1)
    world.add("b", LONG, 20, params=UNASKED)
    while not world.outputs["b"]:
        world.step()
    assert [one for one in told[alone:] if one[0] == 2][:3] == [(2, 0)] * 3, "a chunk of a prompt beside decode"
    world.run()
    assert (2, 2) in told
    assert told[-1] == (1, 1)

    def steps() -> int:
        (cpu,) = agent.status()["paces"]
        return int(cpu["steps_alone"] + cpu["steps_beside"] + cpu["steps_other"])

    both = sum(one == two == (1, 1) or one == two == (2, 2) for one, two in itertools.pairwise(told))
    eventually(lambda: both - 8 <= steps() <= len(told), "the reports of most decode steps")
