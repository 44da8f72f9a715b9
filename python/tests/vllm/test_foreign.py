"""Options and configurations of other connectors, with vLLM's own configuration and scheduler."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvagent.migrate import convert, read
from kvagent.vllm import register
from tests.vllm.setting import BLOCK
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess

PROMPT = [i % 400 + 5 for i in range(100)]


def test_an_option_of_another_connector_is_logged_once_and_holds(
    worlds: Any, agent: AgentProcess, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"consumer_is_to_put": True, "save_decode_cache": False}
    with caplog.at_level(logging.INFO, "vllm.kvagent"):
        world = worlds(extra=given, transfer={"kv_role": "kv_consumer"})
    said = [record.getMessage() for record in caplog.records]
    for line in ("consumer_is_to_put is consumer_saves here", "save_decode_cache is save_decode here"):
        assert len([one for one in said if line in one]) == 1, said
    world.add("cold", PROMPT, 60)
    world.run()
    assert agent.status()["blocks_stored"] == 100 // BLOCK
    clean(world, agent)


def test_an_option_that_differs_ends_the_start(model: Path, agent: AgentProcess) -> None:
    with pytest.raises(ValueError, match="cpu_bytes_to_use: is a setting of the agent: kvagent serve --pool SIZE"):
        World(model, str(agent.folder), extra={"cpu_bytes_to_use": 1 << 30})


@pytest.mark.parametrize(
    "given",
    [
        {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
        {
            "kv_connector": "MultiConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "connectors": [
                    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                     "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}},
                    {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
                ]
            },
        },
    ],
)  # fmt: skip
def test_vllm_takes_what_migrate_makes(given: dict[str, Any]) -> None:
    register()  # as vLLM does at its start
    made = convert({"transfer": given}).transfer
    config = KVTransferConfig(**made)
    assert config.kv_role == given["kv_role"]
    children = config.kv_connector_extra_config.get("connectors", [made])
    classes = [KVConnectorFactory.get_connector_class(KVTransferConfig(**one)) for one in children]
    assert [one.__name__ for one in classes] == ["KVAgentConnector", "ExampleConnector"][: len(children)]


def test_lmcaches_yaml_is_read_with_vllms_yaml(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(
        "max_local_cpu_size: 2\nremote_url: mooncakestore://10.0.0.1:50051/\nextra_config:\n"
        "  protocol: rdma\n  device_name: mlx5_0\n  global_segment_size: 1073741824\n  save_chunk_meta: False\n"
    )
    result = convert(read([str(file)]), 2)
    tier = f"mooncake://10.0.0.1:50051?protocol=rdma&devices=mlx5_0&segment={2 << 30}"
    assert (result.serve, result.missing) == (["--pool", str(4 << 30), "--tier", tier], {})
