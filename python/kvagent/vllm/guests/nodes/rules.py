"""What an engine over several nodes is served with, and as what its parts register."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvagent.identity import identity_pairs
from kvagent.vllm.geometry import WITHOUT_DRAFTS, Ranks, Unsupported, shard
from kvagent.vllm.options import LAZY
from kvagent.vllm.weight_changes import PAIR as GENERATION
from kvagent.vllm.weight_changes import UNSHARED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.guests.nodes.orders import News
    from kvagent.vllm.options import Options
    from kvagent.vllm.placement import Part

Identity = tuple[tuple[str, str], ...]
PAIR = "part"
_OWN = (PAIR, GENERATION, UNSHARED, "resolved")
"""Pairs that may differ between the parts of an engine: the generation is ordered by the scheduler,
and blocks of all attention backends that may have computed other parts are equivalent.
"""


def check_part(part: Part, vllm_config: Any, geometry: Geometry, options: Options, kv_role: str) -> Options:
    """Return the options that hold for an engine with these parts. Raise Unsupported."""
    if part.count < 2:
        return options
    rank = int(vllm_config.parallel_config.rank)
    why = ""
    if geometry.states or any(group.window for group in geometry.groups):
        why = "windows or states: the least of the nodes' hits is not a hit at all of them"
    elif options.share_tp or options.share_pp:
        why = "share_tp or share_pp: engines of other shapes have their ranks on other nodes"
    elif kv_role != "kv_both":
        why = f"kv_role {kv_role}: a transfer has one agent"
    elif options.load_mode == "sync" or options.layerwise:
        why = "load_mode sync or layerwise: a step would wait for all agents"
    elif options.offload == LAZY:
        why = "offload lazy"
    elif getattr(vllm_config, "lora_config", None) is not None:
        why = "LoRA adapters: that all nodes have the same content of each is not proved"
    elif method := _drafts(vllm_config):
        why = f"speculative_config.method {method}: what all nodes have of a draft model's blocks is not proved"
    elif rank % part.world not in part.ranks:
        why = f"rank {rank} on node {part.index}, which has {part.text}"
    if why:
        raise Unsupported(f"an engine over {part.count} nodes with {why} (docs/decisions/2026-11-23-several-nodes.md)")
    return replace(options, transfers=False, load_mode="async")


def part_ranks(part: Part, whole: Ranks, tp: int, replicas: int) -> Ranks:
    """Return how the KV cache is distributed over the part's ranks."""
    return whole if part.count < 2 else Ranks(len(part.ranks), len(_shards(part, tp, replicas)))


def part_shard(part: Part, rank: int, tp: int, replicas: int) -> int:
    """Return a worker's shard among those of its part, in which they are numbered anew."""
    return _shards(part, tp, replicas).index(shard(rank, tp, replicas))


def with_part(pairs: Identity, part: Part) -> Identity:
    """Return the identity of a part; that of an engine on one node is as it was."""
    return pairs if part.count < 2 else identity_pairs(dict(pairs) | {PAIR: part.text})


def difference(own: Identity, news: Iterable[News]) -> str:
    """Return why a part cannot belong to the scheduler's engine: the bytes that its ranks compute
    depend on what the other parts compute, so all that determines bytes has to be equal everywhere.
    """
    for one in news:
        if one.identity:
            here, there = dict(own), dict(one.identity)
            names = [key for key in sorted(here | there) if key not in _OWN and here.get(key) != there.get(key)]
            if names:
                return f"node {one.part} of the engine has another {', '.join(names)} than that of its scheduler"
    return ""


def _drafts(vllm_config: Any) -> str:
    """Return the speculation method if it has a draft model, which may have KV."""
    speculative = getattr(vllm_config, "speculative_config", None)
    method = str(getattr(speculative, "method", None) or "")
    return "" if speculative is None or method in WITHOUT_DRAFTS else method or "of a draft model"


def _shards(part: Part, tp: int, replicas: int) -> list[int]:
    return sorted({shard(rank, tp, replicas) for rank in part.ranks})
