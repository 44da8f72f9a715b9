"""Which node a process is on.

An agent serves the engines of its own node, so an engine's ranks must be on the node of its
scheduler. vLLM's configuration says so only where vLLM itself spreads them; with Ray, or a custom
executor, each worker tells in its first report.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.vllm.plan import WorkerInfo

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DECISION = "docs/decisions/2026-11-23-several-nodes.md"
_WHY = f"an agent serves the engines of its own node ({_DECISION})"


def node() -> str:
    """Return the boot ID of the kernel, which all containers of a node share, and no two nodes. It
    is empty if it cannot be read.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def spread(parallel: Any) -> str:
    """Return why an engine with vLLM's ParallelConfig is on several nodes, or may be without its
    scheduler knowing; empty if nothing says so.

    A data-parallel replica is an engine of its own, so only the nodes of one replica count.
    """
    nodes = int(getattr(parallel, "nnodes_within_dp", 1))
    if nodes > 1:
        return f"an engine over {nodes} nodes (--nnodes): {_WHY}"
    ranks = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
    if ranks > 1 and getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        return (
            f"external_launcher with {ranks} ranks: each rank has a scheduler of its own, which hears of no other "
            "rank's blocks, and all must decide the same; start it with --distributed-executor-backend mp"
        )
    return ""


def elsewhere(workers: Sequence[WorkerInfo], own: str) -> str:
    """Return why these workers cannot be served by the agent of the scheduler's node ``own``; empty
    if they can, or if either side could not tell its node.
    """
    away = sum(bool(one.node and own and one.node != own) for one in workers)
    return f"{away} of the engine's ranks are not on the node of its scheduler: {_WHY}" if away else ""
