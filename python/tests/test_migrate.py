"""Configurations of other connectors become ours: the real agent starts with the command line, and
the connector's own parser takes the options.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.migrate import CONNECTORS, EXTRA, Result, bytes_of, convert, disk_tier, main, read, remote_tier
from kvagent.vllm.options import Options, parse
from tests.agent import BINARY, AgentProcess, need_agent

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30


def migrated(
    transfer: dict[str, Any] | None = None, lmcache: dict[str, Any] | None = None, *, ranks: int = 1, **mooncake: Any
) -> Result:
    sources = {"transfer": transfer, "lmcache": lmcache, "mooncake": mooncake}
    return convert({kind: config for kind, config in sources.items() if config}, ranks)


def options(result: Result) -> Options:
    """Return the options as the connector reads them."""
    return parse(result.transfer.get(EXTRA, {}))


def config(name: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": role, EXTRA: extra}


def test_lmcache_becomes_a_pool_tiers_and_options() -> None:
    lmcache = {
        "chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 2.5, "local_disk": "file:///var/lm/",
        "max_local_disk_size": 20, "remote_url": "redis://kv:secret@10.0.0.1:6380/2", "remote_serde": None,
        "save_decode_cache": False, "min_retrieve_tokens": "128", "use_layerwise": "False",
    }  # fmt: skip
    result = migrated(None, lmcache, ranks=2)
    assert result.serve == [
        "--pool", str(5 * GIB), "--tier", f"disk:/var/lm?capacity={40 * GIB}",
        "--tier", "redis://kv@10.0.0.1:6380/2?password-env=KVAGENT_REDIS_PASSWORD",
    ]  # fmt: skip
    assert "secret" not in repr(result)
    assert options(result) == Options(save_decode=False)
    assert list(result.missing) == ["lmcache.chunk_size", "lmcache.min_retrieve_tokens"]
    assert result.transfer["kv_load_failure_policy"] == "recompute"


MOONCAKE: dict[str, Any] = {
    "local_hostname": "node-7", "metadata_server": "http://10.0.0.1:8080/metadata", "protocol": "rdma",
    "device_name": "mlx5_0,mlx5_1", "master_server_address": "10.0.0.9:50051", "global_segment_size": "1GB",
    "local_buffer_size": 1 << 30,
}  # fmt: skip
TIER = f"?protocol=rdma&devices=mlx5_0,mlx5_1&metadata=http://10.0.0.1:8080/metadata&host=node-7&segment={4 * GIB}"


@pytest.mark.parametrize(
    ("remote", "master"),
    [
        ({"remote_url": "mooncakestore://10.0.0.1:50052/"}, "10.0.0.1:50052"),
        ({"remote_url": "mooncakestore:///"}, "10.0.0.9:50051"),
        ({}, "10.0.0.9:50051"),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_all_of_lmcaches_extra_config_is_read(remote: dict[str, Any], master: str, *, as_text: bool) -> None:
    more = json.dumps(MOONCAKE) if as_text else MOONCAKE
    result = migrated(None, {**remote, "extra_config": more, "max_local_cpu_size": 1}, ranks=4)
    assert result.serve == ["--pool", str(4 * GIB), "--tier", f"mooncake://{master}{TIER}"]
    assert set(MOONCAKE) <= set(result.became)
    assert not result.missing


def test_extra_config_without_a_store_is_reported_whole() -> None:
    more = {key: value for key, value in MOONCAKE.items() if key != "master_server_address"} | {"mine": 3}
    result = migrated(None, {"max_local_cpu_size": 1, "extra_config": more})
    assert set(more) <= set(result.became) | set(result.missing)
    assert result.missing["mine"] == "no counterpart: it is not known here"


def test_a_device_of_the_url_wins() -> None:
    lmcache = {"remote_url": "mooncakestore://h:1/?device=erdma_0", "extra_config": MOONCAKE}
    assert "devices=erdma_0&" in migrated(None, lmcache).serve[1]


def test_ascend_store_becomes_a_mooncake_tier() -> None:
    given = config("AscendStoreConnector", lookup_rpc_port="0", backend="mooncake", load_async=True)
    file: dict[str, Any] = {
        "master_server_address": "10.0.0.2:50088", "device_name": "", "global_segment_size": "1GB",
        "metadata_server": "P2PHANDSHAKE",
    }  # fmt: skip
    tier = f"mooncake://10.0.0.2:50088?metadata=P2PHANDSHAKE&segment={8 * GIB}"
    result = migrated(given, ranks=8, **file)
    assert (result.serve, result.missing) == (["--tier", tier], {})
    assert list(migrated(given).missing) == ["AscendStoreConnector's store"]
    ascend = migrated(given, ranks=8, **file, protocol="ascend")
    assert ascend.serve == ["--tier", tier], "the memory that the node gives is the same"
    assert list(ascend.missing) == ["protocol"]


@pytest.mark.parametrize("load_async", [None, True, False])
def test_use_layerwise_is_layerwise_with_load_mode_auto(load_async: bool | None) -> None:
    """Whatever load_async says: such a connector waits for its layers."""
    result = migrated(config("AscendStoreConnector", use_layerwise=True, load_async=load_async))
    assert result.transfer[EXTRA] == {"layerwise": True, "load_mode": "auto"}
    assert list(result.missing) == ["AscendStoreConnector's store"]
    assert result.became["use_layerwise"] == "layerwise: true, load_mode: auto"


def test_offloading_becomes_a_pool() -> None:
    result = migrated(config("SimpleCPUOffloadConnector", cpu_bytes_to_use_per_rank=GIB, lazy_offload=False), ranks=4)
    assert (result.serve, options(result)) == (["--pool", str(4 * GIB)], Options())
    broken = migrated(config("SimpleCPUOffloadConnector", cpu_bytes_to_use="many"))
    assert (list(broken.missing), broken.serve) == (["cpu_bytes_to_use"], [])
    native = config("OffloadingConnector", cpu_bytes_to_use=3 * MIB, offload_prompt_only=True, eviction_policy="arc")
    result = migrated(native)
    assert (result.serve, options(result).save_decode) == (["--pool", str(3 * MIB)], False)
    assert list(result.missing) == ["eviction_policy"]


def test_several_connectors_become_one_and_others_stay() -> None:
    foreign = config("FlexKVConnectorV1")
    given = config(
        "MultiConnector",
        connectors=[
            foreign, config("NixlConnector", backends=["UCX"]) | {"engine_id": "own"},
            config("OffloadingConnector", cpu_bytes_to_use=GIB),
        ],
    )  # fmt: skip
    result = migrated(given | {"engine_id": "e", "kv_port": 5})
    children = result.transfer[EXTRA]["connectors"]
    assert [one["kv_connector"] for one in children] == ["FlexKVConnectorV1", "KVAgentConnector"]
    assert children[0] == foreign
    assert all("engine_id" not in one for one in children), "vLLM gives them its own, and ends where one has another"
    assert (result.transfer["engine_id"], result.transfer["kv_load_failure_policy"]) == ("e", "recompute")
    assert list(result.missing) == ["backends"]
    alone = migrated(config("MultiConnector", connectors=[config("NixlConnector")]) | {"engine_id": "e"})
    assert (alone.transfer["kv_connector"], alone.transfer["engine_id"]) == ("KVAgentConnector", "e")
    twice = [config("OffloadingConnector", cpu_bytes_to_use=GIB), config("LMCacheConnectorV1")]
    assert list(migrated(config("MultiConnector", connectors=twice), {"max_local_cpu_size": 1}).missing) == [
        "lmcache.max_local_cpu_size"
    ]


@pytest.mark.parametrize("name", CONNECTORS)
def test_nothing_that_is_given_is_lost(name: str) -> None:
    extra: dict[str, Any] = {
        "save_decode_cache": "True", "use_native": True, "chunk_size": 5, "eviction_policy": "lru", "xyz": 3,
    }  # fmt: skip
    result = migrated(config(name, **extra))
    assert not set(result.became) & set(result.missing)
    assert set(extra) <= set(result.became) | set(result.missing)
    assert result.missing["xyz"] == "no counterpart: it is not known here"
    assert options(result).save_decode is True


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (config("XConnector"), "kv_connector: 'XConnector', allowed are MultiConnector and LMCacheConnectorV1"),
        (config("NixlConnector", "both"), "kv_role: 'both', allowed are kv_both"),
        (config("MultiConnector", connectors=3), "connectors: allowed is a list"),
        (config("MultiConnector", connectors=[config("XConnector")]), "kv_connector: 'MultiConnector'"),
        (config("AscendStoreConnector", use_layerwise=True, prefill_tp_size=2) | {EXTRA: [1]}, "allowed are a JSON"),
        (config("MooncakeStoreConnector", store_tp_size=2, use_layerwise=True), "layerwise: true, allowed only where"),
        (config("NixlConnector", offload_prompt_only=True, save_decode_cache=True), "save_decode would be both"),
        (None, "allowed are MultiConnector"),
    ],
)
def test_what_cannot_be_translated_is_an_error(given: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        migrated(given)


def test_sizes_and_addresses() -> None:
    assert [bytes_of(one, GIB) for one in (2, "0.5", "3MB", "1GiB", ".5")] == [
        2 * GIB, GIB // 2, 3 * MIB, GIB, GIB // 2
    ]  # fmt: skip
    assert remote_tier("valkey://[::1]") == "--tier redis://[::1]:6379"
    assert remote_tier("s3://b.s3.eu-central-1.amazonaws.com/p") == "--tier s3://b/p?region=eu-central-1"
    assert remote_tier("s3://b/p/") == "--tier s3://b/p"
    for bad in (lambda: bytes_of("-1"), lambda: bytes_of(True), lambda: bytes_of("0"), lambda: disk_tier("x", GIB)):
        with pytest.raises(ValueError, match=r"positive size|absolute path"):
            bad()
    for address in ("lm://h:1", "redis-sentinel://h", "s3://a.b.c", "h:1"):
        with pytest.raises(ValueError, match="there is no tier"):
            remote_tier(address)
    assert list(migrated(None, {"remote_url": "redis://h:none"}).missing) == ["lmcache.remote_url"]


def test_sources_are_told_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "lm.json").write_text('{"max_local_cpu_size": 1, "chunk_size": 16}')
    (tmp_path / "lm.env").write_text("# LMCache\nPATH=/bin\nexport LMCACHE_MAX_LOCAL_CPU_SIZE='2'\n")
    (tmp_path / "vllm.json").write_text(json.dumps({"kv-transfer-config": json.dumps(config("LMCacheConnectorV1"))}))
    (tmp_path / "mooncake.json").write_text(json.dumps(MOONCAKE))
    given = read([str(tmp_path / name) for name in ("lm.json", "lm.env", "vllm.json", "mooncake.json")])
    assert given["lmcache"] == {"max_local_cpu_size": "2", "chunk_size": 16}
    assert given["transfer"] == config("LMCacheConnectorV1")
    assert given["mooncake"] == MOONCAKE
    for wrong, said in (
        (["{"], "Expecting|expected"),
        ([str(tmp_path / "none")], "No such file"),
        ([str(tmp_path / "lm.json")] * 2, "a second configuration of this kind"),
        (['{"a": 1}', '{"kv_connector": "a"}', '{"kv_connector": "b"}'], "a second configuration of this kind"),
        (["[1]"], "No such file"),
    ):
        with pytest.raises(ValueError, match=said):
            read(wrong)


def test_yaml_without_its_package_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "lm.yaml").write_text("max_local_cpu_size: 1\n")
    with pytest.raises(ValueError, match="YAML needs PyYAML"):
        read([str(tmp_path / "lm.yaml")])


def test_the_command_prints_and_says_whether_all_was_translated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([json.dumps(config("OffloadingConnector", cpu_bytes_to_use=GIB))]) == 0
    out = capsys.readouterr().out
    assert f"kvagent serve --pool {GIB}\n" in out
    assert '--kv-transfer-config \'{"kv_connector": "KVAgentConnector"' in out
    assert main([json.dumps(config("OffloadingConnector", block_size=64))]) == 1
    assert "#   block_size: no counterpart" in capsys.readouterr().out
    assert main([]) == 2
    assert "allowed are" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--ranks", "0"])


def test_the_real_agent_takes_the_command_line(tmp_path: Path) -> None:
    lmcache = {
        "max_local_cpu_size": 64 / 1024, "local_disk": str(tmp_path / "disk with space"), "max_local_disk_size": 0.0625,
        "remote_url": "redis://127.0.0.1:1/3",
    }  # fmt: skip
    result = migrated(None, lmcache)
    assert not result.missing
    agent = AgentProcess(tmp_path / "run", *result.serve)
    try:
        assert agent.status()["ready"] is not None
    finally:
        agent.close()


@pytest.mark.parametrize(
    "given",
    [
        MOONCAKE,
        {"master_server_address": "etcd://10.0.0.2:1;10.0.0.3:1", "global_segment_size": "1GB"},
        {"master_server_address": "h:1", "protocol": "ascend"},
    ],
)
def test_the_real_agent_reads_the_url_of_a_mooncake_tier(given: dict[str, Any], tmp_path: Path) -> None:
    """The option after it is wrong on purpose: the agent reports all that it does not accept."""
    need_agent()
    result = migrated(config("MooncakeStoreConnector"), **given)
    _, tier = result.serve
    command = [str(BINARY), "serve", "--socket-dir", str(tmp_path), "--tier", f"{tier}&replicas=99"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "replicas" in ended.stderr
    assert [name for name in ("master", "metadata", "segment", "devices", "host") if f"{name}:" in ended.stderr] == []
