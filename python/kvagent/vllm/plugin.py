"""The entry point ``vllm.general_plugins``: tells vLLM the connector's name. It is light: every process runs it."""

from __future__ import annotations


def register() -> None:
    """Makes ``"kv_connector": "KVAgentConnector"`` known. A second call does nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVAgentConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVAgentConnector", "kvagent.vllm", "KVAgentConnector")
