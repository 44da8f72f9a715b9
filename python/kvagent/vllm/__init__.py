"""The vLLM connector: saves KV blocks to an agent and loads them from it (docs/VLLM.md in the
repository).

``KVAgentConnector`` is imported on first use. Only the connector class, ``metadata`` and the two
``calls`` modules import vllm; no module imports torch at import time.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVAgentConnector", "register"]


def __getattr__(name: str) -> Any:
    if name != "KVAgentConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvagent.vllm.connector import KVAgentConnector

    return KVAgentConnector


def register() -> None:
    """Register ``"kv_connector": "KVAgentConnector"`` with vLLM.

    This is the entry point ``vllm.general_plugins``, which every vLLM process runs. Repeated calls
    do nothing.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVAgentConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVAgentConnector", "kvagent.vllm", "KVAgentConnector")
