"""Which node a process is on, and which ranks of its engine are there too.

vLLM's configuration says so where vLLM itself spreads the ranks (--nnodes): node k has the k-th of
equal runs of them. With Ray, or a custom executor, each worker tells its node in its first report,
and all must be on that of the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.vllm.plan import WorkerInfo

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DECISION = "docs/decisions/2026-11-23-several-nodes.md"
_WHY = f"an agent serves the engines of its own node ({_DECISION})"


@dataclass(frozen=True, slots=True)
class Part:
    """The ranks of an engine that are on one node, of ``count`` equal parts of ``world`` ranks."""

    index: int = 0
    count: int = 1
    world: int = 1

    @property
    def ranks(self) -> range:
        """Return the part's ranks."""
        size = self.world // self.count
        return range(self.index * size, (self.index + 1) * size)

    @property
    def text(self) -> str:
        """Return the ranks, for the identity."""
        return f"ranks {self.ranks[0]} to {self.ranks[-1]} of {self.world}"


def part(parallel: Any) -> Part:
    """Return the part of the process with vLLM's ParallelConfig. See spread for what is refused."""
    world = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
    count = int(getattr(parallel, "nnodes_within_dp", 1))
    return Part(int(parallel.node_rank_within_dp), count, world) if count > 1 else Part(world=world)


def node() -> str:
    """Return the boot ID of the kernel, which all containers of a node share, and no two nodes. It
    is empty if it cannot be read.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def spread(parallel: Any) -> str:
    """Return why an engine with vLLM's ParallelConfig cannot be served, because its ranks are on
    several nodes, or may be without its scheduler knowing; empty if nothing says so.

    A data-parallel replica is an engine of its own, so only the nodes of one replica count.
    """
    nodes = int(getattr(parallel, "nnodes_within_dp", 1))
    ranks = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
    executor = getattr(parallel, "distributed_executor_backend", None)
    if ranks > 1 and executor == "external_launcher":
        return (
            f"external_launcher with {ranks} ranks: each rank has a scheduler of its own, which hears of no other "
            "rank's blocks, and all must decide the same; start it with --distributed-executor-backend mp"
        )
    if nodes > 1 and (executor != "mp" or ranks % nodes):
        return (
            f"{ranks} ranks on {nodes} nodes (--nnodes), started by the executor {executor}: which ranks are where is "
            f"known only of equal parts and --distributed-executor-backend mp ({_DECISION})"
        )
    return ""


def elsewhere(workers: Sequence[WorkerInfo], own: str) -> str:
    """Return why these workers cannot be served by the agent of the scheduler's node ``own``; empty
    if they can, or if either side could not tell its node.
    """
    away = sum(bool(one.node and own and one.node != own) for one in workers)
    return f"{away} of the engine's ranks are not on the node of its scheduler: {_WHY}" if away else ""
