"""Prefill and decode engines apart: real schedulers and drivers, with a running agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import eventually
from tests.vllm.setting import BLOCK
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from tests.agent import AgentProcess

PROMPT = [i % 400 + 5 for i in range(100)]
SENDS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
PRODUCER = {"kv_role": "kv_producer", "engine_id": "p"}
CONSUMER = {"kv_role": "kv_consumer", "engine_id": "d"}
EARLY = {"do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "p"}


def ended(agent: AgentProcess, first: World, *others: World) -> None:
    """Check that nothing is left over, at the agent either."""
    clean(first, agent, *others)
    for world in (first, *others):
        assert world.side.blocks.awaited == 0
        assert not world.scheduler.requests
    told = agent.status()["transfers"]
    assert (told["open"], told["complete"]) == (0, 0)


@pytest.mark.parametrize("length", [1, 15, 16, 100, 112])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("v2", [False, True])
def test_a_decode_engine_goes_on_where_a_prefill_engine_ended(
    worlds: Any, agent: AgentProcess, v2: bool, asynchronous: bool, length: int
) -> None:
    how = {"v2": v2, "asynchronous": asynchronous, "depth": 2 if asynchronous else 1}
    prefill, decode = worlds(transfer=PRODUCER, **how), worlds(transfer=CONSUMER, **how)
    prompt = (PROMPT * 2)[:length]
    prefill.add("p-0", prompt, 1, params=SENDS)
    prefill.run()
    params = prefill.params["p-0"]
    assert params["do_remote_prefill"] is True
    decode.add("d-0", prompt, 40, params=params)
    decode.run()
    assert decode.outputs["d-0"] == decode.sequences["d-0"].tokens[length : length + 40]
    assert decode.side.counts.tokens_loaded == length // BLOCK * BLOCK
    ended(agent, prefill, decode)


@pytest.mark.parametrize("v2", [False, True])
def test_a_decode_engine_that_is_asked_first_waits(worlds: Any, agent: AgentProcess, v2: bool) -> None:
    prefill, decode = worlds(transfer=PRODUCER, v2=v2, max_batched=32), worlds(transfer=CONSUMER, v2=v2)
    decode.add("cmpl-x-0", PROMPT, 20, params=EARLY | {"remote_request_id": "x"})
    for _ in range(20):
        decode.step()
    assert not decode.outputs["cmpl-x-0"], "it computed its prompt itself"
    prefill.add("cmpl-x-0", PROMPT, 1, params=SENDS)
    prefill.run()
    decode.run()
    assert decode.outputs["cmpl-x-0"] == decode.sequences["cmpl-x-0"].tokens[100:120]
    assert decode.side.counts.tokens_loaded == 96
    ended(agent, prefill, decode)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("v2", [False, True])
def test_a_prompt_of_more_blocks_than_may_be_pinned(
    worlds: Any, agent: AgentProcess, v2: bool, asynchronous: bool
) -> None:
    """What another engine waits for is pinned all the same."""
    how = {"v2": v2, "asynchronous": asynchronous, "depth": 2 if asynchronous else 1}
    prefill = worlds(transfer=PRODUCER, extra={"pin_percent": 5}, **how)
    decode = worlds(transfer=CONSUMER, **how)
    prompts = {f"p-{i}": [i * 50 + j % 37 + 5 for j in range(300 + 16 * i)] for i in range(3)}
    for name, prompt in prompts.items():
        prefill.add(name, prompt, 1, params=SENDS)
    prefill.run()
    for name, prompt in prompts.items():
        decode.add(name, prompt, 5, params=prefill.params[name])
        decode.run()
        assert decode.outputs[name] == decode.sequences[name].tokens[len(prompt) : len(prompt) + 5]
    assert decode.side.counts.tokens_loaded == sum(len(prompt) // BLOCK * BLOCK for prompt in prompts.values())
    ended(agent, prefill, decode)


@pytest.mark.parametrize("more", [{"ranks": 2}, {"window": 64, "blocks": 128}])
def test_with_several_ranks_and_several_groups(worlds: Any, agent: AgentProcess, more: dict[str, Any]) -> None:
    prefill = worlds(transfer=PRODUCER, extra={"pin_percent": 5}, **more)
    decode = worlds(transfer=CONSUMER, **more)
    prompt = [j % 391 + 5 for j in range(330)]
    prefill.add("p-0", prompt, 1, params=SENDS)
    prefill.run()
    decode.add("d-0", prompt, 5, params=prefill.params["p-0"])
    decode.run()
    assert decode.outputs["d-0"] == decode.sequences["d-0"].tokens[330:335]
    assert decode.side.counts.tokens_loaded == 320
    ended(agent, prefill, decode)


@pytest.mark.parametrize("v2", [False, True])
def test_a_prefill_engine_whose_requests_are_preempted(worlds: Any, agent: AgentProcess, v2: bool) -> None:
    prefill, decode = worlds(transfer=PRODUCER, v2=v2, blocks=20), worlds(transfer=CONSUMER, v2=v2)
    assert prefill.scheduler.requires_kv_delivery
    prompts = {name: [ord(name) * 3 + i % 50 for i in range(90)] for name in "abc"}
    for name, prompt in prompts.items():
        prefill.add(name, prompt, 40, params=SENDS)
    prefill.run()
    assert prefill.preempted > 0
    for name, prompt in prompts.items():
        decode.add(name, prompt, 5, params=prefill.params[name])
    decode.run()
    assert decode.side.counts.tokens_loaded == 3 * (90 // BLOCK * BLOCK)
    ended(agent, prefill, decode)


@pytest.mark.parametrize("v2", [False, True])
def test_a_prefill_request_that_is_aborted(worlds: Any, agent: AgentProcess, v2: bool) -> None:
    """In the middle of its prompt: the decode request gets what was saved, and computes the
    rest.
    """
    prefill, decode = worlds(transfer=PRODUCER, v2=v2, max_batched=32), worlds(transfer=CONSUMER, v2=v2)
    prefill.add("cmpl-x-0", PROMPT, 1, params=SENDS)
    while not prefill.scheduler.requests["cmpl-x-0"].num_computed_tokens:  # first it waits for its look-up
        prefill.step()
    prefill.abort("cmpl-x-0")
    prefill.run()
    assert prefill.params["cmpl-x-0"] is None
    decode.add("cmpl-x-0", PROMPT, 20, params=EARLY | {"remote_request_id": "x"})
    decode.run()
    assert decode.outputs["cmpl-x-0"] == decode.sequences["cmpl-x-0"].tokens[100:120]
    assert 0 < decode.side.counts.tokens_loaded < 96
    ended(agent, prefill, decode)


@pytest.mark.parametrize("v2", [False, True])
def test_a_prefill_request_that_is_aborted_while_it_loads(worlds: Any, agent: AgentProcess, v2: bool) -> None:
    """Its load ends after it does."""
    prefill = worlds(transfer=PRODUCER, v2=v2)
    prefill.add("p-0", PROMPT, 1, params=SENDS)
    prefill.run()
    assert prefill.scheduler.reset_prefix_cache()
    prefill.add("p-1", PROMPT, 1, params=SENDS)
    eventually(lambda: (prefill.step(), prefill.side.blocks.loading)[1], "a load")
    prefill.abort("p-1")
    prefill.run()
    assert not prefill.scheduler.requests
    clean(prefill, agent)


@pytest.mark.parametrize("when", ["waiting", "loading", "refused"])
@pytest.mark.parametrize("v2", [False, True])
def test_a_decode_request_that_is_aborted(worlds: Any, agent: AgentProcess, v2: bool, when: str) -> None:
    prefill, decode = worlds(transfer=PRODUCER, v2=v2), worlds(transfer=CONSUMER, v2=v2)
    prefill.add("p-0", PROMPT, 1, params=SENDS)
    prefill.run()
    eventually(lambda: agent.status()["transfers"]["complete"] == 1, "a complete transfer")
    # vLLM tells the connector of a refused request by one of a single token that ends at once.
    decode.add("d-0", PROMPT if when != "refused" else [0], 20, params=prefill.params["p-0"])
    if when == "loading":
        eventually(lambda: (decode.step(), decode.side.blocks.loading)[1], "a load")
    decode.abort("d-0")
    decode.run()
    ended(agent, prefill, decode)


def test_beside_a_connector_that_keeps_finished_requests(worlds: Any, agent: AgentProcess) -> None:
    """MultiConnector frees a request when the other one has said that it may."""
    import kvagent.vllm

    kvagent.vllm.register()
    keeper = {"kv_connector": "Keeper", "kv_connector_module_path": "tests.vllm.sibling", "kv_role": "kv_producer"}
    options = {"socket_dir": str(agent.folder), "start_wait_ms": 20_000, "weights_fixed": True}
    child = {"kv_connector": "KVAgentConnector", "kv_role": "kv_producer", "kv_connector_extra_config": options}
    multi = {
        "kv_connector": "MultiConnector", "kv_connector_module_path": None, "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [child, keeper]},
    }  # fmt: skip
    prefill = worlds(transfer=multi)
    for i in range(4):
        prefill.add(f"p-{i}", [i * 50 + j % 37 + 5 for j in range(40 + 80 * i)], 1, params=SENDS)
    prefill.run()
    assert not prefill.scheduler.requests
    clean(prefill, agent)


@pytest.mark.parametrize("v2", [False, True])
def test_an_agent_that_was_stopped_between_both(worlds: Any, agent: AgentProcess, v2: bool) -> None:
    """It finds the offer and the look-up, over two sockets: the offer was there first. A prompt of
    one block is not looked up by the prefill engine, which so waits for nothing.
    """
    prefill, decode = worlds(transfer=PRODUCER, v2=v2), worlds(transfer=CONSUMER, v2=v2)
    prompts = {f"p-{i}": [i * 7 + j % 389 + 5 for j in range(BLOCK)] for i in range(20)}
    for name, prompt in prompts.items():
        agent.freeze()
        prefill.add(name, prompt, 1, params=SENDS)
        while name not in prefill.reasons:
            prefill.step()
        decode.add(name, prompt, 2, params=prefill.params[name])
        decode.step()
        agent.thaw()
        while decode.scheduler.requests:
            prefill.step()
            decode.step()
    assert decode.side.counts.tokens_loaded == BLOCK * len(prompts)
    prefill.run()
    decode.run()
    ended(agent, prefill, decode)
