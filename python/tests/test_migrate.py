"""Configurations of other connectors become ours: the real agent starts with the command line, and
the connector's own parser takes the options.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.migrate.__main__ import main
from kvagent.migrate.connectors import CONNECTORS, ConfigError
from kvagent.migrate.convert import Result, convert
from kvagent.migrate.serve import disk_tier, formatted, remote_tier, size_of
from kvagent.migrate.sources import SourceError, Sources, read
from kvagent.vllm.options import Options, parse
from tests.agent import BINARY, AgentProcess, need_agent

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30


def migrated(
    transfer: dict[str, Any] | None = None, lmcache: dict[str, Any] | None = None, *, ranks: int = 1, **mooncake: Any
) -> Result:
    return convert(Sources(transfer, lmcache, mooncake or None), ranks)


def options(result: Result) -> Options:
    """Return the options as the connector reads them."""
    return parse(result.transfer.get("kv_connector_extra_config", {}), result.transfer["kv_role"])


def config(name: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}


def test_lmcache_becomes_a_pool_tiers_and_options() -> None:
    lmcache = {
        "chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 2.5, "local_disk": "file:///var/lm/",
        "max_local_disk_size": 20, "remote_url": "redis://kv:secret@10.0.0.1:6380/2", "remote_serde": None,
        "save_decode_cache": False, "min_retrieve_tokens": "128", "cache_policy": "LRU", "use_layerwise": "False",
    }  # fmt: skip
    result = migrated(None, lmcache, ranks=2)
    assert result.serve.command() == [
        "kvagent", "serve", "--pool", "5GiB", "--tier", "disk:/var/lm?capacity=40GiB",
        "--tier", "redis://kv@10.0.0.1:6380/2?password-env=KVAGENT_REDIS_PASSWORD", "--eviction", "lru",
    ]  # fmt: skip
    assert "secret" not in json.dumps([result.serve.command(), result.transfer, result.notes, result.became])
    assert options(result) == Options(save_decode=False, min_load_tokens=128)
    assert list(result.missing) == ["lmcache.chunk_size"]
    assert result.transfer["kv_load_failure_policy"] == "recompute"


def test_variables_win_over_the_file_and_the_connector_over_both() -> None:
    extra: dict[str, Any] = {"lmcache.min_retrieve_tokens": 7}
    sources = Sources(config("LMCacheConnectorV1", **extra))
    sources.lmcache = {"min_retrieve_tokens": 5, "max_local_cpu_size": 1}
    result = convert(sources)
    assert (options(result).min_load_tokens, result.serve.pool) == (7, GIB)


def test_ascend_store_becomes_a_mooncake_tier() -> None:
    given = config("AscendStoreConnector", "kv_consumer", lookup_rpc_port="0", backend="mooncake", load_async=True)
    result = migrated(
        given, master_server_address="10.0.0.2:50088", protocol="rdma", device_name="mlx5_0,mlx5_1",
        global_segment_size="1GB", metadata_server="P2PHANDSHAKE", ranks=8,
    )  # fmt: skip
    assert result.serve.tiers == ["mooncake://10.0.0.2:50088?protocol=rdma&devices=mlx5_0,mlx5_1&segment=8GiB"]
    assert not result.missing
    assert any("kv_consumer loads" in note for note in result.notes)
    without = migrated(given)
    assert without.missing == {
        "AscendStoreConnector's store": "has no --tier yet: give the file of MOONCAKE_CONFIG_PATH too"
    }
    ascend = migrated(given, master_server_address="10.0.0.2:50088", protocol="ascend")
    assert "protocol 'ascend'" in ascend.missing["backend"]


def test_offloading_becomes_a_pool() -> None:
    simple = config("SimpleCPUOffloadConnector", cpu_bytes_to_use_per_rank=GIB, cpu_bytes_to_use=9, lazy_offload=False)
    result = migrated(simple, ranks=4)
    assert result.serve.command() == ["kvagent", "serve", "--pool", "4GiB"]
    assert options(result) == Options(cpu_bytes_to_use_per_rank=GIB)
    assert result.became["cpu_bytes_to_use_per_rank"] == "--pool 4GiB, and cpu_bytes_to_use_per_rank"
    assert any(note.startswith("cpu_bytes_to_use_per_rank: leave it out") for note in result.notes)
    broken = migrated(config("SimpleCPUOffloadConnector", cpu_bytes_to_use_per_rank="many"))
    assert (list(broken.missing), options(broken)) == (["cpu_bytes_to_use_per_rank"], Options())
    disk = config("SimpleCPUOffloadConnector", kv_offload_backend="disk", disk_path="/d", disk_capacity_bytes=GIB)
    assert migrated(disk).serve.tiers == ["disk:/d?capacity=1GiB"]
    native = config("OffloadingConnector", cpu_bytes_to_use=3 * MIB, offload_prompt_only=True, eviction_policy="arc")
    result = migrated(native)
    assert (result.serve.pool, options(result).save_decode) == (3 * MIB, False)
    assert list(result.missing) == ["eviction_policy"]


def test_several_connectors_become_one_and_others_stay() -> None:
    foreign = config("FlexKVConnectorV1")
    given = config(
        "MultiConnector",
        connectors=[
            foreign, config("NixlConnector", backends=["UCX"]), config("OffloadingConnector", cpu_bytes_to_use=GIB)
        ],
    )  # fmt: skip
    result = migrated(given | {"engine_id": "e", "kv_port": 5})
    children = result.transfer["kv_connector_extra_config"]["connectors"]
    assert [one["kv_connector"] for one in children] == ["FlexKVConnectorV1", "KVAgentConnector"]
    assert children[0] == foreign
    assert result.transfer["kv_load_failure_policy"] == "recompute"
    assert list(result.missing) == ["backends"]
    assert "kv_port" in result.became
    alone = migrated(config("MultiConnector", connectors=[config("NixlConnector")]))
    assert alone.transfer["kv_connector"] == "KVAgentConnector"


def test_an_engine_id_stays_with_the_engine() -> None:
    """MultiConnector gives its own to each connector, and vLLM ends where one has another."""
    foreign = config("FlexKVConnectorV1")
    nixl = config("NixlConnector") | {"engine_id": "own", "kv_ip": "10.0.0.1"}
    given = config("MultiConnector", connectors=[nixl, foreign], backends=["UCX"], xyz=3) | {"engine_id": "e"}
    result = migrated(given)
    assert (result.transfer["engine_id"], result.transfer["kv_role"]) == ("e", "kv_both")
    assert all("engine_id" not in one for one in result.transfer["kv_connector_extra_config"]["connectors"])
    assert result.became == {
        "MultiConnector's backends": "dropped: MultiConnector reads connectors alone",
        "MultiConnector's xyz": "dropped: MultiConnector reads connectors alone",
        "NixlConnector's kv_ip": "needs nothing: the connector does not read it",
        "NixlConnector's engine_id": "dropped: vLLM refuses it; MultiConnector's is for all",
    }
    assert not result.missing
    alone = migrated(config("MultiConnector", connectors=[nixl]) | {"engine_id": "e"})
    assert (alone.transfer["kv_connector"], alone.transfer["engine_id"]) == ("KVAgentConnector", "e")


def test_options_are_checked_together() -> None:
    layers = migrated(config("AscendStoreConnector", use_layerwise=True, load_async=False))
    assert options(layers) == Options(layerwise=True, load_mode="sync")
    assert list(layers.missing) == ["AscendStoreConnector's store"]
    assert layers.became["use_layerwise"].startswith("layerwise: true")


@pytest.mark.parametrize(
    ("given", "left", "refused"),
    [
        ({"use_layerwise": True}, {}, {"use_layerwise": "layerwise: true, allowed only where load_mode is sync"}),
        (
            {"use_layerwise": True, "load_async": False, "store_tp_size": 2},
            {"load_mode": "sync", "share_tp": 2},
            {"use_layerwise": "layerwise: true, allowed only where share_tp"},
        ),
        (
            {"weights_version_file": "/v", "weights_fixed": True},
            {"weights_fixed": True},
            {"weights_version_file": "weights_version_file: allowed only where weights_fixed is false"},
        ),
        (
            {"lazy_offload": True, "pin_percent": 20},
            {"offload": "lazy"},
            {"pin_percent": "watermark_percent: 10.0, allowed"},
        ),
    ],
)
def test_options_that_exclude_each_other_are_reported(
    given: dict[str, Any], left: dict[str, Any], refused: dict[str, str]
) -> None:
    result = migrated(config("NixlConnector", **given))
    assert options(result) == Options(**left)
    assert list(result.missing) == list(refused)
    assert all(result.missing[name].startswith(text) for name, text in refused.items())
    assert not set(result.became) & set(result.missing)


@pytest.mark.parametrize("name", CONNECTORS)
def test_each_option_is_accounted_for_once(name: str) -> None:
    extra: dict[str, Any] = {
        "lookup_rpc_port": 1,
        "save_decode_cache": 1,
        "backends": ["UCX"],
        "eviction_policy": "lru",
        "xyz": 3,
    }
    result = migrated(config(name, **extra))
    assert not set(result.became) & set(result.missing)
    assert set(extra) <= set(result.became) | set(result.missing)
    assert result.missing["xyz"] == "has no counterpart: it is not known here"
    assert options(result).save_decode is True


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (config("XConnector"), "kv_connector: 'XConnector', allowed are MultiConnector, KVAgentConnector"),
        (config("NixlConnector", "both"), "kv_role: 'both', allowed are kv_both"),
        (config("MultiConnector", connectors=3), "connectors: allowed is a list"),
        (config("MultiConnector", connectors=[config("XConnector")]), "connectors: none of them"),
        (None, "nothing to migrate"),
    ],
)
def test_what_cannot_be_translated_is_an_error(given: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        migrated(given)


def test_sizes_and_addresses() -> None:
    assert [size_of(one, GIB) for one in (2, "0.5", "3MB", "1GiB")] == [2 * GIB, GIB // 2, 3 * MIB, GIB]
    assert [formatted(one) for one in (GIB, 3 * MIB, 5)] == ["1GiB", "3MiB", "5"]
    assert remote_tier("valkey://h")[0] == "redis://h:6379"
    assert remote_tier("s3://b.s3.eu-central-1.amazonaws.com/p")[0] == "s3://b/p?region=eu-central-1"
    assert remote_tier("mooncakestore://[::1]:50052/")[0] == "mooncake://[::1]:50052"
    for bad in (lambda: size_of("-1"), lambda: size_of(True), lambda: disk_tier("x", GIB), lambda: disk_tier("/x", 5)):
        with pytest.raises(ValueError, match=r"positive size|absolute path|1048576"):
            bad()
    for address in ("lm://h:1", "redis-sentinel://h", "s3://a.b.c", "h:1"):
        with pytest.raises(ValueError, match="there is no tier"):
            remote_tier(address)


def test_sources_are_told_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "lm.json").write_text('{"max_local_cpu_size": 1, "chunk_size": 16}')
    (tmp_path / "lm.env").write_text("# LMCache\nexport LMCACHE_MAX_LOCAL_CPU_SIZE='2'\n")
    (tmp_path / "vllm.json").write_text(json.dumps({"kv-transfer-config": json.dumps(config("LMCacheConnectorV1"))}))
    read_all = read([str(tmp_path / name) for name in ("lm.json", "lm.env", "vllm.json")], {"LMCACHE_CHUNK_SIZE": "8"})
    assert read_all.lmcache == {"max_local_cpu_size": "2", "chunk_size": "8"}
    assert read_all.transfer == config("LMCacheConnectorV1")
    for given, said in (
        (["{"], "not JSON"),
        ([str(tmp_path / "none")], "No such file"),
        ([str(tmp_path / "lm.json")] * 2, "a second configuration of LMCache"),
        (["{}", '{"kv_connector": "a"}', '{"kv_connector": "b"}'], "a second kv_transfer_config"),
    ):
        with pytest.raises(SourceError, match=said):
            read(given, {})


def test_yaml_without_its_package_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "lm.yaml").write_text("max_local_cpu_size: 1\n")
    with pytest.raises(SourceError, match="YAML needs PyYAML"):
        read([str(tmp_path / "lm.yaml")], {})


def test_the_command_prints_and_says_whether_all_was_translated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([json.dumps(config("OffloadingConnector", cpu_bytes_to_use=GIB))]) == 0
    out = capsys.readouterr().out
    assert "kvagent serve --pool 1GiB\n" in out
    assert '--kv-transfer-config \'{"kv_connector": "KVAgentConnector"' in out
    assert main(["--json", json.dumps(config("OffloadingConnector", block_size=64))]) == 1
    assert list(json.loads(capsys.readouterr().out)["no_counterpart"]) == ["block_size"]
    assert main([]) == 2
    assert "nothing to migrate" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--ranks", "0"])


def test_the_real_agent_takes_the_command_line(tmp_path: Path) -> None:
    lmcache = {
        "max_local_cpu_size": 64 / 1024, "local_disk": str(tmp_path / "disk with space"), "max_local_disk_size": 0.0625,
        "remote_url": "redis://127.0.0.1:1/3", "cache_policy": "LRU",
    }  # fmt: skip
    result = migrated(None, lmcache)
    assert not result.missing
    agent = AgentProcess(tmp_path / "run", *result.serve.command()[2:])
    try:
        assert agent.status()["ready"] is not None
    finally:
        agent.close()


@pytest.mark.parametrize(
    "given",
    [
        {"master_server_address": "10.0.0.2:50088", "protocol": "rdma", "device_name": "mlx5_0"},
        {"master_server_address": "etcd://10.0.0.2:1;10.0.0.3:1", "global_segment_size": "1GB"},
        {"master_server_address": "h:1", "metadata_server": "http://meta:8080/metadata", "preferred": "a:1"},
    ],
)
def test_the_real_agent_reads_the_url_of_a_mooncake_tier(given: dict[str, Any], tmp_path: Path) -> None:
    """The option after it is wrong on purpose: the agent reports all that it does not accept."""
    need_agent()
    preferred = given.pop("preferred", None)
    extra: dict[str, Any] = {"preferred_segment": preferred} if preferred else {}
    transfer = config("MooncakeStoreConnector", **extra)
    result = migrated(transfer, **given)
    (tier,) = result.serve.tiers
    command = [str(BINARY), "serve", "--socket-dir", str(tmp_path), "--tier", f"{tier}&replicas=99"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "replicas" in ended.stderr
    assert [
        name for name in ("master", "metadata", "segment", "devices", "preferred") if f"{name}:" in ended.stderr
    ] == []
