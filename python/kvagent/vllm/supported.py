"""The versions of vLLM that the connector is for. It imports none of it: the doctor asks too."""

from __future__ import annotations

import logging
from typing import Any

from kvagent.vllm.geometry import Unsupported

OLDEST, NEWEST = (0, 29), (0, 33)  # that it is tested with
TESTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
NEEDED = ("bind_gpu_block_pool", "build_connector_worker_meta", "handle_preemptions", "has_pending_push_work")

_OF_NEXT_TOKENS = ("eagle", "eagle3", "mtp")  # methods of speculation

log = logging.getLogger("kvagent.vllm")


def tested(version: str) -> bool:
    """Whether the connector is tested with it."""
    return OLDEST <= tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) <= NEWEST


def check(version: str, base: Any) -> None:
    """Warns of a version that is not tested. Unsupported names what its connectors' base class lacks."""
    if not tested(version):
        log.warning("vLLM %s: this connector is tested with %s", version, TESTED)
    missing = [name for name in NEEDED if not hasattr(base, name)]
    if missing:
        raise Unsupported(f"vLLM {version}: its connectors have no {', '.join(missing)}; 0.29 or newer is needed")


def check_drafts(speculative: Any) -> None:
    """Unsupported: a draft model whose KV at a token depends on the next one. Not every vLLM marks its groups."""
    method = str(getattr(speculative, "method", None) or "")
    if method in _OF_NEXT_TOKENS:
        raise Unsupported(
            f"speculative_config.method {method}: its draft model's KV is in the cache and depends on tokens that a "
            "block's hash does not cover. Such models are not served"
        )


def whole_failures(base: Any) -> bool:
    """Whether a load can be told as failed as a whole (from 0.30 on), as the module of connectors' base class says."""
    return hasattr(base, "KVConnectorTransferResults")


def hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Tokens of one block hash, as the scheduler makes them; None where it does not say (then the groups' greatest)."""
    told = getattr(kv_cache_config, "hash_block_size", None)
    if told is not None:
        return int(told)
    from vllm.v1.core import kv_cache_utils

    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    return int(resolve(kv_cache_config, vllm_config)[1]) if resolve is not None else None
