"""Lazy offload in the real schedulers and drivers: what is evicted was saved, and nothing else."""

from __future__ import annotations

import os
import random
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm.lora.request import LoRARequest

from kvagent.messages import Group
from kvagent.vllm import internals
from kvagent.vllm.geometry import Geometry
from kvagent.vllm.hooks import of
from kvagent.vllm.options import Options
from tests.agent import eventually
from tests.cells import parallel_of
from tests.vllm.setting import BLOCK
from tests.vllm.test_oracle import KINDS, LIVES, SEED, live, met
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from tests.agent import AgentProcess

PROMPT = [i % 400 + 5 for i in range(100)]
BLOCKS = 160
STEP = 64  # tokens: the watermark is 16 blocks
WAYS: list[dict[str, Any]] = [
    {"v2": True}, {"v2": False}, {"v2": True, "asynchronous": True, "depth": 2}, {"v2": False, "ranks": 2},
]  # fmt: skip


def lazy(worlds: Any, **more: Any) -> World:
    """Return an engine with lazy offload."""
    extra = {"offload": "lazy", "watermark_percent": 10, "pin_percent": 9} | more.pop("extra", {})
    world: World = worlds(extra=extra, **({"blocks": BLOCKS, "max_batched": STEP} | more))
    return world


def ask(world: World, name: str, prompt: list[int] | None = None, tokens: int = 10, **more: Any) -> int:
    """Run a request, and steps until its saves have ended. Return the tokens that it loaded."""
    prompt = PROMPT if prompt is None else prompt
    before = int(world.side.counts.tokens_loaded)
    world.add(name, prompt, tokens, **more)
    world.run()
    sequence = world.sequences[name]
    assert world.outputs[name] == sequence.tokens[len(prompt) : len(prompt) + tokens]
    assert not world.gpu.bad, world.gpu.bad[:3]
    return int(world.side.counts.tokens_loaded) - before


def other(i: int, tokens: int = 100) -> list[int]:
    return [(j * 7 + 31 * i) % 400 + 5 for j in range(tokens)]


def evict(world: World, name: str = "other", *, first: int = 0) -> None:
    """Serve other prompts until nothing that was served before is in the engine's own cache."""
    held = cached(world)
    while held.items() & cached(world).items():
        ask(world, f"{name}{first}", other(first, 200))
        first += 1


def cached(world: World) -> dict[int, Any]:
    """Return the hash of each block in the engine's own cache."""
    blocks = world.side.blocks.pool.blocks
    return {block.block_id: block.block_hash for block in blocks if block.block_hash is not None}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_evicted_was_saved_and_is_found(worlds: Any, agent: AgentProcess, way: dict[str, Any]) -> None:
    world = lazy(worlds, **way)
    ask(world, "cold")
    for i in range(3):
        ask(world, f"few{i}", other(100 + i))
    assert agent.status()["blocks_saved"] == 0, "saved though others are evicted before"
    assert ask(world, "own") == 0, "in the engine's own cache"
    evict(world)
    counts = world.side.counts
    assert counts.saves_missed == 0, "evicted before it was saved"
    assert counts.saves_stored >= 4 * 6
    assert counts.saves_existed == counts.saves_refused == counts.saves_revoked == 0, "saved twice"
    assert ask(world, "warm") == 96
    assert world.outputs["warm"] == world.outputs["cold"]
    clean(world, agent)


def test_less_is_copied_than_with_eager_offload(worlds: Any, agent: AgentProcess) -> None:
    """Prompts that stay in the engine's own cache are never copied."""
    world = lazy(worlds)
    for i in range(40):
        ask(world, f"hot{i}", tokens=4)
        ask(world, f"cold{i}", other(i % 3), tokens=4)
    assert world.side.counts.saves_planned == 0
    assert world.side.counts.saves_missed == 0


def test_the_pool_extends_the_prefix_that_the_engine_still_has(worlds: Any, agent: AgentProcess) -> None:
    """vLLM evicts a chain from its end, so the agent has its tail.

    A load takes all its blocks at once, so the watermark is larger here.
    """
    world = lazy(worlds, extra={"offload": "lazy", "watermark_percent": 40, "pin_percent": 25})
    prompt = other(50, 800)
    ask(world, "cold", prompt)
    held = cached(world)
    i = 0
    while held.items() <= cached(world).items():
        ask(world, f"pad{i}", other(i, 200))
        i += 1
    loaded = ask(world, "warm", prompt)
    assert 0 < loaded < 48 * BLOCK, "all or nothing of the prompt comes from the agent"
    evict(world)
    assert world.side.counts.saves_missed == 0
    assert ask(world, "all", prompt) == 50 * BLOCK
    clean(world, agent)


@pytest.mark.parametrize(("ranks", "window", "scale"), [(1, 40, 1), (2, 40, 1), (1, 40, 2)])
def test_groups_and_hashes_of_half_a_block(
    worlds: Any, agent: AgentProcess, ranks: int, window: int, scale: int
) -> None:
    world = lazy(worlds, ranks=ranks, window=window, scale=scale, extra={"watermark_percent": 50, "pin_percent": 40})
    ask(world, "cold", tokens=40)
    evict(world)
    assert world.side.counts.saves_missed == 0
    assert ask(world, "warm", tokens=40) == 96
    clean(world, agent)


@pytest.mark.parametrize("named", [False, True])
def test_blocks_of_old_weights_are_not_saved(worlds: Any, agent: AgentProcess, named: bool) -> None:
    """vLLM still has them when the weights change, and evicts them afterwards."""
    world = lazy(worlds)
    ask(world, "old")
    if named:
        assert world.retrain()
    else:
        world.side.before_weights_call("update_weights")
        world.gpu.weights += 1
        assert world.side.blocks.has_stale
    eventually(partial(registered, world), "an engine that is registered")
    ask(world, "other", other(90, 200))
    evict(world)
    assert world.side.counts.saves_stored
    assert ask(world, "new") == 0, "blocks of old weights are found"
    evict(world, "again", first=200)
    assert ask(world, "newer") == 96
    clean(world, agent)


def one_step(world: World) -> bool:
    world.step()
    world.settle()
    return True


def registered(world: World) -> bool:
    """Run a step. Return whether all parts of an engine are registered, and it does not wait for
    the answer of an agent that was stopped: until then nothing is saved.
    """
    one_step(world)
    links = [world.side.agent._link, *(worker._worker._link for worker in world.workers)]
    there = world.side.agent.session is not None and all(link.current() is not None for link in links)
    return there and not world.side.agent.pinging()


def test_nothing_is_saved_of_a_cache_that_was_reset(worlds: Any, agent: AgentProcess) -> None:
    world = lazy(worlds)
    ask(world, "cold")
    assert world.scheduler.reset_prefix_cache()
    assert ask(world, "again") == 0
    evict(world)
    assert world.side.counts.saves_missed == 0
    assert ask(world, "warm") == 96
    clean(world, agent)


def test_requests_with_an_adapter_are_not_saved(worlds: Any, agent: AgentProcess) -> None:
    world = lazy(worlds)
    adapter = LoRARequest("adapter", 1, "/nowhere")
    ask(world, "adapted", lora_request=adapter)
    stored = []
    for i in range(8):
        ask(world, f"bare{i}", other(i, 400), lora_request=adapter)
        stored.append(world.side.counts.saves_planned)
    assert stored == [0] * 8
    assert ask(world, "adapted again", lora_request=adapter) == 0
    clean(world, agent)


def test_what_is_computed_for_a_decode_engine_is_saved_at_once(worlds: Any, agent: AgentProcess) -> None:
    world = lazy(worlds)
    ask(world, "prompt", tokens=1, params={"do_remote_decode": True, "do_remote_prefill": False})
    assert world.side.counts.saves_stored == 96 // BLOCK
    clean(world, agent)


def test_with_few_free_blocks_all_is_saved_at_once(worlds: Any, agent: AgentProcess) -> None:
    """Otherwise requests would lose their blocks as soon as they end."""
    # The watermark is 32, and 21 blocks are saved at a time, so that none waits for the agent.
    world = lazy(worlds, blocks=64, max_batched=256, extra={"pin_percent": 34, "watermark_percent": 50})
    world.add("long", other(1, 500), 40)
    while len(world.outputs["long"]) < 20:
        world.step()
        world.settle()
    assert world.side.saves.pressing
    assert world.side.counts.saves_planned >= 20
    world.run()
    assert world.side.counts.saves_stored >= 20
    clean(world, agent)


@pytest.mark.stops
@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("way", WAYS)
def test_an_agent_that_goes_while_blocks_are_saved(
    worlds: Any, agent: AgentProcess, way: dict[str, Any], how: str
) -> None:
    world = lazy(worlds, **way)
    i = 0
    while not world.side.saves._inflight:
        if not world.scheduler.has_requests():
            world.add(f"pad{i}", other(i, 200), 4)
            i += 1
        world.launch()
        if not world.side.saves._inflight:
            world.settle()
    (agent.kill if how == "kill" else agent.freeze)()
    world.wait_at_most(0.1)
    try:
        world.add("without", PROMPT, 4)
        eventually(lambda: one_step(world) and "without" in world.reasons, "an answer without the agent")
        eventually(lambda: one_step(world) and not world.side.blocks.saving, "the end of all pins")
    finally:
        agent.start() if how == "kill" else agent.thaw()
    world.wait_at_most(10.0)
    eventually(partial(registered, world), "an engine that is registered")
    ask(world, "cold")
    evict(world, "later", first=300)
    assert ask(world, "warm") == 96
    clean(world, agent)


@pytest.mark.parametrize("offload", ["eager", "lazy"])
@pytest.mark.parametrize("caching", [False, True])
def test_a_warning_says_that_it_needs_prefix_caching(
    caplog: pytest.LogCaptureFixture, offload: str, caching: bool
) -> None:
    parallel = parallel_of(1, 1)
    cache = SimpleNamespace(enable_prefix_caching=caching)
    config = SimpleNamespace(cache_config=cache, parallel_config=parallel)
    of(config, None, Options(offload=offload)).check(Geometry((Group(16, 64),), 16), "kv_both")
    assert ("no effect without prefix caching" in caplog.text) == (offload == "lazy" and not caching)


def test_it_is_eager_where_vllm_lacks_what_it_needs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(internals.USED, internals.LAZY, "vllm.v1.core.block_pool.BlockPool gone")
    parallel = parallel_of(1, 1)
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True), parallel_config=parallel)
    start = of(config, None, Options(offload="lazy"))
    start.check(Geometry((Group(16, 64),), 16), "kv_both")
    assert start.options.offload == "eager"
    assert "this vLLM has no BlockPool.gone" in caplog.text


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "states" not in kind])
def test_no_byte_is_wrong(worlds: Any, agent: AgentProcess, kind: str) -> None:
    """Random requests, preemptions, aborts and changes of the weights, as in test_oracle.

    States are never saved lazily.
    """
    seed = int(os.environ.get("KVAGENT_SEED", SEED)) or random.randrange(1 << 30)
    print(kind, KINDS[kind], "KVAGENT_SEED", seed)
    layout = {"layout": kind} if kind.isupper() else {}
    more = layout | {"extra": {"offload": "lazy", "watermark_percent": 20}} | KINDS[kind]
    first, second = worlds(**more), worlds(**more)
    lives = 0
    while not (lives and met(first, second)):
        assert lives < LIVES, "no preemption, or no load, in all of them"
        live(first, seed + lives, f"cold{lives}-", retrain=not lives)
        if second.gpu.weights != first.gpu.weights:
            assert second.retrain()
        live(second, seed + lives, f"warm{lives}-")
        lives += 1
    clean(first, agent, second)
    for world in (first, second):
        print(f"{world.steps} steps, {world.preempted} preemptions, {world.side.counts}")
