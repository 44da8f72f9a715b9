"""Loads that a step waits for layer by layer: each layer reads only what has arrived, and whatever
happens between two layers, no output depends on bytes that did not come.

The tests of whole loads run with ``layerwise`` too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.options import OptionError, parse
from tests.agent import eventually
from tests.holding import HoldingAgent
from tests.sides import waits as step_waits
from tests.vllm.test_sync_loads import (  # noqa: F401  they are run here too
    PROMPT,
    SETTINGS,
    SYNC,
    cold,
    promised,
    right,
    spoil,
    test_a_block_that_changes_between_promise_and_load,
    test_a_frozen_agent_costs_one_bounded_wait,
    test_a_preemption_before_the_outcome_is_known,
    test_a_request_of_one_token,
    test_an_abort_before_the_outcome_is_known,
    test_an_agent_that_is_killed_between_promise_and_load,
    test_random_requests_of_which_some_loads_fail,
    test_the_policy_fail_ends_the_request,
    test_the_step_that_computes_waits_for_the_load,
)
from tests.vllm.world import World, clean, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LAYER = "model.layers.{}.attn"
ONE_RANK = [setting for setting, more in SETTINGS.items() if "ranks" not in more]
everywhere = pytest.mark.parametrize("setting", ONE_RANK)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[HoldingAgent]:
    one = HoldingAgent(tmp_path / "layerwise")
    yield one
    one.close()


@pytest.fixture
def worlds(worlds: Any) -> Any:
    """Creates worlds whose steps wait layer by layer, unless the test says otherwise."""
    return lambda **more: worlds(**(more | {"extra": {"layerwise": True} | more.get("extra", {})}))


def landed(world: World) -> list[int]:
    """Return how many stages of each load at the agent have arrived."""
    layers = step_waits(world.workers[0]._worker).layers
    return [layers._landed[word] for word in layers._words.values()]


def middle(world: World, agent: HoldingAgent, act: Callable[[], None]) -> list[str]:
    """Hold the next load's second stage, and call ``act`` when the second layer of four is about to
    wait. Return the layers that have computed by then.
    """
    computed: list[str] = []
    worker = world.workers[0]
    wait = worker.wait_for_layer_load
    agent.hold(1)

    def waits(layer: str) -> None:
        if layer == LAYER.format(1) and computed == [LAYER.format(0)]:
            agent.holds()
            assert landed(world) == [1]
            computed.append("-")
            act()
        wait(layer)
        if not computed:
            computed.append(layer)

    worker.wait_for_layer_load = waits
    return computed


def release_when_it_waits(world: World, agent: HoldingAgent) -> None:
    """Release the held copies as soon as the worker waits, and not before."""
    worker = world.workers[0]._worker
    poll = worker.poll

    def polled() -> None:
        worker.poll = poll
        agent.release()
        poll()

    worker.poll = polled


@everywhere
def test_the_first_layer_computes_before_the_last_has_arrived(worlds: Any, agent: HoldingAgent, setting: str) -> None:
    world = cold(worlds, setting)
    computed = middle(world, agent, lambda: release_when_it_waits(world, agent))
    world.add("warm", PROMPT, 10)
    world.run()
    right(world)
    assert computed == [LAYER.format(0), "-"]
    counts = world.side.counts
    assert (counts.loads, counts.loads_sync, counts.loads_sync_failed, counts.tokens_loaded) == (1, 1, 0, 96)
    clean(world, agent)


@everywhere
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_an_agent_that_goes_between_two_layers(worlds: Any, agent: HoldingAgent, setting: str, how: str) -> None:
    """It costs one bounded wait in that step, and then all layers go on."""
    world = cold(worlds, setting, extra={"sync_wait_ms": 10_000})
    waits = step_waits(world.workers[0]._worker)

    def goes() -> None:
        getattr(agent, how)()
        world.wait_at_most(0.05)
        waits._wait_s = waits._left_s = 0.1

    computed = middle(world, agent, goes)
    world.add("warm", PROMPT, 10)
    eventually(lambda: computed[1:] or not stepped(world), "a load")
    assert how == "kill" or waits._left_s <= 0
    assert not waits._waited
    world.add("warm2", PROMPT, 10)
    eventually(lambda: {"warm", "warm2"} <= set(stepped(world).reasons), "the end of the requests")
    right(world)
    assert computed == [LAYER.format(0), "-"]
    assert world.side.counts.loads_sync_failed >= 1
    if how == "freeze":
        assert world.side.blocks.loading > 0, "a frozen agent may still write"
        agent.thaw()
        agent.release()
    else:
        agent.start()
        joined(world, agent)
    world.run()
    clean(world, agent)
    world.add("after", PROMPT, 10)
    world.run()
    right(world)
    clean(world, agent)


def stepped(world: World) -> World:
    world.settle()
    world.launch()
    return world


@everywhere
def test_a_stage_that_changes_after_the_first_layer(worlds: Any, agent: HoldingAgent, setting: str) -> None:
    """The agent compares the bytes that it copies with those that it verified, stage by stage."""
    world = cold(worlds, setting)

    def change() -> None:
        spoil(world, agent, 20, layer=3)
        agent.release()

    computed = middle(world, agent, change)
    world.add("warm", PROMPT, 10)
    world.run()
    right(world)
    assert computed == [LAYER.format(0), "-"]
    assert world.side.counts.loads_sync_failed == 1
    world.add("after", PROMPT, 10)
    world.run()
    right(world)
    clean(world, agent)


def test_layers_that_do_not_wait_are_loaded_before_the_forward_pass(worlds: Any, agent: HoldingAgent) -> None:
    silent = [LAYER.format(2), LAYER.format(3)]
    world = cold(worlds, "v2-async", silent=silent)
    stages = world.workers[0]._memory.stages
    assert (stages.first, stages.count, dict(stages.needed)) == (1, 3, {LAYER.format(0): 2, LAYER.format(1): 3})
    agent.hold(0)
    release_when_it_waits(world, agent)
    world.add("warm", PROMPT, 10)
    world.run()
    right(world)
    assert (world.side.counts.loads_sync, world.side.counts.loads_sync_failed) == (1, 0)
    clean(world, agent)


def test_a_layer_that_was_expected_to_wait(worlds: Any, agent: HoldingAgent, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes that it read may not have arrived: the load has failed, and later ones are whole."""
    world = cold(worlds, "v2-async")
    world.layers.remove(LAYER.format(2))
    middle(world, agent, lambda: release_when_it_waits(world, agent))  # else all may arrive before the first layer
    world.add("warm", PROMPT, 10)
    world.run()
    right(world)
    assert world.side.counts.loads_sync_failed == 1
    assert "did not wait" in caplog.text
    assert world.scheduler.reset_prefix_cache()
    world.add("after", PROMPT, 10)
    world.run()
    right(world)
    assert (world.side.counts.loads_sync, world.side.counts.loads_sync_failed) == (2, 1)
    assert step_waits(world.workers[0]._worker).layers._words == {}
    clean(world, agent)


def test_more_loads_than_words(worlds: Any, agent: HoldingAgent) -> None:
    world = cold(worlds, "v2-async")
    layers = step_waits(world.workers[0]._worker).layers
    layers._free[:] = layers._free[:1]
    for name in ("a", "b", "c"):  # of one schedule()
        world.add(name, PROMPT, 10)
        promised(world, name)
    world.run()
    right(world)
    assert world.side.counts.loads_sync == 3
    assert len(layers._free) == 1
    clean(world, agent)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC", "LHBNC"])
def test_it_shares_with_engines_that_wait_for_whole_loads(
    worlds: Any, agent: HoldingAgent, layout: str, *, first: bool
) -> None:
    """A block has the same bytes, however its segments are cut."""
    one = cold(worlds, "v2-async", layout=layout, extra={"layerwise": first})
    other = worlds(extra=SYNC | {"layerwise": not first}, layout=layout, v2=True)
    other.gpu.taints = True
    other.add("warm", PROMPT, 10)
    other.run()
    right(other)
    assert (other.side.counts.loads_sync, other.side.counts.loads_sync_failed) == (1, 0)
    clean(one, agent, other)


def test_where_no_step_waits_layer_by_layer(worlds: Any, agent: HoldingAgent) -> None:
    with pytest.raises(OptionError, match="layerwise: true, allowed only where load_mode is sync or auto"):
        parse({"layerwise": True, "load_mode": "async"})
    with pytest.raises(OptionError, match="layerwise: true, allowed only where share_tp and share_pp are 0"):
        parse({"layerwise": True, "load_mode": "auto", "share_tp": 2})
    world = worlds(extra={"load_mode": "auto", "weights_fixed": True, "layerwise": True}, window=40)
    assert world.workers[0]._memory.stages is None


def test_only_layerwise_needs_piecewise_graphs() -> None:
    from kvagent.vllm import KVAgentConnector

    assert KVAgentConnector.requires_piecewise_for_cudagraph({"load_mode": "sync", "layerwise": True})
    assert not KVAgentConnector.requires_piecewise_for_cudagraph({"load_mode": "sync"})
    assert not KVAgentConnector.requires_piecewise_for_cudagraph({})
