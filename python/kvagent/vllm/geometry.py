"""An engine's KV cache groups, ranks and layout as the agent sees them, the node that its ranks are
on, and which models and vLLM versions are supported.

vLLM's configuration says which ranks are on a node where vLLM itself spreads them (--nnodes): node
k has the k-th of equal runs of them. With Ray, or a custom executor, each worker tells its node in
its first report, and all must be on that of the scheduler.

Workers see the specifications of all layers of a group (UniformTypeKVCacheSpecs), the scheduler
that of one of them. Both take the first one's. Specifications are known by the names of their
classes, so that this imports no vllm.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvagent.limits import CHUNKED, MAX_GROUPS, MAX_WORLD
from kvagent.messages import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.vllm.plan import Report, StepPlan, WorkerInfo


MLA = "MLAAttentionSpec"
FULL = ("FullAttentionSpec", MLA, "SinkFullAttentionSpec")
WINDOW = ("SlidingWindowSpec", "SlidingWindowMLASpec")
CHUNKED_LOCAL = "ChunkedLocalAttentionSpec"
STATE = "MambaSpec"
SERVED = (*FULL, *WINDOW, CHUNKED_LOCAL, STATE)
_STATE_WINDOW = 2  # tokens: the next token needs the one before it, so that a hit needs the last block
_UNIFORM = "UniformTypeKVCacheSpecs"


def layer_specs(spec: Any) -> list[Any]:
    """Return the different specifications of a group's layers; the first is the scheduler's."""
    if type(spec).__name__ != _UNIFORM:
        return [spec]
    found: list[Any] = []
    for one in spec.kv_cache_specs.values():
        if one not in found:
            found.append(one)
    return found


def group_spec(spec: Any) -> Any:
    """Return the specification that a group is known by, in the scheduler and in the workers."""
    if type(spec).__name__ != _UNIFORM:
        return spec
    return next(iter(spec.kv_cache_specs.values()))


def window(spec: Any) -> int:
    """Return a group's window as the agent is told of it (messages.Group)."""
    one = group_spec(spec)
    name = type(one).__name__
    if name in WINDOW:
        return int(one.sliding_window)
    if name == STATE:
        return _STATE_WINDOW
    return CHUNKED + int(one.attention_chunk_size) if name == CHUNKED_LOCAL else 0


def is_state(spec: Any) -> bool:
    """Return whether a group's blocks are states: each stands for all tokens before its end."""
    return type(group_spec(spec)).__name__ == STATE


def refusal(group: Any) -> str:
    """Return why a group cannot be served, as the end of a sentence, or an empty string."""
    specs = layer_specs(group.kv_cache_spec)
    first = specs[0]
    for one in specs:
        if reason := _refusal(one):
            return reason
        if (window(one), one.block_size, _replicated(one)) != (window(first), first.block_size, _replicated(first)):
            return (
                f"has layers of {type(first).__name__} and {type(one).__name__} that differ in window, block size or "
                "replication"
            )
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        return "is one that vLLM keeps from connectors (enable_kv_transfer, host_resident)"
    return ""


def canvas_refusal(model: Any) -> str:
    """Return why no group of vLLM's ModelConfig can be served, or an empty string: the KV of tokens
    that were made on a canvas depends on later ones until it is computed again, which a client may
    leave out (diffusion_read_only).
    """
    if not getattr(model, "is_diffusion", False):
        return ""
    return "the model generates by diffusion: the KV of its tokens may depend on later ones, which hashes do not cover"


def _refusal(spec: Any) -> str:
    name = type(spec).__name__
    if name not in SERVED:
        return f"is of {name}; served are {', '.join(SERVED)}"
    mode = getattr(spec, "mamba_cache_mode", "none")
    if name == STATE and mode != "align":
        return (
            f"has states of mamba_cache_mode {mode}, allowed is align: vLLM keeps none otherwise; start it with prefix "
            "caching"
        )
    drafts = int(getattr(spec, "num_speculative_blocks", 0))
    if name == STATE and drafts:
        return f"has {drafts} blocks of states for draft tokens, allowed are 0: start vLLM without speculative_config"
    if getattr(spec, "non_causal", False):
        return "has layers that attend to later tokens (non_causal), which its block hashes do not cover"
    if getattr(spec, "bounded_replay", False):
        return "is computed again after each hit (bounded_replay), which the connector cannot ask vLLM for"
    return ""


def _replicated(spec: Any) -> bool:
    return type(spec).__name__ == MLA or getattr(spec, "max_tp_shards", None) == 1


Identity = tuple[tuple[str, str], ...]


class Unsupported(ValueError):
    """A model, feature, memory or vLLM that this connector does not support. The text says why. The
    engine starts and is served uncached, unless on_unsupported says otherwise. A mistake in the
    options is an OptionError, which always ends the start.
    """


@dataclass(frozen=True, slots=True)
class Geometry:
    """The groups, the number of tokens per block hash, and which groups hold states."""

    groups: tuple[Group, ...]
    hash_tokens: int
    states: frozenset[int] = frozenset()
    following: int = 0
    """How many tokens after a block its bytes depend on (drafts)."""

    @property
    def align(self) -> int:
        """Return the smallest number of tokens that is a whole number of blocks in every group."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    def scale(self, group: int) -> int:
        """Return the number of hashes per block of the group; a block's key is the last of them."""
        return self.groups[group].block_tokens // self.hash_tokens


def geometry(kv_cache_config: Any, hash_tokens: int, following: int = 0) -> Geometry:
    """Return the geometry of a KVCacheConfig. Unsupported names the group that is not served."""
    found = kv_cache_config.kv_cache_groups
    if not 1 <= len(found) <= MAX_GROUPS:
        raise Unsupported(f"the model has {len(found) or 'no'} KV cache groups, allowed is 1 to {MAX_GROUPS}")
    for i, group in enumerate(found):
        if reason := refusal(group):
            raise Unsupported(f"KV cache group {i} {reason}")
        if group.kv_cache_spec.block_size % hash_tokens:
            tokens = group.kv_cache_spec.block_size
            raise Unsupported(f"KV cache group {i}: blocks of {tokens} tokens, hashes of {hash_tokens}")
    blocks, specs = int(kv_cache_config.num_blocks), [group.kv_cache_spec for group in found]
    groups = tuple(Group(int(spec.block_size), blocks, window(spec)) for spec in specs)
    states = frozenset(i for i, spec in enumerate(specs) if is_state(spec))
    return Geometry(groups, hash_tokens, states, following)


def fails_by_block(kv_cache_config: Any) -> bool:
    """Return whether vLLM is told of the blocks that failed to load, and not only of the request.
    It keeps the blocks before the first of them. With a window or states these are not all that the
    tokens after them need.
    """
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and not window(groups[0].kv_cache_spec)


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the KV cache is distributed over workers."""

    world: int
    shards: int


def replicated(kv_cache_config: Any) -> bool:
    """Return whether all tensor-parallel ranks hold the same KV, however many there are."""
    groups = kv_cache_config.kv_cache_groups
    return bool(groups) and all(_replicated(group_spec(group.kv_cache_spec)) for group in groups)


def ranks(parallel: Any, kv_cache_config: Any) -> tuple[Ranks, int]:
    """Return the distribution, and how many adjacent tensor-parallel ranks hold the same KV."""
    _check_spread(parallel)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name)) > 1:
            raise Unsupported(
                f"{name} {getattr(parallel, name)}: each rank has only some tokens of a block, interleaved, and a "
                "shard is a range of heads and layers of all its tokens; start it without "
                f"--{name.replace('_', '-')} (docs/decisions/2026-11-23-context-parallel.md)"
            )
    tp, pp = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    replicas = int(kv_cache_config.kv_tp_replicas)
    if replicated(kv_cache_config):
        replicas = tp
    if (count := len(part(parallel).ranks)) > MAX_WORLD:  # those of one agent
        raise Unsupported(f"{count} ranks, allowed is 1 to {MAX_WORLD}")
    return Ranks(tp * pp, tp // replicas * pp), replicas


def shard(rank: int, tp: int, replicas: int) -> int:
    """Return a worker's shard: stages are consecutive, and replicas within a stage share one."""
    return rank // tp * (tp // replicas) + rank % tp // replicas


@dataclass(frozen=True, slots=True)
class Part:
    """The ranks of an engine that are on one node, of ``count`` equal parts of ``world`` ranks, and
    what of the engine they register there: all of it. Guests serve engines with several parts.
    """

    index: int = 0
    count: int = 1
    world: int = 1
    tp: int = 1

    @property
    def ranks(self) -> range:
        """Return the part's ranks."""
        size = self.world // self.count
        return range(self.index * size, (self.index + 1) * size)

    def of_ranks(self, whole: Ranks, replicas: int) -> Ranks:  # noqa: ARG002
        """Return how the KV cache is distributed over the part's ranks."""
        return whole

    def of_identity(self, pairs: Identity) -> Identity:
        """Return the identity of the part."""
        return pairs

    def of_plan(self, plan: StepPlan) -> StepPlan:
        """Return a plan as the part's ranks read it."""
        return plan

    def shard(self, rank: int, replicas: int) -> int:
        """Return a worker's shard in the part."""
        return shard(rank, self.tp, replicas)

    def difference(self, own: Identity, report: Report) -> str:  # noqa: ARG002
        """Return why these ranks cannot be served with a scheduler of this identity, if so."""
        return elsewhere(report.workers, node()) if report.workers else ""


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DECISION = "docs/decisions/2026-11-23-several-nodes.md"
_WHY = f"an agent serves the engines of its own node ({_DECISION})"


def part(parallel: Any) -> Part:
    """Return the part of the process with vLLM's ParallelConfig."""
    world = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
    count = int(parallel.nnodes_within_dp)
    index = int(parallel.node_rank_within_dp) if count > 1 else 0
    return Part(index, count, world, int(parallel.tensor_parallel_size))


def node() -> str:
    """Return the kernel's boot ID, which no two nodes share; empty if it cannot be read."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _check_spread(parallel: Any) -> None:
    """Raise Unsupported if the ranks are on several nodes, or may be without their scheduler
    knowing. A data-parallel replica is an engine of its own, so only the nodes of one count.
    """
    nodes = int(parallel.nnodes_within_dp)
    ranks = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
    executor = parallel.distributed_executor_backend
    if ranks > 1 and executor == "external_launcher":
        raise Unsupported(
            f"external_launcher with {ranks} ranks: each rank has a scheduler of its own, which hears of no other "
            "rank's blocks, and all must decide the same; start it with --distributed-executor-backend mp"
        )
    if nodes > 1 and (executor != "mp" or ranks % nodes):
        raise Unsupported(
            f"{ranks} ranks on {nodes} nodes (--nnodes), started by the executor {executor}: which ranks are where is "
            f"known only of equal parts and --distributed-executor-backend mp ({_DECISION})"
        )


def elsewhere(workers: Sequence[WorkerInfo], own: str) -> str:
    """Return why the agent of node ``own`` cannot serve these workers, if both tell theirs."""
    away = sum(bool(one.node and own and one.node != own) for one in workers)
    return f"{away} of the engine's ranks are not on the node of its scheduler: {_WHY}" if away else ""


ONE_RUN = ("BLHNC", "BLNHC")  # a block is contiguous over all layers
ONE_RUN_A_LAYER = ("LBHNC", "LBNHC")  # all blocks of a layer lie together

log = logging.getLogger("vllm.kvagent")


def preferred_layout(
    vllm_config: Any, option: str, supported: Callable[[Any], Sequence[str]] | None = None, *, layerwise: bool = False
) -> str | None:
    """Return the layout to ask for, None for vLLM's choice. ``layerwise``: for such copies."""
    if option != "auto":
        return None if option == "none" else option
    if vllm_config.device_config.device_type != "cuda":
        return None
    try:
        names = (supported or _supported)(vllm_config)
    except Exception as error:  # noqa: BLE001  vLLM's internals, which may raise anything
        log.info("layout: the attention backend could not be determined (%s): vLLM chooses", error)
        return None
    found = next((name for name in names if name in (ONE_RUN_A_LAYER if layerwise else ONE_RUN)), None)
    if found is None:
        log.info("layout: the attention backend reads %s; blocks are copied layer by layer", ", ".join(names))
    return found


def _supported(vllm_config: Any) -> Sequence[str]:
    """Return the layouts that the model's attention backend supports, best first."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
    from vllm.v1.attention.selector import get_attn_backend

    model, cache = vllm_config.model_config, vllm_config.cache_config
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            model.get_head_size(), model.dtype, cache.cache_dtype, use_mla=bool(model.use_mla),
            has_sliding_window=model.get_sliding_window() is not None,
        )  # fmt: skip
        return [layout.name for layout in get_supported_kv_cache_layouts([backend])]


OLDEST, NEWEST = (0, 31), (0, 33)  # the range that the tests cover
TESTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
_NEEDED = f"{OLDEST[0]}.{OLDEST[1]} or newer"
NEEDED = ("bind_kv_cache_manager", "build_connector_worker_meta", "get_transfer_results", "has_pending_push_work")

WITHOUT_DRAFTS = ("ngram", "ngram_gpu", "suffix", "custom_class")  # speculation methods that use no model weights


def tested(version: str) -> bool:
    """Return whether the connector is tested with this version."""
    return OLDEST <= _minor(version) <= NEWEST


def check(version: str, base: Any = None) -> None:
    """Warn about an untested version. Raise Unsupported if it is too old, or if its connector base
    class lacks a needed method. A build of vLLM's source may have no version (0.1.dev), so only a
    release is too old.
    """
    if _minor(version) < OLDEST and "dev" not in version:
        raise Unsupported(f"vLLM {version} is too old: {_NEEDED} is needed")
    if not tested(version):
        log.warning("vLLM %s: this connector is tested with %s", version, TESTED)
    if missing := [name for name in NEEDED if base is not None and not hasattr(base, name)]:
        raise Unsupported(f"vLLM {version}: its connectors have no {', '.join(missing)}; {_NEEDED} is needed")


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the number of tokens per block hash in the scheduler."""
    told = getattr(kv_cache_config, "hash_block_size", None)  # from 0.32 on
    if told is not None:
        return int(told)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])
