"""The vLLM connector: saves KV blocks to an agent and loads them from it (docs/VLLM.md in the
repository).

``KVAgentConnector`` is imported on first use. Only ``connector`` and the tier's ``manager`` import
vllm; no module imports torch at import time.

All modules log to ``vllm.kvagent``. vLLM configures the logger ``vllm`` alone, in each of its
processes, so that a line of any other logger below WARNING is dropped; this one gets the level,
format and handlers that vLLM or the user gave to ``vllm``, and falls to the root logger where
neither did.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["KVAgentConnector", "register"]


def _named(record: logging.LogRecord) -> bool:
    """Prefix a message with the product's name, since vLLM's format does not show the logger's."""
    record.msg = f"kvagent: {record.msg}"
    return True


TIER = "kvagent.vllm.tier"

logging.getLogger("vllm.kvagent").addFilter(_named)


def __getattr__(name: str) -> Any:
    if name != "KVAgentConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvagent.vllm.connector import KVAgentConnector

    return KVAgentConnector


def register() -> None:
    """Register ``"kv_connector": "KVAgentConnector"`` with vLLM, and have its OffloadingConnector
    keep its configuration at hand for KVAgentTier.

    This is the entry point ``vllm.general_plugins``, which every vLLM process runs. Repeated calls
    do nothing.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvagent.vllm.internals import registered

    known = registered(KVConnectorFactory)
    if find_spec(TIER) is not None:
        import_module(f"{TIER}.construction").observe(known)
    if "KVAgentConnector" not in known:
        KVConnectorFactory.register_connector("KVAgentConnector", "kvagent.vllm", "KVAgentConnector")
