"""The connector's parts that need neither vllm nor torch."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvagent.errors import Refused
from kvagent.lookup import Ticket
from kvagent.messages import RegionKind, Registered
from kvagent.vllm import geometry as geo
from kvagent.vllm.counters import CounterDeltas
from kvagent.vllm.geometry import (
    NEEDED,
    Ranks,
    Unsupported,
    check,
    geometry,
    preferred_layout,
    ranks,
    shard,
)
from kvagent.vllm.guests.parts import Facts, NodePart
from kvagent.vllm.internals import around
from kvagent.vllm.link import Link
from kvagent.vllm.options import Constants, OptionError, Options, parse, saves
from kvagent.vllm.plan import LoadJob, Outcome, Report, SaveJob, StepPlan, WorkerInfo
from kvagent.vllm.scheduler.agent_session import NO_CHANGE, AgentSession
from kvagent.vllm.scheduler.loads import IDLE_WAIT_S, STEP_WAIT_S, Lookups
from kvagent.vllm.scheduler.requests import Blocks
from kvagent.vllm.scheduler.saves import final_tokens
from kvagent.vllm.space import UNKNOWN, identity, unknown_weights, used_backends, weights_digest, with_resolved
from kvagent.vllm.worker.memory import memory
from kvagent.wire import packed, section
from tests.agent import eventually
from tests.cells import parallel_of
from tests.test_wheel import OF_VLLM


def test_all_but_the_class_is_imported_without_vllm_and_torch() -> None:
    package = Path(__file__).parents[1] / "kvagent"
    files = (package / "vllm").rglob("*.py")
    modules = [".".join(path.relative_to(package.parent).with_suffix("").parts) for path in files]
    light = [name for name in modules if name not in OF_VLLM and not name.endswith("__init__")]
    code = f"import sys, {', '.join(light)}; assert not {{'vllm', 'torch'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options_are_checked() -> None:
    assert parse({}) == Options()
    assert parse({"socket_dir": "/x", "share_tp": 1}).share_tp == 1
    assert len(fields(Options)) - len(fields(Constants)) <= 20
    for given, said in (
        ({"socket": "/x"}, "socket: no such option"),
        ({"share_tp": 257}, "share_tp: 257, allowed is an integer 0 to 256"),
        ({"share_tp": 1.5}, "integer"),
        ({"pin_percent": 5}, "pin_percent: no such option"),
        ({"save_decode": "yes"}, "true or false"),
        ({"layout": "NHD"}, "one of auto"),
        ({"load_mode": "both"}, "one of async, sync, auto"),
        ({"cpu_bytes_to_use_per_rank": -1}, "cpu_bytes_to_use_per_rank: -1, allowed is an integer 0 to 70368744177664"),
        ({"cpu_bytes_to_use_per_rank": "1GiB"}, "cpu_bytes_to_use_per_rank: '1GiB', allowed is an integer"),
        ({"socket_dir": 3}, "not a string"),
    ):
        with pytest.raises(OptionError, match=said):
            parse(given)


@pytest.mark.parametrize(
    ("role", "given", "does"),
    [
        ("kv_both", {}, True),
        ("kv_producer", {}, True),
        ("kv_consumer", {}, False),
        ("kv_consumer", {"consumer_saves": True}, True),
    ],
)
def test_the_role_says_who_saves(role: str, given: dict[str, Any], *, does: bool) -> None:
    assert saves(role, parse(given)) is does


@pytest.mark.parametrize(
    ("computed", "scheduled", "placeholders", "known", "final"),
    [
        (0, 64, 0, 100, 64),  # a chunk of a prompt
        (96, 4, 0, 100, 100),
        (100, 1, 1, 100, 100),  # the token that is fed is not known yet
        (104, 4, 4, 101, 101),  # drafts, of which none may be right
        (32, 1, 1, 40, 32),  # tokens that run ahead are not final
    ],
)
def test_placeholders_and_drafts_are_not_final(
    computed: int, scheduled: int, placeholders: int, known: int, final: int
) -> None:
    request = SimpleNamespace(num_computed_tokens=computed, num_output_placeholders=placeholders, num_tokens=known)
    assert final_tokens(request, scheduled) == final


def test_reports_are_joined_to_the_worst() -> None:
    one = Report({1: Outcome(1, b"\0\1\5")}, {7})
    other = Report({1: Outcome(1, b"\3\0\0"), 2: Outcome(1, b"\0")}, set())
    joined = one.join(other)
    assert joined == Report({1: Outcome(2, b"\3\1\5"), 2: Outcome(1, b"\0")}, {7})


def test_plans_are_pickled() -> None:
    sections = packed([section(0, b"", [b"h" * 32], [3])], 1)
    plan = StepPlan([SaveJob(1, b"b" * 16, 1, 2, sections)], [], [4], [5], idle=True)
    load = LoadJob(1, b"b" * 16, 1, "r", 2, 3.0, (sections,), b"\3\0\0\0")
    for one in (plan, load, Report({1: Outcome(1, b"\0")}, {7})):
        assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301


class _Storage:
    _cdata = 77

    def nbytes(self) -> int:
        return 1 << 16

    def share_memory_(self) -> None:
        """It may lie anywhere."""

    def _share_fd_cpu_(self) -> tuple[int, int]:
        return -1, self.nbytes()


@dataclass
class _Tensor:
    """The placement of a float32 tensor."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    start: int = 0
    kind: str = "cpu"
    storage: _Storage = field(default_factory=_Storage)

    @property
    def device(self) -> Any:
        return SimpleNamespace(type=self.kind)

    def untyped_storage(self) -> _Storage:
        return self.storage

    def element_size(self) -> int:
        return 4

    def storage_offset(self) -> int:
        return self.start

    def stride(self, dim: int | None = None) -> Any:
        return self.steps if dim is None else self.steps[dim]


def test_segments_follow_the_strides() -> None:
    """Blocks of 2 heads, 4 states, 8 numbers: 256 bytes of a layer."""
    layers = {
        "layer by layer": ([_Tensor((9, 2, 4, 8), (64, 32, 8, 1), i * 9 * 64) for i in range(2)],
                           [(0, 256, 256), (2304, 256, 256)]),
        "block by block": ([_Tensor((9, 2, 4, 8), (128, 32, 8, 1), i * 64) for i in range(2)], [(0, 512, 512)]),
        "head by head": ([_Tensor((9, 2, 4, 8), (32, 288, 8, 1), i * 576) for i in range(2)],
                         [(0, 128, 128), (1152, 128, 128), (2304, 128, 128), (3456, 128, 128)]),
        "two pages a block": ([_Tensor((18, 2, 2, 8), (32, 16, 8, 1))], [(0, 256, 256)]),
        "shared by layers": ([_Tensor((9, 2, 4, 8), (64, 32, 8, 1))] * 2, [(0, 256, 256)]),
    }  # fmt: skip
    for name, (tensors, expected) in layers.items():
        caches = {str(i): tensor for i, tensor in enumerate(tensors)}
        found = memory(caches, [list(caches)], 9)
        assert [(s.offset, s.stride, s.bytes) for s in found.held[0][0]] == expected, name
        assert [(r.kind, r.size, fd) for r, fd in found.regions] == [(RegionKind.FD, 1 << 16, -1)]


def test_memory_that_cannot_be_served_is_refused() -> None:
    with pytest.raises(Unsupported, match="served are cpu and cuda"):
        memory({"a": _Tensor((9, 8), (8, 1), kind="xpu")}, [["a"]], 9)
    with pytest.raises(Unsupported, match="pages"):
        memory({"a": _Tensor((10, 8), (8, 1))}, [["a"]], 9)
    with pytest.raises(Unsupported, match="no KV cache"):
        memory({}, [["a"]], 9)


class FullAttentionSpec:
    block_size = 32


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(FullAttentionSpec):
    block_size = 16
    sliding_window = 100


class RSWASpec(FullAttentionSpec):
    pass


def _config(*specs: Any, **more: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec(), layer_names=["a"], **more) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=9, needs_kv_cache_zeroing=False, kv_tp_replicas=1)


def test_groups() -> None:
    both = geometry(_config(FullAttentionSpec, SlidingWindowSpec), 16)
    assert [(g.block_tokens, g.window) for g in both.groups] == [(32, 0), (16, 100)]
    assert (both.hash_tokens, both.align, both.scale(0), both.scale(1)) == (16, 32, 2, 1)
    for config, said in (
        (_config(RSWASpec), "is of RSWASpec; served are FullAttentionSpec, "),
        (_config(), "no KV cache"),
    ):
        with pytest.raises(Unsupported, match=said):
            geometry(config, 16)
    with pytest.raises(Unsupported, match="hashes of 12"):
        geometry(_config(FullAttentionSpec), 12)


def test_ranks() -> None:
    parallel = parallel_of(4, 2)
    spread, replicas = ranks(parallel, _config(FullAttentionSpec))
    assert (spread.world, spread.shards, replicas) == (8, 8, 1)
    assert [shard(rank, 4, replicas) for rank in range(8)] == list(range(8))
    spread, replicas = ranks(parallel, _config(MLAAttentionSpec))
    assert (spread.world, spread.shards, replicas) == (8, 2, 4)
    assert [shard(rank, 4, replicas) for rank in range(8)] == [0] * 4 + [1] * 4
    for name in ("decode", "prefill"):
        both = parallel_of(2, 1, **{f"{name}_context_parallel_size": 2})
        with pytest.raises(Unsupported, match=f"{name}_context_parallel_size 2: .*; start it without --{name}-context"):
            ranks(both, _config(MLAAttentionSpec))
    with pytest.raises(Unsupported, match="128 ranks, allowed is 1 to 64"):
        ranks(parallel_of(128, 1), _config(FullAttentionSpec))


def test_ranks_on_several_nodes() -> None:
    def over(tp: int, **more: Any) -> tuple[Any, int]:
        parallel = parallel_of(tp, 1, **more)
        return ranks(parallel, _config(FullAttentionSpec))

    two: dict[str, Any] = {"nnodes_within_dp": 2, "node_rank_within_dp": 1}
    with pytest.raises(Unsupported, match=r"^2 ranks on 2 nodes \(--nnodes\), started by the executor uni: .*nodes.md"):
        over(2, distributed_executor_backend="uni", **two)
    with pytest.raises(Unsupported, match=r"^3 ranks on 2 nodes"):
        over(3, distributed_executor_backend="mp", **two)
    mp: dict[str, Any] = {"distributed_executor_backend": "mp"}
    assert over(128, **two, **mp)[0].world == 128, "64 of them at each agent"
    with pytest.raises(Unsupported, match="65 ranks, allowed is 1 to 64"):
        over(130, **two, **mp)
    assert over(2, nnodes=4, nnodes_within_dp=1)[0].world == 2, "each replica is on one node"
    with pytest.raises(Unsupported, match="external_launcher with 2 ranks"):
        over(2, distributed_executor_backend="external_launcher")
    assert over(1, distributed_executor_backend="external_launcher")[0].world == 1
    assert over(2, distributed_executor_backend="ray")[0].world == 2


def test_workers_tell_their_node() -> None:
    def worker(node: str) -> WorkerInfo:
        return WorkerInfo(node)

    here, there = worker(geo.node()), worker("another")
    assert geo.node() == geo.node() != ""
    assert geo.elsewhere([here, here], geo.node()) == ""
    assert geo.elsewhere([here, there, there], geo.node()).startswith("2 of the engine's ranks are not on the node")
    assert geo.elsewhere([worker(""), here], geo.node()) == "", "what cannot tell is taken to be here"
    assert geo.elsewhere([here, there], "") == ""


def test_a_node_that_cannot_be_told_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(geo, "_BOOT_ID", tmp_path / "none")
    assert geo.node() == ""


def test_tp_8_with_pp_4_is_32_shards() -> None:
    """Each rank of a stage has heads of its own, or shares them with its neighbours."""
    parallel = parallel_of(8, 4)
    for replicas, shards in ((1, 32), (2, 16), (4, 8), (8, 4)):  # 8, 4, 2 and 1 KV heads
        config = _config(FullAttentionSpec)
        config.kv_tp_replicas = replicas
        spread, found = ranks(parallel, config)
        assert (spread.world, spread.shards, found) == (32, shards, replicas)
        held = [shard(rank, 8, replicas) for rank in range(32)]
        assert held == [n for n in range(shards) for _ in range(replicas)]


def test_a_retrained_model_has_another_digest(tmp_path: Path) -> None:
    model = SimpleNamespace(model=str(tmp_path), revision=None, model_weights="")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * (3 << 20))
    (tmp_path / "config.json").write_text("{}")
    first = weights_digest(model)
    assert first is not None
    assert weights_digest(model) == first
    weights.write_bytes(b"a" * ((3 << 20) - 1) + b"b")
    assert weights_digest(model) not in (first, None)
    single = SimpleNamespace(model=str(weights))
    assert weights_digest(single) not in (first, None)


def test_weights_that_are_not_here_are_no_ones_else(tmp_path: Path) -> None:
    """In an object store, or nowhere: other weights may have the same name tomorrow."""
    (tmp_path / "config.json").write_text("{}")
    assert weights_digest(SimpleNamespace(model=str(tmp_path)), SimpleNamespace(load_format="tensorizer")) is None
    assert weights_digest(SimpleNamespace(model=str(tmp_path / "none"), revision=None)) is None
    (tmp_path / "model.safetensors").write_bytes(b"a")
    assert weights_digest(SimpleNamespace(model=str(tmp_path), model_weights="s3://bucket/model")) is None
    # A user may set the engine's id, which is then the same after a restart: it says nothing of the
    # weights.
    assert dict(_identity(transfer__engine_id="one", model__model="nowhere"))["weights"] == UNKNOWN
    assert unknown_weights(_identity(model__model="nowhere"))
    assert not unknown_weights(_identity(model__model=str(tmp_path), load__load_format="auto"))


def test_weights_that_are_made_up(tmp_path: Path) -> None:
    """They are the same for every engine with this configuration, and differ from those in the
    folder.
    """
    (tmp_path / "config.json").write_text("{}")

    def weights(load_format: str) -> str:
        return dict(_identity(model__model=str(tmp_path), load__load_format=load_format))["weights"]

    assert weights("dummy") == weights("dummy")
    assert weights("auto") == weights("hf")
    (tmp_path / "model.safetensors").write_bytes(b"a")
    assert weights("dummy") != weights("auto")


class _Pool:
    num_gpu_blocks = 100

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=i, block_hash=None) for i in range(100)]
        self.resets = 0

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True


def test_what_old_weights_computed_is_known() -> None:
    pool = _Pool()
    blocks = Blocks(SimpleNamespace(block_pool=pool), 0.05)
    assert blocks.max_saving == 5
    pool.blocks[1].block_hash = b"one"
    blocks.new_weights()
    assert blocks.is_stale(pool.blocks[1])
    assert not blocks.is_stale(pool.blocks[2])
    pool.blocks[1].block_hash = b"other"
    assert not blocks.is_stale(pool.blocks[1])


@pytest.mark.parametrize(
    ("boots", "epochs", "resets"),
    [
        ("aaaa", (1, 1, 3, 3), (False, False, True, False)),
        ("abab", (5, 1, 1, 2), (True, False, False, True)),  # a new agent counts anew
        ("ab", (5, 2), (True, True)),  # it was reset before this engine came
        ("ab", (2, 2), (True, True)),  # as often as the one before it: that tells nothing
    ],
)
def test_a_reset_that_was_missed_between_two_sessions_is_one(
    boots: str, epochs: tuple[int, ...], resets: tuple[bool, ...]
) -> None:
    """In its first session, an engine that ran alone so far may have blocks of older weights than
    the others.
    """
    link: Any = SimpleNamespace(lost=lambda _: None, close=lambda: None)
    presence = AgentSession(link, Options())
    seen = []
    for boot, epoch in zip(boots, epochs, strict=True):
        made: Any = SimpleNamespace(
            boot=boot.encode() * 16, version=3, number=1, quiet=lambda: False, poll=list, close=lambda: None,
            registered=Registered(1, 0, "", bytes(16), epoch, "/none"),
        )  # fmt: skip
        link.current = lambda made=made: made
        seen.append(presence.poll())
        assert presence.poll() is NO_CHANGE
    presence.close()
    assert all(news.began for news in seen)
    assert tuple(news.reset for news in seen) == resets


def test_a_reset_is_announced_before_it_happens() -> None:
    pool, seen, done = _Pool(), [], []
    around(pool, "reset_prefix_cache", lambda _: done.append(pool.resets), lambda: seen.append(pool.resets))
    assert pool.reset_prefix_cache()
    assert (seen, done, pool.resets) == ([0], [1], 1)


def test_a_newer_vllm_is_warned_about_and_one_that_is_too_old_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    complete = SimpleNamespace(**dict.fromkeys(NEEDED))
    for version in ("0.31.0", "0.33.2+cpu"):
        check(version, complete)
    assert not caplog.records
    for version in ("0.34.0", "1.0", "0.1.dev1+g1234567"):
        check(version, complete)
    assert len(caplog.records) == 3
    assert "vLLM 0.34.0: this connector is tested with 0.31 to 0.33" in caplog.text
    for version in ("0.30.0", "0.29.1+cpu"):
        with pytest.raises(Unsupported, match=r"is too old: 0\.31 or newer is needed"):
            check(version, complete)
    with pytest.raises(Unsupported, match=r"have no bind_kv_cache_manager, build_conn.*; 0\.31 or newer"):
        check("0.1.dev1", SimpleNamespace(get_transfer_results=1, has_pending_push_work=1))


@pytest.mark.parametrize(
    ("option", "device", "supported", "wished"),
    [
        ("auto", "cuda", ["LBHNC", "BLHNC"], "BLHNC"),
        ("auto", "cuda", ["LBNHC", "BLNHC", "BLHNC"], "BLNHC"),
        ("auto", "cuda", ["LBHNC"], None),
        ("auto", "cpu", ["BLHNC"], None),
        ("none", "cuda", ["BLHNC"], None),
        ("LBHNC", "cpu", ["BLHNC"], "LBHNC"),
    ],
)
def test_a_layout_is_wished_for_that_the_backend_reads(
    option: str, device: str, supported: list[str], wished: str | None
) -> None:
    config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    assert preferred_layout(config, option, lambda _: supported) == wished


def test_a_backend_that_cannot_be_asked_is_left_its_choice(caplog: pytest.LogCaptureFixture) -> None:
    def broken(config: Any) -> list[str]:
        raise ImportError("no such backend")

    caplog.set_level("INFO", "vllm.kvagent")
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
    assert preferred_layout(config, "auto", broken) is None
    assert "could not be determined (no such backend)" in caplog.text


@dataclass
class _Counted:
    one: int = 0
    two: int = 0


def test_counters_are_reported_as_deltas() -> None:
    counts = _Counted()
    growth = CounterDeltas(counts, "x_")
    assert growth.take() == {}
    counts.two = 5
    assert growth.take() == {"x_two": 5}
    counts.one, counts.two = 1, 7
    assert growth.take() == {"x_one": 1, "x_two": 2}
    assert growth.take() == {}


def test_tables_are_those_of_vllms_manager() -> None:
    table = [SimpleNamespace(block_id=i) for i in range(4)]
    blocks = Blocks(SimpleNamespace(block_pool=_Pool(), get_blocks={"a": SimpleNamespace(blocks=(table,))}.get), 0.05)
    assert list(blocks.table("a", 0, 1, 9)) == table[1:]
    assert list(blocks.table("a", 0, 4, 5)) == []


@pytest.mark.parametrize("answered_s", [0.0001, 0.0007, 10])
def test_all_requests_of_a_step_together_wait_no_longer_than_its_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answered_s: float
) -> None:
    """A socket waits for whole milliseconds, or until the answer."""
    now, waited = [100.0], []
    monkeypatch.setattr("kvagent.vllm.scheduler.loads.time", SimpleNamespace(monotonic=lambda: now[0]))
    registered = SimpleNamespace(lookup_path=tmp_path / "none")
    session: Any = SimpleNamespace(boot=bytes(16), version=3, number=1, registered=registered)
    lookups = Lookups(session, 0.001, 1)

    def poll(ticket: Any, wait_s: float) -> None:
        waited.append(min(math.ceil(wait_s * 1000) / 1000, answered_s))
        now[0] += waited[-1]

    monkeypatch.setattr(lookups._client, "poll", poll)
    for idle, first, longest in ((False, True, STEP_WAIT_S), (False, False, 0), (True, False, IDLE_WAIT_S)):
        waited.clear()
        lookups.begin_step(idle=idle)
        for _ in range(30):
            assert lookups.answer(Ticket(None, 0, leases=True), first=first) is None
        assert min(longest, 0.001) <= sum(waited) <= longest + 1e-9
        assert max(waited) <= 0.001
    lookups.close()


_PLAIN: dict[str, Any] = {
    "model.revision": None, "model.hf_overrides": None, "model.dtype": "bfloat16", "model.quantization": None,
    "model.max_model_len": 4096, "model.hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "default"}),
    "cache.prefix_caching_hash_algo": "sha256", "cache.cache_dtype": "auto", "cache.kv_cache_layout": "LBNHC",
    "cache.kv_cache_dtype_skip_layers": [], "parallel.tensor_parallel_size": 1, "parallel.pipeline_parallel_size": 1,
    "transfer.engine_id": "e", "attention.backend": None, "attention.backend_per_kind": {},
}  # fmt: skip


@dataclass
class KVTransferConfig:
    engine_id: str


def _identity(tenant: str = "t", **changes: Any) -> tuple[tuple[str, str], ...]:
    """Return the identity of a plain configuration with changes: model__dtype is its model_config's
    dtype.
    """
    parts: dict[str, SimpleNamespace] = {}
    for name, value in (_PLAIN | {name.replace("__", "."): one for name, one in changes.items()}).items():
        part, _, field = name.partition(".")
        setattr(parts.setdefault(part, SimpleNamespace()), field, value)
    config = SimpleNamespace(
        model_config=parts["model"], cache_config=parts["cache"], parallel_config=parts["parallel"],
        kv_transfer_config=KVTransferConfig(parts["transfer"].engine_id), attention_config=parts["attention"],
        load_config=parts.get("load"),
    )  # fmt: skip
    return identity(config, SimpleNamespace(kv_cache_groups=[]), tenant, Ranks(1, 1), "0.33.0")


def test_an_engine_of_random_hashes_shares_with_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def made(algorithm: str, engine: str) -> tuple[tuple[str, str], ...]:
        return _identity(model__model="nowhere", cache__prefix_caching_hash_algo=algorithm, transfer__engine_id=engine)

    assert made("sha256", "one") == made("sha256", "other")
    assert len({made(algorithm, engine) for algorithm in ("sha256", "xxhash") for engine in ("one", "other")}) == 3


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_that_can_be_forged_are_refused_where_tenants_share(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for tenant, fine in (("", algorithm), ("t", "sha256"), ("t", "sha256_cbor")):
        _identity(tenant, model__model="nowhere", cache__prefix_caching_hash_algo=fine)
    with pytest.raises(OptionError, match=f"prefix_caching_hash_algo {algorithm}.* sha256 or sha256_cbor"):
        _identity("t", model__model="nowhere", cache__prefix_caching_hash_algo=algorithm)
    monkeypatch.delenv("PYTHONHASHSEED")
    _identity("t", model__model="nowhere", cache__prefix_caching_hash_algo=algorithm)  # of a random seed


def test_the_backends_that_layers_use() -> None:
    class Layer:
        def __init__(self, name: str) -> None:
            self.name = name

        def get_attn_backend(self) -> Any:
            return SimpleNamespace(get_name=lambda: self.name)

    groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=names) for names in (["a", "b"], ["c"])]
    layers: dict[str, Any] = {"a": Layer("FLASH_ATTN"), "b": Layer("FLASH_ATTN"), "c": Layer("FLASHINFER")}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    cache = SimpleNamespace(kv_cache_groups=groups, num_blocks=7)
    assert used_backends(config, cache, {}) == "FLASH_ATTN; FLASHINFER"
    layers["b"] = Layer("TRITON_ATTN")
    assert used_backends(config, cache, {}) == "FLASH_ATTN, TRITON_ATTN; FLASHINFER"
    caches = {name: SimpleNamespace(shape=(pages * 7,)) for name, pages in {"a": 4, "b": 4, "c": 1}.items()}
    assert used_backends(config, cache, caches) == "FLASH_ATTN, TRITON_ATTN 4 pages a block; FLASHINFER"
    pairs = _identity(model__model="nowhere")
    assert dict(pairs) | {"resolved": "FLASH_ATTN"} == dict(with_resolved(pairs, "FLASH_ATTN"))


@pytest.mark.parametrize("taken", [False, True])
def test_a_session_of_an_identity_that_is_no_more_is_left(taken: bool) -> None:
    """Whether it was adopted or had just been made."""
    registered = SimpleNamespace(epoch=1, lookup_path="/nowhere", space=b"s")
    session = SimpleNamespace(
        boot=b"a", number=1, version=3, poll=list, quiet=lambda: True, close=lambda: closed.append(1),
        registered=registered,
    )  # fmt: skip
    made: list[Any] = [session]
    closed: list[int] = []
    link: Any = SimpleNamespace(
        current=lambda: made[0] if made else None, lost=made.remove, close=lambda: None,
        renew=lambda *, hold: made.pop(),  # noqa: ARG005
    )  # fmt: skip
    presence = AgentSession(link, Options())
    if taken:
        assert presence.poll().began
    presence.reregister()
    assert (made, closed, presence.session) == ([], [1], None)
    assert presence.poll().ended == taken
    assert presence.poll() is NO_CHANGE


def test_a_registration_that_changed_in_flight_is_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def registration() -> Any:
        if not registered:
            link.renew()  # it changes after it was read
        return len(registered)

    def register(one: Any, timeout_s: float) -> Any:
        registered.append(one)
        return SimpleNamespace(space=b"s")

    registered: list[int] = []
    session = SimpleNamespace(register=register, close=lambda: registered.append(-1))
    monkeypatch.setattr("kvagent.vllm.link.Session.connect", lambda *_: session)
    monkeypatch.setattr("kvagent.vllm.link.threading.Thread.start", lambda _: None)
    link: Any = Link(str(tmp_path), "scheduler", registration)
    assert not link._attach()
    assert link.current() is None
    assert link._attach()
    assert registered == [0, -1, 2]


def test_another_registration_does_not_wait_as_a_refused_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that supposed another backend than its workers use joins them at once."""
    refused, numbers = threading.Event(), iter(range(2))

    def register(one: int, timeout_s: float) -> Any:
        if one == 0:
            refused.set()
            raise Refused("identity", 1, "not that of the other sessions")
        return SimpleNamespace(space=b"s")

    session = SimpleNamespace(register=register, close=lambda: None)
    monkeypatch.setattr("kvagent.vllm.link.Session.connect", lambda *_: session)
    monkeypatch.setattr("kvagent.vllm.link.PAUSE_FIRST_S", 3600.0)
    registration: Any = lambda: next(numbers)  # noqa: E731
    link = Link(str(tmp_path), "scheduler", registration)
    assert refused.wait(20.0)
    link.renew()
    eventually(link.current, "the other registration")
    link.close()


def test_the_parts_of_an_engine_over_nodes() -> None:
    def of(tp: int, pp: int, index: int) -> NodePart:
        part = geo.part(parallel_of(tp, pp, nnodes_within_dp=2, node_rank_within_dp=index))
        return NodePart(part.index, part.count, part.world, part.tp)

    whole = Ranks(8, 8)
    one = geo.part(parallel_of(4, 2))
    assert one.count == 1
    assert one.of_ranks(whole, 1) is whole
    assert (of(8, 1, 1).ranks, of(8, 1, 1).text) == (range(4, 8), "ranks 4 to 7 of 8")
    for index in range(2):  # by heads, or by stages
        for tp, pp in ((8, 1), (4, 2)):
            part = of(tp, pp, index)
            assert part.of_ranks(whole, 1) == Ranks(4, 4)
            assert [part.shard(rank, 1) for rank in part.ranks] == [0, 1, 2, 3]
        part = of(8, 1, index)
        assert part.of_ranks(Ranks(8, 1), 8) == Ranks(4, 1), "all ranks have the same"
        assert [part.shard(rank, 8) for rank in part.ranks] == [0] * 4
        assert [part.shard(rank, 2) for rank in part.ranks] == [0, 0, 1, 1]


def test_a_part_without_a_target_gets_a_job_for_no_agent() -> None:
    target = Facts(b"far", 1, 7, b"there", 0), 9
    load = LoadJob(1, b"here", 2, "r", 3, 1.0, (), b"", b"space", elsewhere=(target,))
    save = SaveJob(2, b"here", 2, 0, packed([b"x"], 0), b"space")
    plan = NodePart(1, 2, 2).of_plan(StepPlan(loads=[load], saves=[save]))
    (own,), (none,) = plan.loads, plan.saves
    assert (own.boot, own.epoch, own.space, own.lease) == (b"far", 7, b"there", 9)
    assert (none.boot, none.space) == (b"", b""), "it would be sent as if to the scheduler's agent"
    idle = StepPlan(decoding=3)
    assert NodePart(1, 2, 2).of_plan(idle) is idle
