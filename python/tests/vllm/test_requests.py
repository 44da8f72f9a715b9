"""Requests of every kind: resumed, with adapters, salted, not served from caches, with unknown
tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

import kvagent.vllm
from kvagent.vllm.scheduler.saves import final_tokens
from tests.vllm.gpu import Part
from tests.vllm.setting import BLOCK
from tests.vllm.sibling import Loader
from tests.vllm.test_failures import PROMPT, UNANSWERED, cold, spoil
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from tests.agent import AgentProcess

RESUMED = {True: "as new", False: "by id"}


def preempt_all(world: World) -> None:
    """Preempt all running requests; they restart from their first token, with nothing cached."""
    world.settle()
    assert world.scheduler.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.parametrize("v2", [False, True])
def test_a_resumed_request_is_not_promised_what_failed_before(worlds: Any, agent: AgentProcess, v2: bool) -> None:
    world, other = cold(worlds, v2=v2), worlds(v2=v2)
    spoil(world, agent, 20, 0)
    world.add("warm", PROMPT, 40)
    while len(world.outputs["warm"]) < 10:
        world.step()
    assert world.side.counts.loads_failed == 1
    promised = world.side.counts.tokens_promised
    other.add("heals", PROMPT, 1)  # the agent has the block again
    other.run()
    preempt_all(world)
    world.run()
    assert world.resumed[RESUMED[v2]] == 1
    assert world.side.counts.tokens_promised == promised, "it is promised what failed before"
    assert world.outputs["warm"] == world.sequences["warm"].tokens[100:140]
    clean(world, agent)


@pytest.mark.parametrize("v2", [False, True])
def test_a_resumed_request_saves_what_its_new_blocks_hold(worlds: Any, agent: AgentProcess, v2: bool) -> None:
    """Blocks whose save was in flight at the preemption are offered again, from their new
    location.
    """
    world, other = worlds(v2=v2, extra={"pin_percent": 40} | UNANSWERED), worlds(v2=v2)
    agent.freeze()
    try:
        world.add("long", PROMPT, 60)
        while len(world.outputs["long"]) < 20:
            world.step()
        had = world.scheduler.kv_cache_manager.get_block_ids("long")[0]
        preempt_all(world)
        world.step()  # tells the workers which saves are revoked, before the agent reads them
    finally:
        agent.thaw()
    saved = set[int]()

    def named(tracked: Any, _: int, first: int, blocks: int) -> None:
        if tracked.request.request_id == "long":
            saved.update(range(first, first + blocks))

    world.side.saves.named.append(named)
    world.add("first", [7] * 40, 4)  # takes some of the blocks
    while world.scheduler.requests["long"].num_computed_tokens < 100:
        world.step()
    assert world.scheduler.kv_cache_manager.get_block_ids("long")[0] != had, "its blocks are the same again"
    while len(world.outputs["long"]) < 50:
        world.step()
        table = world.scheduler.kv_cache_manager.get_block_ids("long")[0]
        for piece in [piece for save in world.side.saves._inflight.values() if save.pinned for piece in save.runs]:
            if piece.tracked.request.request_id == "long":
                ids = [block.block_id for block in piece.blocks]
                assert ids == table[piece.first : piece.first + len(ids)], "a table that was not replaced"
    assert saved.issuperset(range(100 // BLOCK)), "nothing is saved before its end"
    world.run()
    assert world.resumed[RESUMED[v2]] == 1
    assert agent.status()["blocks_stored"] >= (100 + 59) // BLOCK
    other.add("warm", PROMPT + world.outputs["long"], 4)
    other.run()
    assert other.side.counts.tokens_loaded >= 144
    assert not other.gpu.bad, f"a table that was not replaced: {other.gpu.bad[:2]}"
    clean(world, agent, other)


@pytest.mark.parametrize("v2", [False, True])
def test_what_a_resumed_request_loads_is_not_saved_again(worlds: Any, agent: AgentProcess, v2: bool) -> None:
    """vLLM tells of its preemption with the step that admits it again."""
    world = worlds(v2=v2, extra={"pin_percent": 40})
    world.add("long", PROMPT, 60)
    while len(world.outputs["long"]) < 20 or world.side.saves.busy():
        world.step()
    preempt_all(world)
    existed = world.side.counts.saves_existed
    world.run()
    assert world.resumed[RESUMED[v2]] == 1
    assert world.side.counts.tokens_loaded >= 100 // BLOCK * BLOCK
    assert world.side.counts.saves_existed == existed
    clean(world, agent)


def beside(agent: AgentProcess, other: str, **options: Any) -> dict[str, Any]:
    """Return a configuration of MultiConnector with the connector and another one of siblings."""
    kvagent.vllm.register()
    extra = {"socket_dir": str(agent.folder), "start_wait_ms": 20_000, "pin_percent": 40} | options
    own = {"kv_connector": "KVAgentConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    sibling = {"kv_connector": other, "kv_role": "kv_both", "kv_connector_module_path": "tests.vllm.sibling"}
    return {
        "kv_connector": "MultiConnector", "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [own, sibling]},
    }  # fmt: skip


@pytest.mark.parametrize("offload", ["eager", "lazy"])
@pytest.mark.parametrize("v2", [False, True])
def test_what_another_connector_loads_is_saved_once_it_is_there(
    worlds: Any, agent: AgentProcess, v2: bool, offload: str
) -> None:
    """vLLM counts its tokens as computed as soon as the load begins, while the blocks still hold
    what an earlier request left there.
    """
    world, plain = worlds(v2=v2, transfer=beside(agent, "Loader", offload=offload), blocks=16), worlds(v2=v2)
    Loader.write = lambda name, blocks: world.gpu.run(
        Part(name, 0, Loader.TOKENS, 0, (blocks,), samples=False, fresh=True)
    )
    prompts = {name: [ord(name) + i % 50 for i in range(100)] for name in "abcd"}
    for name, prompt in prompts.items():
        world.add(name, prompt, 20)
        world.run()
        world.promised[name] += 1  # by the other connector
    for name, prompt in prompts.items():
        plain.add(name, prompt, 4)
    plain.run()
    assert plain.side.counts.tokens_loaded >= 2 * Loader.TOKENS
    clean(plain, agent, world)


@pytest.mark.parametrize("offload", ["eager", "lazy"])
@pytest.mark.parametrize("v2", [False, True])
def test_what_another_connector_fails_to_load_is_not_saved(
    worlds: Any, agent: AgentProcess, v2: bool, offload: str
) -> None:
    world, plain = worlds(v2=v2, transfer=beside(agent, "Failing", offload=offload), blocks=16), worlds(v2=v2)
    world.gpu.taints = True
    prompts = {name: [ord(name) + i % 50 for i in range(80)] for name in "abcd"}
    for name, prompt in prompts.items():
        for end in (1, 2):  # which begin alike: the second one finds the first one's blocks
            world.add(f"{name}{end}", [*prompt, *[end] * 20], 20)
        world.run()
        for end in (1, 2):
            assert world.outputs[f"{name}{end}"] == world.sequences[f"{name}{end}"].tokens[100:120]
    for name, prompt in prompts.items():
        for end in (1, 2):
            plain.add(f"{name}{end}", [*prompt, *[end] * 20], 4)
            plain.run()
    plain.run()
    assert plain.side.counts.tokens_loaded >= 2 * Loader.TOKENS
    clean(plain, agent)


@pytest.mark.parametrize("v2", [False, True])
def test_requests_that_crowd_each_other_out(worlds: Any, agent: AgentProcess, v2: bool) -> None:
    world = worlds(v2=v2, blocks=20, extra={"pin_percent": 10})
    prompts = {name: [ord(name) * 3 + i % 50 for i in range(90)] for name in "abc"}
    for name, prompt in prompts.items():
        world.add(name, prompt, 60)
    world.run()
    assert world.preempted > 0
    assert world.resumed[RESUMED[v2]] > 0
    for name in prompts:
        assert world.outputs[name] == world.sequences[name].tokens[90:150]
    clean(world, agent)


@pytest.mark.parametrize(
    ("computed", "placeholders", "scheduled", "final"),
    [
        (0, 0, 40, 40),  # a chunk of the prompt
        (99, 0, 1, 100),  # an answer
        (99, 0, 4, 100),  # three drafts: they may be rejected
        (104, 4, 4, 100),  # and those of the step in flight
        (84, 4, 4, 84),  # tokens that are not confirmed
    ],
)
def test_what_may_be_taken_back_is_not_saved(computed: int, placeholders: int, scheduled: int, final: int) -> None:
    request = Request(
        request_id="r", prompt_token_ids=PROMPT, sampling_params=SamplingParams(max_tokens=8), pooling_params=None
    )
    request.num_computed_tokens, request.num_output_placeholders = computed, placeholders
    assert final_tokens(request, scheduled) == final, "placeholders count as tokens"


def test_requests_with_an_adapter_are_bypassed(worlds: Any, agent: AgentProcess) -> None:
    """A block's hash covers only the adapter's name, which another adapter may have tomorrow."""
    world = worlds()
    for name in ("cold", "warm"):
        world.add(name, PROMPT, 10, lora_request=LoRARequest("adapter", 1, "/nowhere"))
        world.run()
        assert world.scheduler.reset_prefix_cache()
    assert (world.side.counts.lookups, world.side.counts.saves_planned) == (0, 0)
    assert agent.status()["blocks_stored"] == 0
    clean(world, agent)


def test_a_request_that_is_not_to_be_served_from_caches(worlds: Any, agent: AgentProcess) -> None:
    world = cold(worlds)
    world.add("unread", PROMPT, 10, unread=True)
    world.run()
    assert world.side.counts.tokens_loaded == 0
    assert world.side.counts.loads == 0
    assert world.outputs["unread"] == world.outputs["cold"]
    clean(world, agent)


@pytest.mark.parametrize("kind", [{"window": 4 * BLOCK, "kind": "chunked"}, {"window": 3 * BLOCK + 1}, {}])
def test_the_last_token_of_a_prompt_of_whole_blocks_is_right(
    worlds: Any, agent: AgentProcess, kind: dict[str, Any]
) -> None:
    """vLLM computes it again if all are loaded, and what it attends to begins in an earlier block
    than for the token after it: the chunk before, or one more block of the window.
    """
    prompt = [i % 400 + 5 for i in range(8 * BLOCK)]
    for name in "cold", "warm":
        world = worlds(blocks=200, **kind)
        world.add(name, prompt, 20)
        world.run()
        assert not world.gpu.bad, world.gpu.bad[:3]
    assert world.side.counts.tokens_loaded == (7 if kind else 8) * BLOCK
    clean(world, agent)
