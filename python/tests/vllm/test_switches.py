"""Switches of single requests: real schedulers and drivers, with a running agent."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import eventually
from tests.clients import some_params
from tests.vllm.setting import BLOCK
from tests.vllm.world import clean

if TYPE_CHECKING:
    from tests.agent import AgentProcess

PROMPT = [i % 400 + 5 for i in range(100)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("v2", [False, True])
def test_each_switch_holds_for_its_request(worlds: Any, agent: AgentProcess, v2: bool, asynchronous: bool) -> None:
    how = {"v2": v2, "asynchronous": asynchronous, "depth": 2 if asynchronous else 1}
    first, second = worlds(**how), worlds(**how)
    first.add("unsaved", PROMPT, 40, params={"kvagent.save": False})
    first.run()
    assert agent.status()["blocks_stored"] == 0
    assert first.side.counts.saves_planned == 0
    first.add("saved", [7, *PROMPT], 40, params={"kvagent": {"load": False}})
    first.run()
    assert agent.status()["blocks_stored"] == 140 // BLOCK
    second.add("unloaded", [7, *PROMPT], 40, params={"kvagent.load": False})
    second.run()
    assert second.side.counts.lookups == second.side.counts.tokens_loaded == 0
    assert first.outputs["unsaved"] == first.sequences["unsaved"].tokens[100:140]
    assert first.outputs["saved"] == first.sequences["saved"].tokens[101:141]
    assert second.outputs["unloaded"] == second.sequences["unloaded"].tokens[101:141]
    clean(first, agent, second)


@pytest.mark.parametrize(("most", "loaded"), [(0, 0), (BLOCK - 1, 0), (2 * BLOCK + 5, 2 * BLOCK), (1000, 96)])
def test_at_most_so_many_tokens_are_loaded(worlds: Any, agent: AgentProcess, most: int, loaded: int) -> None:
    first, second = worlds(), worlds()
    first.add("cold", PROMPT, 1)
    first.run()
    second.add("warm", PROMPT, 20, params={"kvagent.max_load_tokens": most})
    second.run()
    assert second.side.counts.tokens_loaded == loaded
    assert second.outputs["warm"] == second.sequences["warm"].tokens[100:120]
    clean(first, agent, second)


def test_a_bad_switch_fails_no_request(worlds: Any, agent: AgentProcess) -> None:
    world = worlds(blocks=200)  # all of them can be saved at once
    bad: list[dict[str, Any]] = [{"kvagent.save": "no"}, {"kvagent": [1]}, {"kvagent.max_load_tokens": -5}]
    for i, params in enumerate(bad):
        world.add(f"r{i}", [i + 5, *PROMPT], 4, params=params)
    world.run()
    assert world.side.counts.switches_ignored == len(bad)
    for i in range(len(bad)):
        assert world.outputs[f"r{i}"] == world.sequences[f"r{i}"].tokens[101:105]
    assert agent.status()["blocks_stored"] == len(bad) * (104 // BLOCK)
    clean(world, agent)


def test_whatever_clients_send_their_requests_run(worlds: Any, agent: AgentProcess) -> None:
    """Values of every JSON type; test_engine has it in an engine, where a vLLM has one on CPUs."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed} of what clients send")
    dice, world, other = random.Random(seed), worlds(), worlds()
    for i in range(64):
        world.add(f"r{i}", [i % 7 + 5, *PROMPT], 4, params=some_params(dice, i))
        world.step()
    world.run()
    for i in range(64):
        assert world.outputs[f"r{i}"] == world.sequences[f"r{i}"].tokens[101:105]
    assert world.scheduler.connector.errors.counts.errors == 0
    world.add("good", [*PROMPT, 7], 1)
    world.run()
    other.add("warm", [*PROMPT, 7], 1)
    other.run()
    assert other.side.counts.tokens_loaded == 96
    clean(world, agent, other)


def test_a_transfer_comes_before_the_switches(worlds: Any, agent: AgentProcess) -> None:
    prefill = worlds(transfer={"kv_role": "kv_producer", "engine_id": "p"})
    decode = worlds(transfer={"kv_role": "kv_consumer", "engine_id": "d"})
    sends = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    prefill.add("p-0", PROMPT, 1, params=sends | {"kvagent.save": False})
    prefill.run()
    decode.add("d-0", PROMPT, 20, params=prefill.params["p-0"] | {"kvagent.load": False, "kvagent.max_load_tokens": 0})
    decode.run()
    assert decode.side.counts.tokens_loaded == 96
    assert decode.outputs["d-0"] == decode.sequences["d-0"].tokens[100:120]
    assert (prefill.side.counts.switches_ignored, decode.side.counts.switches_ignored) == (1, 2)
    clean(prefill, agent, decode)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_blocks_are_kept_and_dropped_after_the_end(worlds: Any, agent: AgentProcess, asynchronous: bool) -> None:
    world = worlds(asynchronous=asynchronous, depth=2 if asynchronous else 1, extra={"weights_fixed": True})
    world.add("kept", PROMPT, 28, params={"kvagent.hints": [{"action": "kv.pin", "seconds": 1000}]})
    world.add("brief", [9, *PROMPT], 28, params={"kvagent.hints": [{"action": "kv.drop", "seconds": 0.001}]})
    world.run()
    eventually(lambda: agent.status()["hints"]["pinned_blocks"] == 127 // BLOCK, "kept blocks")
    eventually(lambda: agent.status()["hints"]["blocks_dropped"] == 128 // BLOCK, "dropped blocks")
    assert agent.status()["blocks_stored"] == 127 // BLOCK
    assert world.outputs["kept"] == world.sequences["kept"].tokens[100:128]
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    eventually(lambda: agent.status()["hints"]["pinned_blocks"] == 0, "no kept blocks after a reset")
    clean(world, agent)


def test_a_request_that_is_preempted_keeps_its_switches(worlds: Any, agent: AgentProcess) -> None:
    world = worlds()
    world.add("unsaved", PROMPT, 40, params={"kvagent.save": False})
    while len(world.outputs["unsaved"]) < 10:
        world.step()
    world.settle()
    assert world.scheduler.reset_prefix_cache(reset_running_requests=True)
    world.run()
    assert world.preempted > 0
    assert agent.status()["blocks_stored"] == 0
    assert world.outputs["unsaved"] == world.sequences["unsaved"].tokens[100:140]
    clean(world, agent)
