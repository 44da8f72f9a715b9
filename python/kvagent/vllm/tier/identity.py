"""The identity of the tier's space: what the connector's is made of, and the layout of the chunks.

vLLM gives a tier neither its model's configuration nor its hash algorithm, so both come from the
construction of vLLM's connector (construction). Without them, and wherever the identity does not
determine the bytes of a chunk, the engine shares with no other.
"""

from __future__ import annotations

import logging
import platform
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvagent.limits import MAX_GROUPS
from kvagent.registration import identity_pairs
from kvagent.vllm.geometry import Ranks, canvas_refusal
from kvagent.vllm.space import digest, identity, unknown_weights
from kvagent.vllm.weight_changes import LOADED, PRIVATE, UNSHARED, initial_generation

if TYPE_CHECKING:
    from kvagent.vllm.tier.construction import Construction
    from kvagent.vllm.tier.options import TierOptions

MAX_TOKENS = 1 << 16  # of a chunk as the agent sees it, so that those of a question fit 32 bits
MAX_ROW = 1 << 30  # bytes
PLUGIN = (
    "vLLM did not load the plugin kvagent: install the package in vLLM's environment, and do not disable its "
    "plugins (VLLM_PLUGINS)"
)

log = logging.getLogger("vllm.kvagent")


@dataclass(frozen=True, slots=True)
class Space:
    """The space of an engine that starts."""

    identity: tuple[tuple[str, str], ...]
    generation: str
    groups: int
    tokens: int
    """Of a chunk of any group, as registered: the agent only counts in them."""
    reasons: tuple[str, ...]
    """Why it is shared with no other engine; empty if it is."""


def refusal(construction: Construction | None, config: Any, row_bytes: int, rows: int) -> str:
    """Return why the tier cannot serve this engine; empty if it can."""
    whole = construction.vllm_config if construction is not None else None
    if getattr(whole, "lora_config", None) is not None:
        return "LoRA is enabled: vLLM keys chunks by the adapter's name, which says nothing of its content"
    if whole is not None and (reason := canvas_refusal(whole.model_config)):
        return reason
    parallel = getattr(whole, "parallel_config", None)
    on_one_node = int(getattr(parallel, "nnodes", 1)) == 1 and (
        getattr(parallel, "distributed_executor_backend", None) in (None, "mp", "uni")
    )
    if config.parallel.world_size > 1 and (parallel is None or not on_one_node):  # each node has a region of its own
        return "its ranks may be on other nodes, whose part of vLLM's host region cannot be reached"
    if len(config.groups) > MAX_GROUPS or _groups(config) > MAX_GROUPS:
        return f"the model has {len(config.groups)} KV cache groups, allowed is at most {MAX_GROUPS}"
    if row_bytes > MAX_ROW:
        return f"a chunk has {row_bytes} bytes, allowed is at most {MAX_ROW}: choose fewer blocks_per_chunk"
    return "" if rows else "vLLM's host region has no rows"


def space(
    construction: Construction | None, config: Any, options: TierOptions, row_bytes: int, version: str,
    unobserved: list[str],
) -> Space:  # fmt: skip
    """Return the space. ``unobserved``: why weights may change unnoticed at run time."""
    layout = {"chunk": _layout(construction, config, row_bytes), "tenant": options.tenant}
    groups, private = _groups(config), PRIVATE + secrets.token_hex(16)
    tokens = min(config.groups[0].tokens_per_block * config.cache.blocks_per_chunk, MAX_TOKENS)
    reason, pairs = PLUGIN, {"model": str(config.model.name), "dtype": str(config.model.dtype)}
    if construction is not None:
        try:
            reason, pairs = "", _connector_pairs(construction, options, version)
        except (AttributeError, KeyError, TypeError) as error:
            reason = f"vLLM's configuration cannot be read: {error}"
    identified = identity_pairs(pairs | layout)
    if construction is None or reason:
        return Space(identified, private, groups, tokens, (reason,))
    unknown, media = unknown_weights(identified), []
    model = construction.vllm_config.model_config
    if not options.trust_media and getattr(model, "multimodal_config", None) is not None:
        media.append("vLLM keys images, audio and video by identifiers that clients may choose (trust_media)")
    if UNSHARED in pairs:
        media.append("a value of vLLM's configuration has no form that can be compared")
    reasons = [*unobserved, *unknown, *media]
    generation = initial_generation(construction.vllm_config, options.weights_version, reasons)
    if media:  # a name of the weights says nothing of them
        generation = private
    return Space(identified, generation, groups, tokens, tuple(reasons) if generation.startswith(PRIVATE) else ())


def explain(found: Space) -> None:
    """Log who shares the space, once."""
    if found.reasons:
        log.warning(
            "tier: this engine shares chunks with no other engine, and does not find them after a restart: %s. See "
            "docs/VLLM.md", "; ".join(found.reasons),
        )  # fmt: skip
    elif found.generation != LOADED:
        log.info("tier: the weights count as %s", found.generation)


def _connector_pairs(construction: Construction, options: TierOptions, version: str) -> dict[str, str]:
    vllm_config = construction.vllm_config
    world = int(vllm_config.parallel_config.world_size)
    pairs = dict(identity(vllm_config, construction.kv_cache_config, options.tenant, Ranks(world, 1), version))
    return pairs | {"hardware": _hardware()}


def _hardware() -> str:
    """Return the model of the GPUs: on equal ones vLLM resolves the same backends, which no worker
    reports here. Where it is not known, only engines of this host share.
    """
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return ""
    try:
        return str(current_platform.get_device_name())
    except (NotImplementedError, RuntimeError, AttributeError) as error:
        log.info("tier: the GPUs' model cannot be determined: %s", error)
        return f"of host {platform.node()}"


def _groups(config: Any) -> int:
    """Return how many groups the keys' numbers need."""
    return max((int(group.group_id) + 1 for group in config.groups), default=0)


def _layout(construction: Construction | None, config: Any, row_bytes: int) -> str:
    """Return the digest of what determines the place of every byte in a chunk, besides the
    connector's pairs: all that vLLM tells its tiers but which engine and rank this is, which blocks
    of a chunk it writes where a window or a state needs only some (retention), its runner.
    """
    whole = construction.vllm_config if construction is not None else None
    ranks = ("rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local")
    told = _without(config, "engine_id", "extra_config", "enable_kv_cache_events")
    told = repr(replace(told, parallel=_without(config.parallel, *ranks)))
    retention = getattr(getattr(whole, "cache_config", None), "prefix_cache_retention_interval", None)
    runner = bool(getattr(whole, "use_v2_model_runner", False))
    placement = _placement(construction.kv_cache_config) if construction is not None else []
    return digest([row_bytes, told, retention, runner, placement], "chunk")


def _without(config: Any, *names: str) -> Any:
    return replace(config, **{name: None for name in names if hasattr(config, name)})


def _placement(kv_cache_config: Any) -> list[Any]:
    """Return which layers' pages are where in a block, in whatever number of blocks. A tensor's
    offset lies in the block where blocks hold all layers; else it is a number of whole layers, each
    of as many pages as there are blocks.
    """
    placed = []
    for one in getattr(kv_cache_config, "kv_cache_tensors", None) or ():
        stride, offset = int(one.block_stride), int(one.offset)
        offset = offset if offset < stride else offset // max(1, int(kv_cache_config.num_blocks))
        placed.append([stride, offset, *one.layers])
    return placed
