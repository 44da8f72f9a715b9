"""Failures: agents that end, freeze and restart, loads that fail or are late, requests that are
preempted.
"""

from __future__ import annotations

import math
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.options import Options
from kvagent.vllm.plan import StepPlan
from kvagent.vllm.worker import memory as worker_memory
from tests.agent import AgentProcess, eventually
from tests.vllm import agents
from tests.vllm.agents import flip
from tests.vllm.gpu import PRIME
from tests.vllm.setting import BLOCK
from tests.vllm.world import World, clean, joined

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = [i % 400 + 5 for i in range(100)]
UNANSWERED = {"lookup_age_ms": 100}  # where an agent stands still before it is asked
RANKS_AND_WINDOWS = [(1, 0), (2, 0), (1, 40), (2, 40)]


def cold(worlds: Callable[..., World], **more: Any) -> World:
    """Return a world whose engine has reset its cache after saving."""
    world = worlds(extra={"pin_percent": 40} | more.pop("extra", {}), **more)
    world.add("cold", PROMPT, 10)
    world.run()
    assert world.scheduler.reset_prefix_cache()
    return world


def launch_load(world: World) -> None:
    """Launch steps until one has a load, which waits for that step to end."""
    world.launch()
    while not world.side.counts.loads:
        one_step(world)


def one_step(world: World) -> World:
    world.settle()
    world.launch()
    return world


def alone(world: World) -> bool:
    """Run another step. Return whether an engine has noticed that its agent is gone."""
    links = [world.side.agent._link, *(worker._worker._link for worker in one_step(world).workers)]
    return all(link.current() is None for link in links)


def spoil(world: World, agent: AgentProcess, position: int, rank: int) -> None:
    """Change what the cold request stored at a position in the agent's pool, in the first layer of
    a rank.
    """
    value = (world.sequences["cold"].hashes[position] * 7 + rank * 29) % PRIME
    flip(agent.process.pid, struct.pack("<f", value))


@pytest.mark.parametrize(("ranks", "window"), RANKS_AND_WINDOWS)
def test_a_load_that_fails_in_one_rank_is_computed_and_not_promised_again(
    worlds: Any, agent: AgentProcess, ranks: int, window: int
) -> None:
    world = cold(worlds, ranks=ranks, window=window)
    spoil(world, agent, 20, ranks - 1)
    world.add("warm", PROMPT, 10)
    world.run()
    assert not world.gpu.bad, f"a failed load counts as good: {world.gpu.bad[:2]}"
    assert world.outputs["warm"] == world.outputs["cold"]
    assert world.side.counts.loads_failed == 1
    assert world.side.counts.tokens_promised <= 96 + 16, "what failed was promised again"
    # A rank that comes later may not find the block any more.
    assert world.failed[-1]["warm"] == bool(window), "block by block it can be told of one group only"
    assert len(world.invalid[-1]) == (not window)
    assert all(len(invalid) <= (not window) for invalid in world.invalid)
    clean(world, agent)
    assert world.scheduler.reset_prefix_cache()
    before = world.side.counts.tokens_loaded
    world.add("again", PROMPT, 10)
    world.run()
    assert world.side.counts.loads_failed == 1
    assert world.side.counts.tokens_loaded - before == 96, "blocks computed anew were not saved anew"
    assert world.outputs["again"] == world.outputs["cold"]
    clean(world, agent)


def test_what_precedes_a_failed_block_of_a_window_is_not_all_that_is_needed(worlds: Any, agent: AgentProcess) -> None:
    world = cold(worlds, window=40, kind="only sliding")
    assert agents.spoil(agent.process.pid)
    world.add("warm", PROMPT, 10)
    world.run()
    assert world.side.counts.loads_failed
    assert not world.gpu.bad, f"computed on without its window: {world.gpu.bad[:2]}"
    assert world.outputs["warm"] == world.outputs["cold"]
    clean(world, agent)


@pytest.mark.parametrize(("ranks", "window"), RANKS_AND_WINDOWS)
def test_a_request_that_fails_with_its_load_leaves_nothing(
    worlds: Any, agent: AgentProcess, ranks: int, window: int
) -> None:
    """With vLLM's default policy, ``fail``, it ends before its connector learns of the load's
    outcome.
    """
    world = cold(worlds, ranks=ranks, window=window, transfer={"kv_load_failure_policy": "fail"})
    spoil(world, agent, 20, 0)
    world.add("warm", PROMPT, 10)
    world.run()
    assert "error" in world.reasons["warm"]
    assert world.outputs["warm"] == []
    clean(world, agent)


@pytest.mark.parametrize(("ranks", "window"), RANKS_AND_WINDOWS)
def test_a_load_that_a_frozen_agent_keeps_is_given_up_and_its_blocks_stay_pinned(
    worlds: Any, agent: AgentProcess, ranks: int, window: int
) -> None:
    world = cold(worlds, ranks=ranks, window=window)
    world.add("warm", PROMPT, 10)
    launch_load(world)
    pinned = world.side.blocks.loading
    assert pinned >= 96 // BLOCK
    agent.freeze()  # the load waits for the step in flight
    world.wait_at_most(0.05)
    try:
        eventually(lambda: "warm" in one_step(world).reasons, "the end of the request")
        assert world.outputs["warm"] == world.outputs["cold"]
        assert world.side.counts.loads_late == 1
        assert world.side.blocks.loading == pinned, "a frozen agent may still write"
        assert world.scheduler.has_requests(), "the fence would not be awaited"
        for rank in range(ranks):
            assert world.told[rank]["warm"] == 1
            assert world.failed[rank]["warm"] == 1
            assert not world.invalid[rank], "never only some of its blocks"
    finally:
        agent.thaw()
    world.run()
    clean(world, agent)


@pytest.mark.parametrize(("ranks", "window"), RANKS_AND_WINDOWS)
def test_a_load_whose_agent_is_killed_fails_and_is_reported_once(
    worlds: Any, agent: AgentProcess, ranks: int, window: int
) -> None:
    world = cold(worlds, ranks=ranks, window=window)
    world.add("warm", PROMPT, 10)
    launch_load(world)
    agent.kill()
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert world.side.counts.loads_failed == 1
    agent.start()
    clean(world, agent)


def test_a_load_is_not_reported_before_it_arrived(worlds: Any, agent: AgentProcess) -> None:
    world = cold(worlds)
    world.add("warm", PROMPT, 10)
    launch_load(world)
    agent.freeze()
    try:
        for _ in range(4):
            one_step(world)
            assert not world.told[0], "reported before it arrived"
    finally:
        agent.thaw()
    world.run()
    assert world.side.counts.tokens_loaded == 96
    clean(world, agent)


def test_what_was_promised_and_is_stale_is_computed(worlds: Any, agent: AgentProcess) -> None:
    world = cold(worlds)
    world.add("warm", PROMPT, 10)
    launch_load(world)
    world.side.agent.session.reset()  # the promise is stale before the load begins
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert world.side.counts.loads_failed == 1
    assert world.side.counts.loads == 1
    clean(world, agent)


def test_abort_while_loading_gives_everything_back(worlds: Any, agent: AgentProcess) -> None:
    world = cold(worlds)
    world.add("warm", PROMPT, 10)
    launch_load(world)
    world.abort("warm")
    world.run()
    clean(world, agent)


def test_abort_while_saving_gives_everything_back(worlds: Any, agent: AgentProcess) -> None:
    world = worlds(extra=UNANSWERED)
    agent.freeze()
    try:
        world.add("cold", PROMPT, 10)
        while not world.side.blocks.saving:
            world.step()
        world.abort("cold")
        world.step()
        assert world.side.blocks.saving == 96 // BLOCK
        assert world.free_blocks() == world.blocks - 1 - 96 // BLOCK, "a frozen agent may still read"
    finally:
        agent.thaw()
    world.run()
    assert agent.status()["blocks_stored"] == 96 // BLOCK
    clean(world, agent)


def test_pins_go_when_the_prefix_cache_is_reset(worlds: Any, agent: AgentProcess) -> None:
    world = worlds(extra=UNANSWERED)
    agent.freeze()
    try:
        world.add("cold", PROMPT, 4)
        while world.scheduler.requests:
            world.step()
        assert world.side.blocks.saving == 100 // BLOCK
        assert world.side.pending()
        assert world.scheduler.reset_prefix_cache()
        assert world.side.blocks.saving == 0
        world.step()
        assert any(world.workers[0]._clock.words.revocations), "the agent would store blocks that are reused"
    finally:
        agent.thaw()
    world.run()
    assert agent.status()["blocks_stored"] == 0
    world.add("again", PROMPT, 4)
    world.run()
    assert agent.status()["blocks_stored"] == 100 // BLOCK
    clean(world, agent)


@pytest.mark.stops
def test_pins_of_saves_go_when_the_agent_stands_still(
    worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvagent.vllm.scheduler.saves.HOLD_S", 600.0)
    world = worlds(extra=UNANSWERED)
    agent.freeze()
    try:
        world.add("cold", PROMPT, 4)
        with monkeypatch.context() as unseen:
            unseen.setattr("kvagent.vllm.scheduler.agent_session.ASK_S", math.inf)
            while world.scheduler.requests:
                world.step()
        assert world.side.blocks.saving == 100 // BLOCK
        eventually(lambda: not one_step(world).side.blocks.saving, "pins that are given back", patience_s=10)
        assert world.free_blocks() == world.blocks - 1
    finally:
        agent.thaw()
    world.run()
    eventually(lambda: not one_step(world).side.agent.pinging(), "an answer: until then nothing is saved")
    world.add("again", PROMPT, 4)
    world.run()
    assert agent.status()["blocks_stored"] == 100 // BLOCK
    clean(world, agent)


def test_a_reset_while_the_agent_was_restarted_is_not_missed(worlds: Any, agent: AgentProcess) -> None:
    """Both runs of the agent count resets from their start, so equal numbers prove nothing."""
    first, other = (worlds(extra={"weights_fixed": True}) for _ in range(2))
    first.add("old", PROMPT, 4)
    first.run()
    one_step(other)  # it takes its session up
    assert other.scheduler.reset_prefix_cache(reset_connector=True)
    eventually(lambda: one_step(first).side.agent._epoch == 2, "the reset")
    first.settle()
    assert first.scheduler.reset_prefix_cache()
    first.add("cold", PROMPT, 4)
    first.run()
    assert agent.status()["blocks_stored"] == 100 // BLOCK
    link = first.side.agent._link
    path, link._path = link._path, Path("/nowhere")
    agent.kill()
    eventually(lambda: alone(first) and alone(other), "engines that saw the agent go")
    agent.start()
    joined(other, agent)
    one_step(other)
    assert other.scheduler.reset_prefix_cache(reset_connector=True)
    link._path = path
    joined(first, agent)
    first.add("local hit", PROMPT, 4)
    first.run()
    assert agent.status()["blocks_stored"] == 0, "blocks of older weights are stored"
    assert first.scheduler.reset_prefix_cache()
    first.add("fresh", PROMPT, 4)
    first.run()
    assert agent.status()["blocks_stored"] == 100 // BLOCK
    clean(first, agent, other)


STOPPED_S = 0.06  # of every 0.12 s


def run_while_it_stops(world: World, agent: AgentProcess) -> None:
    """Run an engine whose agent stands still half of the time, first of all when it is asked."""
    while world.scheduler.has_requests():
        for signal in (agent.freeze, agent.thaw):
            signal()
            end = time.monotonic() + STOPPED_S
            while world.scheduler.has_requests() and time.monotonic() < end:
                world.step()
    agent.thaw()
    world.settle()


def test_an_agent_that_stands_still_half_of_the_time_answers_every_look_up(worlds: Any, agent: AgentProcess) -> None:
    """The bounds are those of all these tests: on a slow machine it stands still for longer."""
    assert Options().lookup_grace_ms / 1e3 >= 3 * STOPPED_S
    world = worlds(extra={"lookup_wait_ms": 1, "pin_percent": 40}, blocks=256)
    prompts = {str(i): [(7 * i + j) % 400 + 5 for j in range(100)] for i in range(6)}
    counts = world.side.counts
    seen = []
    for name in ("cold", "quiet", "late"):
        before = counts.lookups, counts.tokens_loaded
        for i, prompt in prompts.items():
            world.add(f"{name} {i}", prompt, 10)
        if name == "late":
            run_while_it_stops(world, agent)
        world.run()
        seen.append((counts.lookups - before[0], counts.tokens_loaded - before[1]))
        assert world.scheduler.reset_prefix_cache()
    assert counts.lookups_unanswered == 0, "an agent that is late is not waited for"
    assert seen[1:] == [(6, 6 * 96)] * 2, "what a quiet agent promised and what a late one did"
    assert all(world.outputs[f"late {i}"] == world.outputs[f"cold {i}"] for i in prompts)
    clean(world, agent)


@pytest.mark.parametrize("v2", [False, True])
def test_a_killed_agent_costs_a_miss_and_the_next_one_fills_again(worlds: Any, agent: AgentProcess, v2: bool) -> None:
    world = worlds(v2=v2)
    world.add("cold", PROMPT, 10)
    world.run()
    agent.kill()
    world.scheduler.reset_prefix_cache()
    world.add("without", PROMPT, 10)
    world.run()
    assert world.outputs["without"] == world.outputs["cold"]
    agent.start()
    joined(world, agent)
    world.add("local hit", PROMPT, 10)  # its blocks are the engine's own: they are saved nevertheless
    world.run()
    assert agent.status()["blocks_stored"] >= 96 // BLOCK
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 10)
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert agent.status()["blocks_loaded"] == 96 // BLOCK
    clean(world, agent)


def test_a_load_waits_for_the_step_in_flight(worlds: Any, agent: AgentProcess) -> None:
    """The step whose request was just aborted may still write to blocks that a load is to fill."""
    world = worlds()
    world.add("cold", PROMPT, 10)
    world.run()
    world.scheduler.reset_prefix_cache()
    before = agent.status()["blocks_loaded"]
    world.add("warm", PROMPT, 10)
    launch_load(world)
    with pytest.raises(AssertionError, match="did not come"):
        eventually(lambda: agent.status()["blocks_loaded"] > before, "a load before the step's end", patience_s=0.5)
    world.run()
    assert agent.status()["blocks_loaded"] == before + 96 // BLOCK
    clean(world, agent)


def test_an_idle_engine_is_at_the_next_agent_after_some_steps(worlds: Any, agent: AgentProcess) -> None:
    world = worlds()
    agent.kill()
    agent.start()
    joined(world, agent)
    world.add("cold", PROMPT, 10)
    world.run()
    assert agent.status()["blocks_stored"] >= 96 // BLOCK


def test_the_engine_starts_without_an_agent(worlds: Any, agent: AgentProcess) -> None:
    agent.kill()
    world = worlds(extra={"start_wait_ms": 100})
    world.add("alone", PROMPT, 10)
    world.run()
    assert world.outputs["alone"] == world.sequences["alone"].tokens[100:110]
    agent.start()
    joined(world, agent)
    world.add("again", PROMPT, 10)
    world.run()
    assert agent.status()["blocks_stored"] >= 96 // BLOCK


def test_a_new_agent_is_given_what_a_running_request_has(worlds: Any, agent: AgentProcess) -> None:
    world = worlds()
    world.add("long", PROMPT, 150)
    while len(world.outputs["long"]) < 50:
        world.step()
    agent.kill()
    eventually(lambda: alone(world), "an engine that saw the agent go")
    agent.start()
    joined(world, agent)
    world.run()
    assert agent.status()["blocks_stored"] == (100 + 149) // BLOCK
    clean(world, agent)


def test_no_step_is_signalled_while_the_engine_sleeps(
    worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a CUDA clock is of vLLM's allocator, which unmaps it."""
    world, ended = worlds(), list[int]()
    world.add("cold", PROMPT, 10)
    world.run()
    worker = world.workers[0]
    clock = worker._worker._clock
    signal = clock.end

    def end(step: int) -> None:
        ended.append(step)
        signal(step)

    monkeypatch.setattr(clock, "end", end)
    worker.unregister_kv_caches()
    for _ in range(3):
        world.step()
    assert ended == []
    worker.restore_kv_caches()
    world.step()
    assert ended
    clean(world, agent)


@pytest.mark.parametrize("shut", [False, True])
def test_memory_is_kept_where_no_fence_came_in_time(
    worlds: Callable[..., World], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, caplog: Any, shut: bool
) -> None:
    """A deadline is no fence: a stopped agent may still access the KV caches when it continues."""
    monkeypatch.setattr("kvagent.vllm.worker.side.DRAIN_S", 0.05)
    monkeypatch.setattr(worker_memory, "_retained", [])  # without what other tests left there
    world = worlds()
    world.add("cold", PROMPT, 10)
    world.run()
    worker = world.workers[0]
    memory, caches, sessions = worker._memory, dict(worker._kv_caches), worker._worker.fence()
    closed: list[str] = []
    monkeypatch.setattr(type(memory), "close", lambda _: closed.append("memory"))
    side = worker._worker
    agent.freeze()
    try:
        if shut:
            worker.shutdown()
        else:
            worker.unregister_kv_caches()
        assert not sessions(), "a session was closed, which tells the agent that its end is no fence any more"
        assert closed == [], "memory was given up without a fence"
        (one,) = worker_memory._retained
        assert one.worker is side
        assert one.memory[1] is memory
        assert one.memory[0] == caches
        assert worker_memory.release_fenced() == 1
        assert "kept until it does" in caplog.text
    finally:
        agent.thaw()
    if shut:
        worker_memory._retained.clear()
        worker._worker = side  # for the world's own end
        side.leave()
        worker._worker = None
        return

    def fenced() -> bool:
        worker._worker.begin(StepPlan(idle=True))
        worker._worker.results()
        return worker_memory.release_fenced() == 0

    eventually(fenced, "the fence")
    assert closed == ["memory"]
