"""Loads that a step waits for: no output depends on bytes that did not come, whichever runner,
scheduler or number of steps in flight.

The fake GPU computes from what is in its memory: wrong bytes give wrong bytes and wrong tokens, as
in a real one, and only what the engine delivers counts.
"""

from __future__ import annotations

import random
import struct
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.guests.sync import StepWaits, SyncLoads
from kvagent.vllm.hooks import Waits
from kvagent.vllm.options import OptionError
from kvagent.vllm.plan import LoadJob, StepPlan
from tests.agent import AgentProcess, eventually
from tests.sides import waits as step_waits
from tests.vllm.agents import flip
from tests.vllm.gpu import PRIME
from tests.vllm.setting import BLOCK
from tests.vllm.test_oracle import live
from tests.vllm.world import World, clean, joined

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = [i % 400 + 5 for i in range(100)]
SYNC: dict[str, Any] = {"load_mode": "sync", "weights_fixed": True, "sync_wait_ms": 10_000}
SETTINGS: dict[str, dict[str, Any]] = {
    "v1": {"v2": False},
    "v2": {"v2": True},
    "v1-async": {"v2": False, "asynchronous": True, "depth": 2},
    "v2-async": {"v2": True, "asynchronous": True, "depth": 2},
    "v2-async-deep": {"v2": True, "asynchronous": True, "depth": 3},
    "v2-async-ranks": {"v2": True, "asynchronous": True, "depth": 2, "ranks": 2},
    "v1-stages": {"v2": False, "depth": 2, "ranks": 2, "stages": 2},
    "v2-async-stages": {"v2": True, "asynchronous": True, "depth": 3, "ranks": 2, "stages": 2},
    "v1-async-drafts": {"v2": False, "asynchronous": True, "depth": 2, "drafts": 2},
    "v2-async-drafts": {"v2": True, "asynchronous": True, "depth": 2, "drafts": 2},
}
STAGES: dict[str, dict[str, Any]] = {
    "v1-stages": {"v2": False, "depth": 2, "ranks": 2, "stages": 2},
    "v2-async-stages": {"v2": True, "asynchronous": True, "depth": 3, "ranks": 2, "stages": 2},
}
everywhere = pytest.mark.parametrize("setting", SETTINGS)


def cold(worlds: Any, setting: str = "v2", *, extra: dict[str, Any] | None = None, **more: Any) -> World:
    """Return a world whose engine has reset its cache after saving; from then on its GPU taints."""
    world: World = worlds(extra={"pin_percent": 40} | SYNC | (extra or {}), **((SETTINGS | STAGES)[setting] | more))
    world.add("cold", PROMPT, 10)
    world.run()
    assert world.scheduler.reset_prefix_cache()
    world.gpu.taints = True
    return world


def between(world: World, act: Callable[[], None]) -> None:
    """Call ``act`` once, between the promise of a load that its step waits for and the load."""
    plan = world.side.plan

    def planned(output: Any) -> Any:
        made = plan(output)
        if any(load.sync for load in made.loads):
            world.side.plan = plan
            act()
        return made

    world.side.plan = planned


def right(world: World) -> None:
    """Check that every output is that of a GPU with the right bytes."""
    for name, sequence in world.sequences.items():
        start = len(sequence.prompt)
        assert world.outputs[name] == sequence.tokens[start : start + sequence.max_tokens], name


def spoil(world: World, agent: AgentProcess, position: int = 20, layer: int = 0) -> None:
    """Change what the cold request stored at a position and layer, in the last rank."""
    value = (world.sequences["cold"].hashes[position] * 7 + layer * 13 + (world.ranks - 1) * 29) % PRIME
    flip(agent.process.pid, struct.pack("<f", value))


@everywhere
def test_the_step_that_computes_waits_for_the_load(worlds: Any, agent: AgentProcess, setting: str) -> None:
    world = cold(worlds, setting)
    world.add("warm", PROMPT, 10)
    launch_load(world)
    assert world.scheduler.requests["warm"].num_computed_tokens == len(PROMPT), "it does not compute in that step"
    world.run()
    right(world)
    counts = world.side.counts
    assert (counts.loads, counts.loads_sync, counts.loads_sync_failed, counts.tokens_loaded) == (1, 1, 0, 96)
    assert all(not told["warm"] for told in world.told), "vLLM is not told of the end of such a load"
    loaded = counts.lookups
    world.add("again", PROMPT, 10)
    world.run()
    right(world)
    assert world.side.counts.loads == 1, "its blocks are not in the engine's own cache"
    assert world.side.counts.lookups == loaded
    clean(world, agent)


@everywhere
def test_a_block_that_changes_between_promise_and_load(worlds: Any, agent: AgentProcess, setting: str) -> None:
    world = cold(worlds, setting)
    between(world, lambda: spoil(world, agent, 40))
    for name in ("warm", "twin"):  # of one schedule()
        world.add(name, PROMPT, 10)
        promised(world, name)
    world.run()
    right(world)
    counts = world.side.counts
    assert counts.loads_sync_failed >= 1
    assert counts.loads_failed == counts.loads_sync_failed
    world.add("after", PROMPT, 10)
    world.run()
    assert world.scheduler.reset_prefix_cache()
    world.add("anew", PROMPT, 10)  # from what the others saved
    world.run()
    right(world)
    clean(world, agent)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("setting", ["v2-async-ranks", *STAGES])
def test_a_load_that_fails_in_one_rank_alone(worlds: Any, agent: AgentProcess, setting: str, rank: int) -> None:
    """The other rank, which has all of it, computes the request anew too."""
    world = cold(worlds, setting)
    waits = step_waits(world.workers[rank]._worker)
    submit, failed = waits._submit, list[int]()

    def fails_once(load: Any, step: int | None) -> None:
        submit(load, step if failed else None)
        failed.append(load.job)

    waits._submit = fails_once
    for name in ("warm", "twin"):  # of one schedule()
        world.add(name, PROMPT, 10)
        promised(world, name)
    world.run()
    right(world)
    assert (world.side.counts.loads_sync_failed, world.side.counts.loads_failed) == (1, 1)
    assert [bool(invalid) for invalid in world.invalid] == [rank == 0, rank == 1]
    world.add("after", PROMPT, 10)
    world.run()
    right(world)
    clean(world, agent)


@everywhere
def test_an_agent_that_is_killed_between_promise_and_load(worlds: Any, agent: AgentProcess, setting: str) -> None:
    world = cold(worlds, setting)
    between(world, agent.kill)
    world.add("warm", PROMPT, 10)
    world.run()
    right(world)
    assert world.side.counts.loads_sync_failed == 1
    agent.start()
    joined(world, agent)
    world.add("after", PROMPT, 10)
    world.run()
    right(world)
    clean(world, agent)


@everywhere
def test_a_frozen_agent_costs_one_bounded_wait(worlds: Any, agent: AgentProcess, setting: str) -> None:
    world = cold(worlds, setting, extra={"sync_wait_ms": 100})

    def freeze() -> None:
        agent.freeze()
        world.wait_at_most(0.05)

    between(world, freeze)
    try:
        world.add("warm", PROMPT, 10)
        launch_load(world)
        waits: list[float] = []
        for worker in world.workers:
            watch(step_waits(worker._worker), waits)
        for name in ("warm2", "warm3"):
            world.add(name, PROMPT, 10)
        eventually(lambda: {"warm", "warm2", "warm3"} <= set(one_step(world).reasons), "the end of the requests")
        right(world)
        assert not waits, "it was waited for again"
        assert world.side.counts.loads_sync_failed >= 1
        assert world.side.blocks.loading >= 96 // BLOCK, "a frozen agent may still write"
    finally:
        agent.thaw()
    world.run()
    clean(world, agent)
    world.add("after", PROMPT, 10)
    world.run()
    right(world)


def watch(loads: Any, waits: list[float]) -> None:
    """Record how long a worker may still wait whenever it begins to wait."""
    listen = loads._listen

    def listens() -> None:
        waits.append(loads._left_s)
        listen()

    loads._listen = listens


def launch_load(world: World) -> None:
    """Launch steps until one waits for a load."""
    world.launch()
    while not world.side.counts.loads_sync:
        one_step(world)


def promised(world: World, name: str) -> None:
    """Wait for the answer to a request's look-up, before a step asks for it."""
    request = world.scheduler.requests[name]
    eventually(lambda: world.side.matched(request, 0)[0], "a promise")


def one_step(world: World) -> World:
    world.settle()
    world.launch()
    return world


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("setting", ["v1-async", "v2-async", "v2-async-deep"])
def test_a_preemption_before_the_outcome_is_known(
    worlds: Any, agent: AgentProcess, setting: str, *, fails: bool
) -> None:
    """The output of a request that vLLM preempts is delivered later, unless it is dropped."""
    world = cold(worlds, setting)
    if fails:
        between(world, lambda: spoil(world, agent))
    world.add("warm", PROMPT, 10)
    launch_load(world)
    request = world.scheduler.requests["warm"]
    world.scheduler.running.remove(request)
    world.scheduler._preempt_request(request, time.monotonic())
    world.run()
    right(world)
    world.add("after", PROMPT, 10)
    world.run()
    right(world)
    clean(world, agent)


@pytest.mark.parametrize("setting", ["v1-async", "v2-async", "v2"])
@pytest.mark.parametrize("fails", [True, False])
def test_a_request_of_one_token(worlds: Any, agent: AgentProcess, setting: str, *, fails: bool) -> None:
    """It ends in the pass that reports its load. Its computed blocks are saved, and hashed."""
    world = cold(worlds, setting)
    if fails:
        between(world, lambda: spoil(world, agent))
    longer = PROMPT[:96] + [i % 300 + 7 for i in range(70)]
    world.add("one", longer, 1)
    world.run()
    right(world)
    stored = world.side.counts.saves_stored
    world.add("same", longer, 3)
    world.run()
    right(world)
    assert world.side.counts.loads == 1 + fails * (world.side.counts.loads > 1), "its blocks were not hashed"
    assert stored >= (96 + 10) // BLOCK + (165 - 96) // BLOCK, "its blocks were not saved"
    clean(world, agent)


@pytest.mark.parametrize("setting", ["v1-async", "v2-async", "v2-async-deep"])
def test_weights_that_change_before_the_end_of_a_request_of_one_token(
    worlds: Any, agent: AgentProcess, setting: str
) -> None:
    """Its blocks are hashed at its end, and belong to the old weights."""
    world = cold(worlds, setting, extra={"weights_fixed": False})
    world.add("one", PROMPT[:96] + [i % 300 + 7 for i in range(70)], 1)
    launch_load(world)
    blocks = list(world.scheduler.kv_cache_manager.get_blocks("one").blocks[0])
    world.side.before_weights_call("update_weights")
    world.settle()
    assert world.outputs["one"], "it has not ended"
    hashed = [block for block in blocks if block.block_hash is not None]
    assert len(hashed) >= 96 // BLOCK
    assert all(world.side.blocks.is_stale(block) for block in hashed), "blocks of old weights count as new ones"
    world.run()
    right(world)
    clean(world, agent)


@everywhere
def test_an_abort_before_the_outcome_is_known(worlds: Any, agent: AgentProcess, setting: str) -> None:
    world = cold(worlds, setting)
    world.add("warm", PROMPT, 10)
    launch_load(world)
    world.abort("warm")
    world.run()
    world.sequences.pop("warm")
    world.add("after", PROMPT, 10)
    world.run()
    right(world)
    clean(world, agent)


@pytest.mark.parametrize("setting", ["v1-async", "v2-async", "v2"])
def test_nothing_is_saved_before_the_outcome_is_known(worlds: Any, agent: AgentProcess, setting: str) -> None:
    world = cold(worlds, setting, extra={"pin_percent": 50}, max_batched=512)
    between(world, lambda: spoil(world, agent))
    stored = agent.status()["blocks_stored"]
    longer = PROMPT[:96] + [i % 300 + 7 for i in range(70)]
    world.add("warm", longer, 10)
    launch_load(world)  # this step computes four blocks from what did not come
    for _ in range(world.depth - 1):
        world.launch()
    planned = world.side.counts.saves_planned
    world.settle()
    assert world.side.counts.saves_planned == planned == 96 // BLOCK, "what was computed from it was saved"
    world.run()
    right(world)
    assert agent.status()["blocks_stored"] > stored
    assert world.scheduler.reset_prefix_cache()
    world.add("anew", longer, 10)
    world.run()
    right(world)
    clean(world, agent)


@pytest.mark.parametrize("setting", ["v1-async", "v2-async", "v2-async-deep"])
def test_nothing_is_hashed_before_the_outcome_is_known(worlds: Any, agent: AgentProcess, setting: str) -> None:
    world = cold(worlds, setting)

    def hashed() -> list[bool]:
        blocks = world.scheduler.kv_cache_manager.get_blocks("warm").blocks[0]
        return [block.block_hash is not None for block in blocks]

    world.add("warm", PROMPT, 30)
    launch_load(world)
    for _ in range(world.depth):
        assert len(hashed()) >= 96 // BLOCK
        assert not any(hashed()), "blocks are hashed before their load has succeeded"
        if len(world._flight) < world.depth:
            world.launch()
    world.settle()
    world.launch()
    assert all(hashed()[: 96 // BLOCK]), "blocks are not hashed after their load"
    world.run()
    right(world)
    clean(world, agent)


def test_what_may_not_be_ready_is_asynchronous(worlds: Any, agent: AgentProcess) -> None:
    world = cold(worlds, "v2-async")
    world.side.loads._asks_ready = lambda *_: False  # as an older agent answers
    world.add("warm", PROMPT, 10)
    world.run()
    right(world)
    assert (world.side.counts.loads, world.side.counts.loads_sync) == (1, 0)
    clean(world, agent)


@pytest.mark.parametrize("heard", [True, False])
def test_a_silent_agent_is_not_waited_for_again(*, heard: bool) -> None:
    """Until it has sent something."""
    side: Any = SimpleNamespace(jobs={}, poll=lambda: None, descriptors=list, step=7)
    sent, given_up = list[int | None](), list[int]()
    loads = StepWaits(0.001)
    loads.join(side)
    side.give_up = given_up.append

    def submit(load: Any, step: int | None) -> None:
        sent.append(step)
        if step is not None:
            side.jobs[load.job] = load

    loads._submit = submit  # type: ignore[method-assign]
    one, two, three = (LoadJob(job, b"", 0, "r", 0, 1.0, (), b"", sync=True) for job in (1, 2, 3))
    loads.start(StepPlan(), [one])
    if heard:
        loads.heard()
    loads.start(StepPlan(), [two])
    assert sent == [6, 6 if heard else None]
    assert given_up == ([1, 2] if heard else [1])
    loads.start(StepPlan(stopped=True), [three])
    assert sent[2] is None


def test_the_policy_fail_ends_the_request(worlds: Any, agent: AgentProcess) -> None:
    world = cold(worlds, "v2-async", transfer={"kv_load_failure_policy": "fail"})
    between(world, lambda: spoil(world, agent))
    world.add("warm", PROMPT, 10)
    world.run()
    assert "error" in world.reasons["warm"]
    assert world.outputs.pop("warm") == []
    world.sequences.pop("warm")
    world.add("after", PROMPT, 10)
    world.run()
    right(world)
    clean(world, agent)


def test_a_step_waits_for_a_bounded_number_of_bytes(worlds: Any, agent: AgentProcess) -> None:
    """Beyond the budget of a step, loads are asynchronous."""
    block = 4 * 2 * BLOCK * 8 * 2 * 4  # layers, heads, tokens, K and V of a head, bytes of a float
    world = cold(worlds, "v2-async", extra={"sync_load_bytes": 2 * 6 * block})
    for name in "abc":
        world.add(name, PROMPT, 10)
        promised(world, name)  # so that all of them are admitted in one step
    world.run()
    right(world)
    assert (world.side.counts.loads, world.side.counts.loads_sync) == (3, 2)
    clean(world, agent)
    assert world.scheduler.reset_prefix_cache()
    world.side.waiting_loads._left = world.side.waiting_loads._most = 6 * block - 1
    world.add("d", PROMPT, 10)
    world.run()
    right(world)
    assert (world.side.counts.loads, world.side.counts.loads_sync) == (4, 2)
    clean(world, agent)


def test_where_no_step_may_wait(worlds: Any, agent: AgentProcess) -> None:
    with pytest.raises(OptionError, match="load_mode: sync, allowed is async or auto where the model has several"):
        worlds(extra=SYNC, window=40)
    assert worlds(extra=SYNC | {"load_mode": "auto"}, window=40).side.waiting_loads.__class__ is Waits
    assert worlds(extra=SYNC | {"load_mode": "auto"}).side.waiting_loads.__class__ is SyncLoads
    sibling = {"kv_connector": "Sibling", "kv_connector_module_path": "tests.vllm.sibling", "kv_role": "kv_both"}
    own = {
        "kv_connector": "KVAgentConnector", "kv_connector_module_path": "kvagent.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket_dir": str(agent.folder)} | SYNC,
    }  # fmt: skip
    beside = {
        "kv_connector": "MultiConnector", "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [own, sibling]},
    }  # fmt: skip
    with pytest.raises(OptionError, match="where another connector could save"):
        worlds(transfer=beside)


@pytest.mark.parametrize(
    ("setting", "mode"),
    [("v1", "sync"), ("v1-async", "auto"), ("v2-async", "sync"), ("v2-async-ranks", "auto"),
     ("v2-async-deep", "sync"), ("v1-stages", "sync"), ("v2-async-stages", "sync"), ("v1-async-drafts", "sync"),
     ("v2-async-drafts", "auto")],
)  # fmt: skip
def test_random_requests_of_which_some_loads_fail(worlds: Any, agent: AgentProcess, setting: str, mode: str) -> None:
    dice = random.Random(3)
    more = SETTINGS[setting] | {"blocks": 40, "max_batched": 48, "extra": SYNC | {"load_mode": mode}}
    first, second = worlds(**more), worlds(**more)
    for world in (first, second):
        world.gpu.taints = True
        for worker in world.workers:
            waits = step_waits(worker._worker)
            waits._submit = lambda load, step, submit=waits._submit: submit(load, step if dice.random() < 0.7 else None)
    live(first, 1, "cold-")
    live(second, 1, "warm-")
    clean(first, agent, second)
    counts = second.side.counts
    print(setting, mode, {name: value for name, value in dict(vars(second.side.counts)).items() if "load" in name})
    if mode == "sync":  # else it depends on the machine how many there are
        assert counts.loads_sync > 3
        assert 0 < counts.loads_sync_failed < counts.loads_sync
