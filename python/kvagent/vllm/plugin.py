"""The entry point ``vllm.general_plugins``: tells vLLM the connector's name. It runs in every process, so it is light."""

from __future__ import annotations


def register() -> None:
    """Makes ``"kv_connector": "KVAgentConnector"`` known. A second call does nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    if "KVAgentConnector" not in KVConnectorFactory._registry:  # noqa: SLF001
        KVConnectorFactory.register_connector("KVAgentConnector", "kvagent.vllm", "KVAgentConnector")
