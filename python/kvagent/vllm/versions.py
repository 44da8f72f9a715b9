"""Which vLLM this is, and what its connectors can be told."""

from __future__ import annotations

import logging
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvagent.vllm.geometry import Unsupported

OLDEST, NEWEST = (0, 29), (0, 33)  # versions of vLLM that this connector is tested with
NEEDED = ("bind_gpu_block_pool", "build_connector_worker_meta", "handle_preemptions", "has_pending_push_work")
WHOLE_FAILURES = hasattr(base, "KVConnectorTransferResults")
"""Whether a load can be told as failed as a whole (from 0.30 on)."""

log = logging.getLogger("kvagent.vllm")


def check_version(version: str = vllm.__version__, methods: Any = base.KVConnectorBase_V1) -> None:
    """Warns of a version that is not tested. Unsupported names the methods that are missing."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers <= NEWEST:
        log.warning("vLLM %s: this connector is tested with %d.%d to %d.%d", version, *OLDEST, *NEWEST)
    missing = [name for name in NEEDED if not hasattr(methods, name)]
    if missing:
        raise Unsupported(f"vLLM {version}: its connectors have no {', '.join(missing)}; 0.29 or newer is needed")


def hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Tokens of one block hash, as the scheduler makes them; None where it does not say (then the groups' greatest)."""
    told = getattr(kv_cache_config, "hash_block_size", None)
    if told is not None:
        return int(told)
    from vllm.v1.core import kv_cache_utils

    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    return int(resolve(kv_cache_config, vllm_config)[1]) if resolve is not None else None
