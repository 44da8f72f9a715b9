"""What this vLLM can be told, and what it says."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

WHOLE_FAILURES = hasattr(base, "KVConnectorTransferResults")
"""Whether a load can be told as failed as a whole (from 0.30 on)."""


def hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Tokens of one block hash, as the scheduler makes them; None where it does not say (then the groups' greatest)."""
    told = getattr(kv_cache_config, "hash_block_size", None)
    if told is not None:
        return int(told)
    from vllm.v1.core import kv_cache_utils

    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    return int(resolve(kv_cache_config, vllm_config)[1]) if resolve is not None else None
