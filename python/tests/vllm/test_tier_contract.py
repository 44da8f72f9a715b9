"""KVAgentTier by the contract of vLLM's tiering manager, with the real agent and a manager that is
played here, call by call.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.options import OptionError
from kvagent.vllm.space import unobserved
from kvagent.vllm.tier import KVAgentTier
from kvagent.vllm.tier import construction as making
from kvagent.vllm.tier import identity as identities
from kvagent.vllm.tier.options import parse
from tests.agent import eventually
from tests.vllm.setting import kv_cache_config, vllm_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.agent import AgentProcess

ROWS = 32
NUMBERS = itertools.count()
RETENTION = "prefix_cache_retention_interval"
TRANSFER = {
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": "e",
    "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20},
}  # fmt: skip


class Played:
    """A manager with one tier and rows of one page each, and how the engine is configured."""

    def __init__(self, model: Path, folder: Path, *, whole: bool = True, lora: bool = False, **options: Any) -> None:
        transfer = TRANSFER | {"engine_id": f"engine {next(NUMBERS)}"}
        config = vllm_config(
            model, transfer, layout="LBHNC", asynchronous=False, max_batched=64, ranks=1, drafts=0
        )  # fmt: skip
        if lora:
            config.lora_config = SimpleNamespace()
        kv = kv_cache_config(config, 16, 0, 1)
        self.fd = os.memfd_create("region")
        os.ftruncate(self.fd, ROWS * mmap.PAGESIZE)
        self.map = mmap.mmap(self.fd, ROWS * mmap.PAGESIZE)
        self.view = memoryview(self.map).cast("b", (ROWS, mmap.PAGESIZE))
        spec = SimpleNamespace(config=build_offloading_config(config, kv), _scheduler_mmap=SimpleNamespace(fd=self.fd))
        self.config, self.kv = config, kv
        self.construction = making.Construction(config, kv)
        token = making._now.set(self.construction if whole else None)
        try:
            patient = {"lookup_age_ms": 60_000}
            self.tier = KVAgentTier(spec, self.view, "KVAgentTier", socket_dir=str(folder), **patient | options)
        finally:
            making._now.reset(token)
        self.jobs = 0
        self.request = ReqContext(req_id="r")
        self.tier.on_new_request(self.request)

    def ready(self) -> Played:
        courier = self.tier._courier
        eventually(lambda: courier.loading and courier.saving, "a tier with an agent")
        return self

    def fill(self, row: int, value: int) -> None:
        for i in range(mmap.PAGESIZE):
            self.view[row, i] = value

    def value(self, row: int) -> int:
        (found,) = {self.view[row, i] for i in range(mmap.PAGESIZE)}
        return int(found)

    def look_up(self, key: Any) -> Any:
        """Step until the answer is known."""

        def answer() -> Any:
            found = self.tier.lookup(key, self.request)
            self.tier.on_schedule_end(None)
            return None if found is LookupResult.RETRY else found

        return eventually(answer, "an answer")

    def job(self, keys: list[Any], rows: list[int], *, load: bool) -> int:
        self.jobs += 1
        job = TransferJob(job_id=self.jobs, keys=keys, chunk_ids=rows, is_promotion=load, req_context=self.request)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self.jobs

    def result(self) -> Any:
        """Return the one job that ends next."""
        (result,) = eventually(lambda: list(self.tier.get_finished_jobs()), "the end of a job")
        return result

    def close(self) -> None:
        self.tier.shutdown()
        self.view.release()  # nothing else may refer to it
        self.map.close()
        os.close(self.fd)


@pytest.fixture
def played(model: Path, agent: AgentProcess) -> Iterator[Callable[..., Played]]:
    made: list[Played] = []

    def make(**options: Any) -> Played:
        made.append(Played(model, agent.folder, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def keys(name: str, count: int) -> list[Any]:
    return [make_offload_key(f"{name}{i}".encode().ljust(32, b"."), 0) for i in range(count)]


def test_a_look_up_is_retried_until_the_agent_has_answered(played: Callable[..., Played]) -> None:
    one = played().ready()
    stored, missing = keys("p", 3), keys("q", 1)
    for i in range(3):
        one.fill(i, 10 + i)
    one.job(stored, [0, 1, 2], load=False)
    assert one.tier.has_pending_work()
    assert one.result().success
    assert not one.tier.has_pending_work()
    assert one.tier.lookup(stored[0], one.request) is LookupResult.RETRY, "an answer before anyone asked"
    assert [one.look_up(key) for key in [*stored, *missing]] == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    one.job(stored, [10, 11, 12], load=True)
    assert one.result().success
    assert [one.value(row) for row in (10, 11, 12)] == [10, 11, 12]


def test_keys_after_the_first_that_is_missing_are_asked_for_again(played: Callable[..., Played]) -> None:
    one = played().ready()
    stored = keys("p", 2)
    one.job(stored, [0, 1], load=False)
    one.result()
    order = [*keys("q", 1), *stored]  # a window is looked up from its end
    for key in order:
        assert one.tier.lookup(key, one.request) is LookupResult.RETRY
    assert [one.look_up(key) for key in order] == [LookupResult.MISS, LookupResult.HIT, LookupResult.HIT]


def test_a_chunk_that_did_not_arrive_is_a_miss_from_then_on(played: Callable[..., Played]) -> None:
    one = played().ready()
    stored, missing = keys("p", 2), keys("q", 1)
    one.job(stored, [0, 1], load=False)
    one.result()
    number = one.job([*stored, *missing], [10, 11, 12], load=True)
    result = one.result()
    assert (result.job_id, result.success, set(result.successful_keys)) == (number, False, set(stored))
    assert one.tier.lookup(missing[0], one.request) is LookupResult.MISS
    assert one.tier.lookup(missing[0], ReqContext(req_id="another")) is LookupResult.MISS


@pytest.mark.stops
def test_after_a_drain_every_result_is_there_though_the_agent_is_stopped(
    played: Callable[..., Played], agent: AgentProcess
) -> None:
    one = played(drain_wait_ms=50).ready()
    one.job(keys("p", 2), [0, 1], load=False)
    one.result()
    agent.freeze()
    try:
        jobs = {one.job(keys("q", 2), [2, 3], load=False), one.job(keys("p", 2), [4, 5], load=True)}
        one.tier.drain_jobs()
        assert {result.job_id for result in one.tier.get_finished_jobs()} == jobs
        assert not one.tier.has_pending_work()
    finally:
        agent.thaw()


@pytest.mark.stops
def test_a_stopped_agent_costs_a_bounded_time_and_then_misses(
    played: Callable[..., Played], agent: AgentProcess
) -> None:
    one = played(lookup_age_ms=50).ready()
    agent.freeze()
    try:
        assert one.look_up(keys("p", 1)[0]) is LookupResult.MISS
    finally:
        agent.thaw()


def test_a_reset_means_other_weights_unless_they_are_fixed(played: Callable[..., Played]) -> None:
    moving, fixed = played().ready(), played(weights_fixed=True).ready()
    (key,) = keys("p", 1)
    for one in (moving, fixed):
        one.job([key], [0], load=False)
        one.result()
        assert one.look_up(key) is LookupResult.HIT
        one.tier.drain_jobs()
        one.tier.on_request_finished(one.request)
    eventually(lambda: moving.tier._courier.loading, "the space of the new weights")
    assert (moving.look_up(key), fixed.look_up(key)) == (LookupResult.MISS, LookupResult.HIT)


def test_rows_are_not_filled_while_the_gpus_copies_from_before_a_reset_run(
    played: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM does not see to it, before 0.33."""
    monkeypatch.setattr("kvagent.vllm.tier.manager.FENCED", False)
    one = played(weights_fixed=True).ready()
    (key,) = keys("p", 1)
    one.job([key], [0], load=False)
    one.result()
    one.tier.drain_jobs()
    for _ in range(4):
        assert one.tier.lookup(key, one.request) is LookupResult.RETRY
        assert not any(asked.fresh for asked in one.tier._requests.values()), (
            "it was asked for in a step in which copies may run"
        )
        one.tier.on_schedule_end(None)
    assert one.look_up(key) is LookupResult.HIT


def test_a_call_that_may_change_the_weights_ends_what_was_found(played: Callable[..., Played]) -> None:
    one = played().ready()
    (key,) = keys("p", 1)
    one.job([key], [0], load=False)
    one.result()
    assert one.look_up(key) is LookupResult.HIT
    (listener,) = one.construction.listeners
    listener.before_weights_call("update_weights")
    assert one.tier.lookup(key, one.request) is not LookupResult.HIT
    one.ready()
    assert one.look_up(key) is LookupResult.MISS


@pytest.mark.parametrize("in_process", [False, True])
def test_a_reset_of_vllms_own_cache_counts_in_the_callers_process(
    played: Callable[..., Played], monkeypatch: pytest.MonkeyPatch, *, in_process: bool
) -> None:
    monkeypatch.setattr("kvagent.vllm.tier.manager.watch", lambda _: ([], in_process))
    one = played().ready()
    (key,) = keys("p", 1)
    one.job([key], [0], load=False)
    one.result()
    (listener,) = one.construction.listeners
    listener.before_reset()
    one.ready()
    found = LookupResult.MISS if in_process else LookupResult.HIT
    assert one.look_up(key) is found, "chunks of weights that the program may have written to"


@pytest.mark.parametrize("name", ["_collect", "_parents", "_say", "_submit", "_result"])
@pytest.mark.parametrize("times", [1, 10**9])
def test_an_error_of_its_own_leaves_no_call(
    played: Callable[..., Played], monkeypatch: pytest.MonkeyPatch, name: str, times: int
) -> None:
    """Each question has an answer, and each job an end; what is said to be there is there."""
    one = played(lookup_age_ms=200, tier_wait_ms=0).ready()
    stored, missing = keys("p", 2), keys("q", 1)
    one.fill(0, 10)
    one.job(stored[:1], [0], load=False)
    one.result()
    real, raised = getattr(KVAgentTier, name), list[str]()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if len(raised) < times:
            raised.append(name)
            raise RuntimeError("planted")
        return real(*args, **kwargs)

    monkeypatch.setattr(KVAgentTier, name, failing)
    assert one.look_up(missing[0]) is LookupResult.MISS
    if one.look_up(stored[0]) is LookupResult.HIT:
        one.job(stored[:1], [1], load=True)
        if one.result().success:
            assert one.value(1) == 10
    one.job(missing, [2], load=True)
    assert not one.result().success
    one.job(stored[1:], [0], load=False)
    one.result()


def test_weights_that_get_a_name_at_run_time_are_private(played: Callable[..., Played]) -> None:
    """Others of that name must not find what vLLM's region and running requests still hold of the
    weights before.
    """
    one, two = played().ready(), played().ready()
    for each in (one, two):
        (listener,) = each.construction.listeners
        listener.weights_named("v2")
    (key,) = keys("p", 1)
    one.ready().job([key], [0], load=False)
    one.result()
    assert two.ready().look_up(key) is LookupResult.MISS


def test_without_vllms_configuration_an_engine_shares_with_no_other(
    played: Callable[..., Played], caplog: pytest.LogCaptureFixture
) -> None:
    whole, other = played().ready(), played().ready()
    half, twin = played(whole=False).ready(), played(whole=False).ready()
    assert "shares chunks with no other engine" in caplog.text
    assert "VLLM_PLUGINS" in caplog.text, "no word of the cure"
    (key,) = keys("p", 1)
    whole.job([key], [0], load=False)
    whole.result()
    assert (other.look_up(key), half.look_up(key)) == (LookupResult.HIT, LookupResult.MISS)
    half.job([key], [0], load=False)
    half.result()
    assert twin.look_up(key) is LookupResult.MISS


def test_chunks_of_another_layout_are_not_shared(model: Path) -> None:
    config = vllm_config(
        model, TRANSFER, layout="LBHNC", asynchronous=False, max_batched=64, ranks=1, drafts=0
    )  # fmt: skip
    kv = kv_cache_config(config, 16, 0, 1)
    offloading = build_offloading_config(config, kv)
    options = SimpleNamespace(tenant="", trust_media=False, weights_version="")

    def space(**changed: Any) -> Any:
        one = dataclasses.replace(offloading, **changed)
        given: Any = making.Construction(config, kv), one, options, 8192, "0.33.0", []
        return identities.space(*given).identity

    cache = offloading.cache
    assert space() == space(engine_id="another")
    others = [
        space(cache=dataclasses.replace(cache, blocks_per_chunk=2)),
        space(cache=dataclasses.replace(cache, tokens_per_hash=8)),
        space(canonical_layout=True),
        space(kv_cache_layout="BLHNC"),
        space(parallel=dataclasses.replace(offloading.parallel, dcp_size=2)),
        space(groups=tuple(dataclasses.replace(one, tokens_per_block=32) for one in offloading.groups)),
    ]
    assert len({space(), *others}) == len(others) + 1
    found = {space()}
    for part, name in ((config.parallel_config, "cp_kv_cache_interleave_size"), (config.cache_config, RETENTION)):
        setattr(part, name, 16)
        found.add(space())
    with mock.patch.object(type(config), "use_v2_model_runner", new=not config.use_v2_model_runner):
        found.add(space())
    kv.kv_cache_tensors[0].layers.reverse()
    found.add(space())
    assert len(found) == 5, "engines share though vLLM places tokens or layers, or leaves blocks out, in another way"
    before, kv = space(), kv_cache_config(config, 32, 0, 1)
    kv.kv_cache_tensors[0].layers.reverse()
    assert space() == before, "the number of an engine's blocks is part of the layout"


def test_lora_is_served_uncached_and_the_log_says_so(
    played: Callable[..., Played], caplog: pytest.LogCaptureFixture
) -> None:
    one = played(lora=True)
    assert "LoRA is enabled" in caplog.text
    (key,) = keys("p", 1)
    one.job([key], [0], load=False)
    assert not one.result().success
    assert one.tier.lookup(key, one.request) is LookupResult.MISS


def test_an_engine_with_ranks_on_other_nodes_or_a_canvas_is_not_served(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config(
        model, TRANSFER, layout="LBHNC", asynchronous=False, max_batched=64, ranks=2, drafts=0
    )  # fmt: skip
    kv = kv_cache_config(config, 16, 0, 1)
    offloading = build_offloading_config(config, kv)

    def refused(construction: Any) -> str:
        return identities.refusal(construction, offloading, 8192, ROWS)

    assert not refused(making.Construction(config, kv))
    with monkeypatch.context() as patch:
        patch.setitem(vars(config.model_config), "is_diffusion", True)  # a cached property
        assert "diffusion" in refused(making.Construction(config, kv))
    assert "other nodes" in refused(None)
    config.parallel_config.distributed_executor_backend = "ray"
    assert "other nodes" in refused(making.Construction(config, kv))
    config.parallel_config.distributed_executor_backend = "mp"
    config.parallel_config.nnodes = 2
    assert "other nodes" in refused(making.Construction(config, kv))


def test_what_is_counted_has_a_definition_and_is_in_the_documents(played: Callable[..., Played]) -> None:
    one = played().ready()
    one.job(keys("p", 2), [0, 1], load=False)
    one.result()
    one.look_up(keys("p", 1)[0])
    stats = one.tier.get_stats().data
    types, values = stats["types"], stats["data"]
    definitions = set(KVAgentTier.build_metric_definitions({}))
    assert set(types) <= definitions
    assert values["vllm:kvagent_tier_stored"] == {(): 2}
    assert one.tier.get_stats() is None
    docs = Path(os.environ.get("KVAGENT_DOCS") or Path(__file__).resolve().parents[3] / "docs")
    named = re.findall(r"`(vllm:kvagent_tier_\w+)`", (docs / "vllm" / "tier.md").read_text())
    assert {name.removesuffix("_total") for name in named} == definitions


def test_an_engine_starts_without_an_agent(model: Path, tmp_path: Path) -> None:
    begin = time.monotonic()
    one = Played(model, tmp_path)
    assert time.monotonic() - begin < 30
    assert one.tier.lookup(keys("p", 1)[0], one.request) is LookupResult.MISS
    one.job(keys("p", 1), [0], load=False)
    assert not one.result().success
    one.close()


def test_an_unknown_option_ends_the_start(model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="did you mean tenant"):
        Played(model, tmp_path, tennant="x")


def test_a_vllm_that_is_too_old_is_refused_at_the_start(
    played: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.30.0")
    with pytest.raises(Unsupported, match=r"vLLM 0\.30\.0 is too old: 0\.31 or newer is needed"):
        played()


def test_weights_that_are_transferred_are_not_fixed(model: Path) -> None:
    config: Any = SimpleNamespace(weight_transfer_config=SimpleNamespace())
    with pytest.raises(OptionError, match="weights_fixed: true, allowed is false"):
        unobserved(config, parse({"weights_fixed": True}))


def test_the_plugin_keeps_the_configuration_of_vllms_connector_at_hand() -> None:
    seen: list[Any] = []

    class Connector:
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
            found = making.under_construction()
            assert found is not None
            seen.append((found.vllm_config, found.kv_cache_config))
            listener: Any = Listener()
            found.listeners.append(listener)

    class Listener:
        events = None

        def before_weights_call(self, call: str) -> None:
            seen.append(call)

        def weights_named(self, version: str) -> None:
            seen.append(version)

        def before_reset(self) -> None:
            seen.append("reset")

    registry: dict[str, Callable[[], Any]] = {"OffloadingConnector": lambda: Connector}
    making.observe(registry)
    making.observe(registry)
    made = registry["OffloadingConnector"]()("config", "role", kv_cache_config="kv")
    assert seen == [("config", "kv")]
    made.before_weights_call("sleep")
    made.before_reset()
    assert seen[1:] == ["sleep", "reset"]
    assert making.under_construction() is None
