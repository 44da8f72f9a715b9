"""Models that the connector cannot serve, in the real schedulers and drivers, and in a real engine:
they are served uncached, or their start ends on request.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvagent.cuda import CudaError
from kvagent.vllm import KVAgentConnector
from kvagent.vllm import connector as calls
from kvagent.vllm.geometry import Unsupported, node
from kvagent.vllm.link import Link
from kvagent.vllm.options import OptionError
from kvagent.vllm.worker import memory as worker_memory
from kvagent.vllm.worker import side as worker_side
from kvagent.vllm.worker.memory import memory as plain
from kvagent.vllm.worker.side import make_clock
from tests.agent import eventually
from tests.vllm import engine as real
from tests.vllm.engine import PROMPTS
from tests.vllm.setting import LAYERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent import AgentProcess

PROMPT = [i % 400 + 5 for i in range(100)]
THREE_HEADS = {"share_tp": 3}  # of which the model has two, so it cannot be split
WHY = "share_tp: 3, and 2 KV heads: one must divide the other"


def uncached(agent: AgentProcess) -> list[str]:
    """Return the reasons of the engines that the agent lists as uncached."""
    return [
        one["identity"]["uncached"] for one in agent.status()["engine_list"] if "uncached" in (one["identity"] or {})
    ]


def stats_of(connector: Any) -> dict[str, Any]:
    connector._next_stats = 0.0
    stats = connector.get_kv_connector_stats()
    return {} if stats is None else stats.data


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings that an engine is served uncached."""
    return [message for record in caplog.records if "UNCACHED" in (message := record.getMessage())]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("v2", [False, True])
def test_an_engine_that_cannot_be_served_computes_everything(
    worlds: Any, agent: AgentProcess, caplog: pytest.LogCaptureFixture, v2: bool, asynchronous: bool
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.kvagent"):
        world = worlds(v2=v2, asynchronous=asynchronous, depth=2 if asynchronous else 1, extra=THREE_HEADS)
        world.add("cold", PROMPT, 40)
        world.run()
        assert world.scheduler.reset_prefix_cache(reset_connector=True)
        world.add("warm", PROMPT, 40)
        world.run()
    assert world.outputs["warm"] == world.outputs["cold"] == world.sequences["cold"].tokens[100:140]
    said = warned(caplog)
    assert len(said) == 1, said
    assert WHY in said[0]
    assert '"on_unsupported": "fail"' in said[0]
    assert world.side is None
    assert [worker._worker for worker in world.workers] == [None]
    assert not world.scheduler.has_requests()
    eventually(lambda: uncached(agent) == [WHY], "the reason in the agent's list")
    status = agent.status()
    assert (status["blocks_stored"], status["lookups"], status["regions"]) == (0, 0, 0)
    for connector in (world.scheduler.connector, *world.workers):
        assert stats_of(connector) in ({"uncached": 1}, {})  # vLLM's worker driver may have asked
        assert stats_of(connector) == {}, "it is said once"
        assert connector._told_uncached


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_the_start_ends_on_request(worlds: Any, role: KVConnectorRole) -> None:
    with pytest.raises(Unsupported, match=WHY):
        worlds(extra=THREE_HEADS | {"on_unsupported": "fail"})
    world = worlds()
    extra = world.config.kv_transfer_config.kv_connector_extra_config
    extra |= THREE_HEADS | {"on_unsupported": "fail"}
    with pytest.raises(Unsupported, match=WHY):
        KVAgentConnector(world.config, role, world.kv)


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_model_that_generates_by_diffusion_is_not_served(
    worlds: Any, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM counts a canvas as computed though its tokens may have attended to later ones."""
    world = worlds()
    world.config.kv_transfer_config.kv_connector_extra_config |= {"on_unsupported": "fail"}
    monkeypatch.setitem(vars(world.config.model_config), "is_diffusion", True)  # a cached property
    with pytest.raises(Unsupported, match="diffusion"):
        KVAgentConnector(world.config, role, world.kv)


@pytest.mark.parametrize("extra", [{"share_pp": LAYERS + 1}, {"share_tq": 3}, {"share_tp": 300}, {"load_mode": "slow"}])
def test_a_mistake_in_the_options_ends_the_start(worlds: Any, extra: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        worlds(extra=extra)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_alone_finds_the_reason_stops_all(
    worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    asynchronous: bool,
) -> None:  # fmt: skip
    """The scheduler and rank 0 see nothing amiss: they have begun to save when rank 1 reports."""
    ranks: list[int] = []

    def memory(*args: Any, **more: Any) -> Any:
        ranks.append(len(ranks))
        if len(ranks) == 2:
            raise Unsupported("layer x: its KV cache is not a single tensor")
        return plain(*args, **more)

    monkeypatch.setattr("kvagent.vllm.connector.memory", memory)
    with caplog.at_level(logging.WARNING, "vllm.kvagent"):
        world = worlds(ranks=2, asynchronous=asynchronous, depth=2 if asynchronous else 1)
        free = world.free_blocks()
        for i in range(4):
            world.add(f"r{i}", [i + 5, *PROMPT], 40)
        world.run()
        world.add("again", [5, *PROMPT], 40)
        world.run()
    assert world.outputs["again"] == world.outputs["r0"]
    assert world.free_blocks() == free
    assert world.side is None
    assert [worker._worker for worker in world.workers] == [None, None]
    said = warned(caplog)
    assert ["rank 1: layer x" in one for one in said] == [True]
    assert not world.scheduler.has_requests()
    eventually(lambda: uncached(agent) == ["rank 1: layer x: its KV cache is not a single tensor"], "the reason")
    assert agent.status()["regions"] == 0


@pytest.mark.parametrize(
    "error",
    [
        CudaError("libcuda.so.1 cannot be opened"), OSError(28, "No space left on device"),
        RuntimeError("unable to allocate shared memory(shm)"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.parametrize("step", ["memory", "make_clock"])
def test_memory_that_the_agent_cannot_be_given_is_not_supported(
    worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    """The driver, the kernel and torch have errors of their own."""
    makes = make_clock

    def refused(*args: Any, **_: Any) -> Any:
        monkeypatch.setattr(calls, "make_clock", makes)  # the words of an uncached worker are on the host
        raise error

    monkeypatch.setattr(calls, step, refused)
    world = worlds()
    world.add("one", PROMPT, 40)
    world.run()
    assert world.side is None
    assert [worker._worker for worker in world.workers] == [None]
    why = f"rank 0: the agent cannot be given the KV caches: {error}"
    eventually(lambda: uncached(agent) == [why], "the reason")
    monkeypatch.setattr(calls, step, refused)
    with pytest.raises(Unsupported, match="cannot be given"):
        worlds(extra={"on_unsupported": "fail"})


@pytest.fixture
def far(agent: AgentProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentProcess]:
    """The agent of another node, where the ranks but the first are, though vLLM's configuration
    does not say so.
    """
    from tests.agent import AgentProcess

    def link(folder: str, owner: str, *more: Any, **named: Any) -> Any:
        away = owner.startswith("rank ") and owner != "rank 0"
        return Link(str(other.folder) if away else folder, owner, *more, **named)

    names = itertools.chain([node()], itertools.repeat("away"))
    monkeypatch.setattr(calls, "Link", link)
    monkeypatch.setattr(worker_side, "node", lambda: next(names))
    monkeypatch.setattr(worker_memory, "_retained", [])  # what a frozen agent keeps is kept for good
    with tempfile.TemporaryDirectory(prefix="kvagent-") as name:
        folder = Path(name) / "run"
        folder.mkdir(mode=0o700)
        other = AgentProcess(folder)
        yield other
        other.close()


AWAY = "1 of the engine's ranks are not on the node of its scheduler: an agent serves the engines of its own node"


@pytest.mark.parametrize(
    "shape",
    [{"ranks": 2, "stages": 2, "asynchronous": True, "depth": 2}, {"ranks": 2, "split": True}],
    ids=["pp2-async", "tp2"],
)
@pytest.mark.parametrize("trouble", ["none", "here frozen", "away frozen", "here killed", "away killed"])
def test_ranks_on_another_node_are_found_in_the_first_step(
    worlds: Any, agent: AgentProcess, far: AgentProcess, caplog: pytest.LogCaptureFixture, shape: dict[str, Any],
    trouble: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whatever either agent does, every prompt is computed and nothing stays pinned."""
    with caplog.at_level(logging.WARNING, "vllm.kvagent"):
        world = worlds(**shape)
        assert (agent.status()["regions"], far.status()["regions"]) == (2, 2), "each rank is at its node's agent"
        free = world.free_blocks()
        struck = agent if trouble.startswith("here") else far
        if trouble.endswith("frozen"):
            struck.freeze()
            monkeypatch.setattr(worker_side, "DRAIN_S", 0.1)  # its fence cannot come before it is thawed
        elif trouble.endswith("killed"):
            struck.kill()
        for i in range(4):
            world.add(f"r{i}", [i + 5, *PROMPT], 8)
        world.run()
        if trouble.endswith("frozen"):
            struck.thaw()
        assert world.scheduler.reset_prefix_cache(reset_connector=True)
        world.add("again", [5, *PROMPT], 8)
        world.run()
    assert world.outputs["again"] == world.outputs["r0"]
    assert not world.gpu.bad
    assert world.free_blocks() == free
    assert world.side is None
    assert [worker._worker for worker in world.workers] == [None, None]
    assert [AWAY in one for one in warned(caplog)] == [True]
    stats_of(world.scheduler.connector)  # vLLM may have asked before
    assert world.scheduler.connector._told_uncached
    if trouble.endswith("killed"):
        struck.start()
    eventually(lambda: len(uncached(agent)) == 1 and uncached(agent)[0].startswith(AWAY), "the reason, for the doctor")
    eventually(lambda: far.status()["regions"] == 0, "a rank that has left")


def test_ranks_on_another_node_end_the_engine_on_request(worlds: Any, far: AgentProcess) -> None:
    world = worlds(ranks=2, extra={"on_unsupported": "fail"})
    assert far.status()["regions"] == 2
    world.add("one", PROMPT, 4)
    with pytest.raises(Unsupported, match=AWAY):
        world.run()


def test_an_engine_over_unequal_parts_joins_no_agent(
    worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What vLLM's configuration says is known at the start, to every rank."""
    from vllm.config import ParallelConfig

    monkeypatch.setattr(ParallelConfig, "nnodes_within_dp", property(lambda _: 3))
    with caplog.at_level(logging.WARNING, "vllm.kvagent"):
        world = worlds(ranks=2)
        assert agent.status()["regions"] == 0
        world.add("cold", PROMPT, 40)
        world.run()
        world.add("warm", PROMPT, 40)
        world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert ["2 ranks on 3 nodes" in one for one in warned(caplog)] == [True]
    eventually(lambda: [one[:18] for one in uncached(agent)] == ["2 ranks on 3 nodes"], "the reason, for the doctor")
    assert (agent.status()["regions"], agent.status()["lookups"]) == (0, 0)
    with pytest.raises(Unsupported, match="2 ranks on 3 nodes"):
        worlds(ranks=2, extra={"on_unsupported": "fail"})


def test_a_scheduler_that_alone_finds_the_reason_stops_its_workers(
    worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = KVAgentConnector._begin

    def only_the_scheduler(self: Any, config: Any, kv: Any, *, scheduler: bool) -> None:
        if scheduler:
            raise Unsupported("a reason")
        begin(self, config, kv, scheduler=scheduler)

    monkeypatch.setattr(KVAgentConnector, "_begin", only_the_scheduler)
    world = worlds(ranks=2)
    assert agent.status()["regions"] == 4
    world.add("cold", PROMPT, 40)
    world.run()
    assert [worker._worker for worker in world.workers] == [None, None]
    assert agent.status()["regions"] == 0
    eventually(lambda: uncached(agent) == ["a reason"], "the reason in the agent's list")
    for worker in world.workers:  # before vLLM 0.33 only their stats arrive
        assert worker._told_uncached or stats_of(worker) == {"uncached": 1}


def test_a_decode_engine_that_cannot_be_served_computes_the_prompt(worlds: Any) -> None:
    world = worlds(extra=THREE_HEADS)
    asked = {"do_remote_prefill": True, "kvagent": {"name": "x"}, "remote_engine_id": "p"}
    world.add("wanted", PROMPT, 10, params=asked)
    world.add("offered", [7, *PROMPT], 1, params={"do_remote_decode": True})
    world.run()
    assert world.outputs["wanted"] == world.sequences["wanted"].tokens[100:110]
    assert world.params["offered"] is None


def test_sleep_mode_is_what_vllm_is_told(worlds: Any) -> None:
    world = worlds()
    assert world.scheduler.connector.supports_sleep_mode(world.config.kv_transfer_config)


def test_the_gauge_is_there_from_the_start_and_rises(worlds: Any) -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    registry = CollectorRegistry()

    def kind(cls: Any) -> Any:
        return lambda **given: cls(**given, registry=registry)

    world = worlds(extra=THREE_HEADS)
    prom = KVAgentConnector.build_prom_metrics(
        world.config, {one: kind(one) for one in (Counter, Gauge, Histogram)}, ["engine"], {0: ["0"]}
    )
    assert 'vllm:kvagent_uncached{engine="0"} 0.0' in generate_latest(registry).decode()
    prom.observe(stats_of(world.scheduler.connector))
    assert 'vllm:kvagent_uncached{engine="0"} 1.0' in generate_latest(registry).decode()


@pytest.mark.engine
def test_a_real_engine_is_served_uncached_or_its_start_ends(
    opt: Path, node: AgentProcess, reference: list[list[int]]
) -> None:
    before = node.status()["blocks_stored"]
    llm = real.make_engine(opt, str(node.folder), options={"weights_fixed": True} | THREE_HEADS)
    try:
        assert real.sides(llm)[0] is None
        assert real.generate(llm, PROMPTS) == reference
        llm.reset_prefix_cache(reset_connector=True)
        assert real.generate(llm, PROMPTS) == reference
        assert real.sides(llm)[1] is None
        assert WHY in uncached(node)
        assert node.status()["blocks_stored"] == before
    finally:
        llm.llm_engine.engine_core.shutdown()
    with pytest.raises(Unsupported, match=WHY):
        real.make_engine(opt, str(node.folder), options=THREE_HEADS | {"on_unsupported": "fail"})
