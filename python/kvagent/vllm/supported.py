"""The vLLM versions that the connector supports, and what each can do.

Imports no vllm: the doctor uses it too.
"""

from __future__ import annotations

import logging
from typing import Any

from kvagent.vllm.geometry import Unsupported

OLDEST, NEWEST = (0, 29), (0, 33)  # the range that the tests cover
TESTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
NEEDED = ("bind_gpu_block_pool", "build_connector_worker_meta", "handle_preemptions", "has_pending_push_work")

_OF_NEXT_TOKENS = ("eagle", "eagle3", "mtp")  # speculation methods

log = logging.getLogger("kvagent.vllm")


def tested(version: str) -> bool:
    """Return whether the connector is tested with this version."""
    return OLDEST <= tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) <= NEWEST


def check(version: str, base: Any) -> None:
    """Warn about an untested version.

    Raise Unsupported if its connector base class lacks a needed method.
    """
    if not tested(version):
        log.warning("vLLM %s: this connector is tested with %s", version, TESTED)
    missing = [name for name in NEEDED if not hasattr(base, name)]
    if missing:
        raise Unsupported(f"vLLM {version}: its connectors have no {', '.join(missing)}; 0.29 or newer is needed")


def check_drafts(speculative: Any) -> None:
    """Raise Unsupported for a draft model whose KV depends on the next token.

    Not every vLLM version marks the groups of such models.
    """
    method = str(getattr(speculative, "method", None) or "")
    if method in _OF_NEXT_TOKENS:
        raise Unsupported(
            f"speculative_config.method {method}: its draft model's KV is in the cache and depends on tokens that a "
            "block's hash does not cover. Such models are not supported"
        )


def whole_failures(base: Any) -> bool:
    """Return whether vLLM accepts the failure of a whole load (0.30 and later).

    ``base`` is the module of its connectors' base class.
    """
    return hasattr(base, "KVConnectorTransferResults")


def hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Return the number of tokens per block hash in the scheduler; None if vLLM does not tell."""
    told = getattr(kv_cache_config, "hash_block_size", None)
    if told is not None:
        return int(told)
    from vllm.v1.core import kv_cache_utils

    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    return int(resolve(kv_cache_config, vllm_config)[1]) if resolve is not None else None
