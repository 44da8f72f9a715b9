"""The connector under the real schedulers and drivers, with a live agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import AgentProcess, eventually
from tests.vllm.setting import BLOCK
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [i % 400 + 5 for i in range(100)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("v2", [False, True])
def test_what_was_saved_is_loaded_after_the_engine_forgot_it(
    worlds: Any, agent: AgentProcess, v2: bool, asynchronous: bool
) -> None:
    world = worlds(v2=v2, asynchronous=asynchronous, depth=2 if asynchronous else 1)
    world.add("cold", PROMPT, 40)
    world.run()
    assert agent.status()["blocks_stored"] == (100 + 39) // BLOCK
    assert world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 40)
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"] == world.sequences["cold"].tokens[100:140]
    assert agent.status()["blocks_loaded"] == 96 // BLOCK
    assert world.side.counts.tokens_loaded == 96
    clean(world, agent)


def test_the_plugin_makes_the_name_known(model: Path, agent: AgentProcess) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert KVConnectorFactory.get_connector_class_by_name("KVAgentConnector").__name__ == "KVAgentConnector"


def test_as_a_child_of_multi_connector(worlds: Any, agent: AgentProcess) -> None:
    from kvagent.vllm import plugin

    plugin.register()
    child = {
        "kv_connector": "KVAgentConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket_dir": str(agent.folder), "min_load_tokens": BLOCK, "pin_percent": 25},
    }  # fmt: skip
    multi = {
        "kv_connector": "MultiConnector", "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [child]},
    }  # fmt: skip
    world = worlds(transfer=multi)
    world.add("cold", PROMPT, 10)
    world.run()
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 10)
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert agent.status()["blocks_loaded"] == 96 // BLOCK
    assert not world.gpu.bad


def test_a_second_engine_loads_what_the_first_saved(worlds: Any, agent: AgentProcess) -> None:
    first, second = worlds(), worlds(v2=False)
    first.add("cold", PROMPT, 10)
    first.run()
    second.add("warm", PROMPT, 10)
    second.run()
    assert second.outputs["warm"] == first.outputs["cold"]
    assert agent.status()["blocks_loaded"] == 96 // BLOCK
    clean(second, agent)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_every_layout(worlds: Any, agent: AgentProcess, layout: str) -> None:
    world = worlds(layout=layout)
    world.add("cold", PROMPT, 10)
    world.run()
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 10)
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert agent.status()["blocks_loaded"] == 96 // BLOCK
    segments = world.workers[0]._memory.segments[0]
    assert len(segments) == {"LBNHC": 4, "LBHNC": 4, "LHBNC": 8, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}[layout]
    clean(world, agent)


@pytest.mark.parametrize(("ranks", "window"), [(2, 0), (1, 40), (2, 40)])
def test_ranks_and_groups(worlds: Any, agent: AgentProcess, ranks: int, window: int) -> None:
    # Blocks behind the window are given back while they wait to be saved, so there must be room for all at once.
    world = worlds(ranks=ranks, window=window, extra={"pin_percent": 40})
    if window and not world.side._whole_failures:
        pytest.skip("vLLM 0.29 cannot be told that a load of several groups failed: such models save, and do not load")
    world.add("cold", PROMPT, 40)
    world.run()
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 40)
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert world.side.counts.tokens_loaded == 96
    clean(world, agent)


def test_the_last_token_is_never_promised(worlds: Any, agent: AgentProcess) -> None:
    world = worlds()
    world.add("cold", PROMPT[: 4 * BLOCK], 10)
    world.run()
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT[: 4 * BLOCK], 10)
    world.run()
    assert world.side.counts.tokens_promised == 3 * BLOCK
    assert world.outputs["warm"] == world.outputs["cold"]


def test_pins_go_when_the_prefix_cache_is_reset(worlds: Any, agent: AgentProcess) -> None:
    world = worlds()
    agent.freeze()
    try:
        world.add("cold", PROMPT, 4)
        while world.scheduler.requests:
            world.step()
        assert world.side.blocks.saving == 100 // BLOCK
        assert world.side.pending()
        assert world.scheduler.reset_prefix_cache()
        assert world.side.blocks.saving == 0
        words = world.workers[0]._sync.words
        assert any(words.revoked(i) for i in range(words.revokes)), "the agent would store blocks that are reused"
    finally:
        agent.thaw()
    world.run()
    assert agent.status()["blocks_stored"] == 0
    world.add("again", PROMPT, 4)
    world.run()
    assert agent.status()["blocks_stored"] == 100 // BLOCK
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
    eventually(lambda: agent.status()["engines"] == 1 and agent.status()["regions"] >= 2, "the engine at the new agent")
    world.add("local hit", PROMPT, 10)  # its blocks are the engine's own: they are saved nevertheless
    world.run()
    assert agent.status()["blocks_stored"] >= 96 // BLOCK
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 10)
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert agent.status()["blocks_loaded"] == 96 // BLOCK
    clean(world, agent)


def test_a_load_that_a_frozen_agent_keeps_is_given_up_and_its_blocks_stay_pinned(
    worlds: Any, agent: AgentProcess
) -> None:
    world = worlds(extra={"load_deadline_ms": 50})
    world.add("cold", PROMPT, 10)
    world.run()
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 10)
    launch_load(world)
    assert world.side.blocks.loading == 96 // BLOCK
    agent.freeze()  # the load waits for the step in flight
    try:
        eventually(lambda: "warm" in _one_step(world).reasons, "the end of the request")
        assert world.outputs["warm"] == world.outputs["cold"]
        assert world.side.counts.loads_late == 1
        assert world.side.blocks.loading == 96 // BLOCK
        assert world.scheduler.has_requests()
    finally:
        agent.thaw()
    world.run()
    clean(world, agent)


def launch_load(world: World) -> None:
    """Launches steps until one has a load, which waits for that step to end."""
    world.launch()
    while not world.side.counts.loads:
        _one_step(world)


def _one_step(world: World) -> World:
    world.complete()
    world.launch()
    return world


def test_a_block_that_is_gone_is_computed_and_not_promised_again(worlds: Any, agent: AgentProcess) -> None:
    world = worlds()
    world.add("cold", PROMPT, 10)
    world.run()
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 10)
    launch_load(world)
    world.side._presence.session.reset()  # what was promised is stale before the load begins
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert world.side.counts.loads_failed == 1
    assert world.side.counts.loads == 1
    clean(world, agent)


def test_reset_cache_forgets_what_was_stored(worlds: Any, agent: AgentProcess) -> None:
    world = worlds()
    world.add("cold", PROMPT, 10)
    world.run()
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    world.add("again", PROMPT, 10)
    world.run()
    assert world.side.counts.loads == 0
    assert world.outputs["again"] == world.outputs["cold"]
    clean(world, agent)


def test_a_load_waits_for_the_step_in_flight(worlds: Any, agent: AgentProcess) -> None:
    """Blocks that a load is to fill may still be written by the step whose request was aborted just before."""
    world = worlds()
    world.add("cold", PROMPT, 10)
    world.run()
    world.scheduler.reset_prefix_cache()
    before = agent.status()["blocks_loaded"]
    world.add("warm", PROMPT, 10)
    launch_load(world)
    assert world.workers[0]._worker.busy()
    with pytest.raises(AssertionError, match="did not come"):
        eventually(lambda: agent.status()["blocks_loaded"] > before, "a load before the step's end", patience_s=0.5)
    world.run()
    assert agent.status()["blocks_loaded"] == before + 96 // BLOCK
    clean(world, agent)


def test_a_preempted_request_begins_again(worlds: Any, agent: AgentProcess) -> None:
    """Its saves were revoked; resumed, its blocks are saved from the first on, wherever they lie now."""
    world = worlds(blocks=20, extra={"pin_percent": 10})
    for name in ("a", "b", "c"):
        world.add(name, [ord(name) * 3 + i % 50 for i in range(90)], 60)
    world.run()
    assert world.preempted > 0
    for name in ("a", "b", "c"):
        assert world.outputs[name] == world.sequences[name].tokens[90:150]
    clean(world, agent)


def test_the_engine_starts_without_an_agent(worlds: Any, agent: AgentProcess) -> None:
    agent.kill()
    world = worlds()
    world.add("alone", PROMPT, 10)
    world.run()
    assert world.outputs["alone"] == world.sequences["alone"].tokens[100:110]
    agent.start()
    eventually(lambda: agent.status()["regions"] >= 2, "the engine at the agent")
    world.add("again", PROMPT, 10)
    world.run()
    assert agent.status()["blocks_stored"] >= 96 // BLOCK


def test_a_protocol_1_session_is_served(worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvagent.session import Session

    connect = Session.connect.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Session, "connect", classmethod(lambda cls, path, s: connect(cls, path, s, (1, 1))))
    world = worlds()
    world.add("cold", PROMPT, 10)
    world.run()
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 10)
    world.run()
    assert world.side.counts.tokens_loaded == 96
    clean(world, agent)


def test_abort_while_loading_gives_everything_back(worlds: Any, agent: AgentProcess) -> None:
    world = worlds()
    world.add("cold", PROMPT, 10)
    world.run()
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 10)
    launch_load(world)
    world.abort("warm")
    world.run()
    clean(world, agent)


@pytest.mark.parametrize(
    ("more", "saved", "loads"),
    [
        ({"kv_role": "kv_producer"}, True, True),
        ({"kv_role": "kv_consumer"}, False, True),
    ],
)
def test_roles(worlds: Any, agent: AgentProcess, more: dict[str, Any], saved: bool, loads: bool) -> None:
    world = worlds(transfer=more)
    world.add("cold", PROMPT, 10)
    world.run()
    assert (agent.status()["blocks_stored"] > 0) == saved
    assert world.side._may_load == loads


def test_what_the_salt_keeps_apart_is_not_shared(worlds: Any, agent: AgentProcess) -> None:
    world = worlds()
    world.add("one", PROMPT, 4, cache_salt="one")
    world.run()
    world.scheduler.reset_prefix_cache()
    world.add("two", PROMPT, 4, cache_salt="two")
    world.run()
    assert world.side.counts.loads == 0
    world.scheduler.reset_prefix_cache()
    world.add("one again", PROMPT, 4, cache_salt="one")
    world.run()
    assert world.side.counts.loads == 1
    clean(world, agent)


def test_counters_reach_vllms_metrics(worlds: Any, agent: AgentProcess) -> None:
    from prometheus_client import REGISTRY
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    world = worlds()
    prom = KVConnectorProm(world.config, ["engine"], {0: ["0"]})
    assert REGISTRY.get_sample_value("vllm:kvagent_saves_stored_total", {"engine": "0"}) == 0
    world.add("cold", PROMPT, 10)
    world.run()
    stats = type(world.scheduler.connector).build_kv_connector_stats(world.side.counted())
    assert not stats.is_empty()
    prom.observe(stats.data)
    assert REGISTRY.get_sample_value("vllm:kvagent_saves_stored_total", {"engine": "0"}) == 96 // BLOCK


def test_what_cannot_be_served_is_refused_at_the_start(model: Path, agent: AgentProcess) -> None:
    with pytest.raises(ValueError, match="sockets: no such option"):
        World(model, str(agent.folder), extra={"sockets": 1})


def test_a_new_agent_is_given_what_a_running_request_has(worlds: Any, agent: AgentProcess) -> None:
    world = worlds()
    world.add("long", PROMPT, 150)
    while len(world.outputs["long"]) < 50:
        world.step()
    agent.kill()
    world.step()
    agent.start()
    eventually(lambda: agent.status()["regions"] >= 2, "the engine at the new agent")
    world.run()
    assert agent.status()["blocks_stored"] == (100 + 149) // BLOCK
    clean(world, agent)
