"""The connector that lets vLLM save KV blocks to an agent and load them from it (docs/VLLM.md of the repository).

``KVAgentConnector`` is made when it is asked for: this package and all modules of it but ``connector`` import neither
vllm nor torch.
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
    """Makes ``"kv_connector": "KVAgentConnector"`` known: the entry point ``vllm.general_plugins``.

    Every process of vLLM runs it. A second call does nothing.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVAgentConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVAgentConnector", "kvagent.vllm", "KVAgentConnector")
