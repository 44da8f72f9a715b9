"""The connector in the real schedulers and drivers, with a running agent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.counters import GAUGES
from tests.vllm.engine import documented
from tests.vllm.setting import BLOCK
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess

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


@pytest.mark.parametrize("beside", [False, True])
def test_as_a_child_of_multi_connector(worlds: Any, agent: AgentProcess, beside: bool) -> None:
    """Also beside a connector with handshakes: MultiConnector passes the first one's to all."""
    import kvagent.vllm

    kvagent.vllm.register()
    sibling = {"kv_connector": "Sibling", "kv_connector_module_path": "tests.vllm.sibling", "kv_role": "kv_both"}
    patient = {
        "lookup_grace_ms": 10_000, "lookup_age_ms": 10_000, "lookup_wait_ms": 100, "start_wait_ms": 20_000,
    }  # fmt: skip
    options = {"socket_dir": str(agent.folder), "min_load_tokens": BLOCK, "pin_percent": 25} | patient
    child = {"kv_connector": "KVAgentConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
    multi = {
        "kv_connector": "MultiConnector", "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [child, sibling] if beside else [child]},
    }  # fmt: skip
    world = worlds(transfer=multi)
    assert [one.greeted for one in world.scheduler.connector._connectors[1:]] == [1] * beside
    world.add("cold", PROMPT, 10)
    world.run()
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 10)
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert agent.status()["blocks_loaded"] == 96 // BLOCK
    clean(world, agent)


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
    segments = world.workers[0]._memory.held[0][0]
    assert len(segments) == {"LBNHC": 4, "LBHNC": 4, "LHBNC": 8, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}[layout]
    clean(world, agent)


@pytest.mark.parametrize(("ranks", "window", "scale"), [(2, 0, 1), (1, 40, 1), (2, 40, 1), (1, 40, 2)])
def test_ranks_and_groups_and_hashes_of_half_a_block(
    worlds: Any, agent: AgentProcess, ranks: int, window: int, scale: int
) -> None:
    # Blocks that left the window are freed while they wait to be saved, so there must be room for
    # all at once.
    world = worlds(ranks=ranks, window=window, scale=scale, extra={"pin_percent": 40})
    world.add("cold", PROMPT, 40)
    world.run()
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT, 40)
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert world.side.counts.tokens_loaded == 96
    clean(world, agent)


def test_the_last_block_is_loaded_with_others_and_never_alone(worlds: Any, agent: AgentProcess) -> None:
    """vLLM computes the last token again."""
    world = worlds()
    world.add("cold", PROMPT[: 4 * BLOCK], 10)
    world.run()
    world.scheduler.reset_prefix_cache()
    world.add("warm", PROMPT[: 4 * BLOCK], 10)
    world.run()
    assert world.side.counts.tokens_promised == 4 * BLOCK
    world.add("own", PROMPT[: 4 * BLOCK], 10)
    world.run()
    assert world.side.counts.tokens_promised == 4 * BLOCK
    assert world.outputs["own"] == world.outputs["warm"] == world.outputs["cold"]


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


@pytest.mark.parametrize(("role", "saved"), [("kv_producer", True), ("kv_consumer", False)])
def test_roles(worlds: Any, agent: AgentProcess, role: str, saved: bool) -> None:
    world = worlds(transfer={"kv_role": role})
    world.add("cold", PROMPT, 10)
    world.run()
    assert (agent.status()["blocks_stored"] > 0) == saved


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_policy_by_which_requests_fail_is_warned_about(
    worlds: Any, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    """``fail`` is vLLM's default."""
    worlds(transfer={"kv_load_failure_policy": policy})
    said = [record.message for record in caplog.records if "kv_load_failure_policy" in record.message]
    assert len(said) == (policy == "fail")
    assert all('Add "kv_load_failure_policy": "recompute"' in one for one in said)


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
    exported = {one.name: one.samples for one in REGISTRY.collect() if one.name.startswith("vllm:kvagent_")}
    assert set(exported) == documented()
    assert {sample.value for samples in exported.values() for sample in samples if "total" in sample.name} == {0}
    counted = {*vars(world.side.counts), *(f"worker_{one.name}" for one in fields(world.workers[0]._worker.counts))}
    counted |= {*GAUGES, "errors", "worker_errors"}
    assert {f"vllm:kvagent_{name}" for name in counted} == set(exported), "something that is counted is not exported"
    world.add("cold", PROMPT, 10)
    world.run()
    stats = type(world.scheduler.connector).build_kv_connector_stats(dict(vars(world.side.counts)))
    assert not stats.is_empty()
    prom.observe(stats.data)
    assert REGISTRY.get_sample_value("vllm:kvagent_saves_stored_total", {"engine": "0"}) == 96 // BLOCK


def test_log_lines_appear_once_where_vllms_do(tmp_path: Path) -> None:
    """With vLLM's default configuration, and with a user's own of these loggers."""
    if version("vllm") < "0.33":
        pytest.skip("SKIPPED: an import configures vLLM's loggers, before the paths are set")
    paths = [tmp_path / name for name in ("vllm", "root", "vllm root")]
    for path in paths:
        loggers = {name: {"handlers": ["out"], "level": "INFO", "propagate": False} for name in path.name.split()}
        path.write_text(json.dumps({
            "version": 1, "disable_existing_loggers": False, "formatters": {"plain": {"format": "mine: %(message)s"}},
            "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "plain"}},
            "root": loggers.pop("root", {}), "loggers": loggers,
        }))  # fmt: skip
    code = """if True:
        import logging, os, sys, vllm.logger, kvagent.vllm.link
        for path in sys.argv[1:]:  # each in a process of its own
            if not os.fork():
                if path:
                    os.environ["VLLM_LOGGING_CONFIG_PATH"] = path
                vllm.logger._configure_vllm_root_logger()  # since 0.33 no import does it
                before = logging.getLogger().handlers[:]
                kvagent.vllm.link.log.info("%s: registered", "rank 0")
                assert logging.getLogger().handlers == before
                os._exit(0)
            assert os.wait()[1] == 0
    """
    env = os.environ | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    command = [sys.executable, "-c", code, "", *map(str, paths)]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    lines = [line for line in run.stderr.splitlines() if "registered" in line]
    assert lines[1:] == ["mine: kvagent: rank 0: registered"] * 3, run.stderr
    assert re.fullmatch(r".*INFO \d\d-\d\d .*\[\S+:\d+\] kvagent: rank 0: registered", lines[0]), lines


def test_what_cannot_be_served_is_refused_at_the_start(model: Path, agent: AgentProcess) -> None:
    with pytest.raises(ValueError, match="sockets: no such option"):
        World(model, str(agent.folder), extra={"sockets": 1})
