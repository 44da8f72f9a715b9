"""The vLLM configuration of the tests: a model of four layers, with one KV cache group or two."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)  # fmt: skip
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 16
LAYERS = 4
HEADS = 2
HEAD = 8


def vllm_config(
    model: Path, transfer: dict[str, Any] | None, *, layout: str, asynchronous: bool, max_batched: int, ranks: int,
    drafts: int, stages: int = 1,
) -> VllmConfig:  # fmt: skip
    """``ranks``: of all pipeline ``stages`` together."""
    model_config = ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=4096)
    scheduler = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=max_batched, max_model_len=4096, enable_chunked_prefill=True,
        is_encoder_decoder=False, async_scheduling=asynchronous,
    )  # fmt: skip
    cache = CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, cache_dtype="auto", enable_prefix_caching=True)
    cache.kv_cache_layout = layout
    cache.mamba_cache_mode = "align"
    config = VllmConfig(
        model_config=model_config, scheduler_config=scheduler, cache_config=cache, device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
    )  # fmt: skip
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.parallel_config.tensor_parallel_size = ranks // stages
    config.parallel_config.pipeline_parallel_size = stages
    config.parallel_config.world_size = ranks
    if drafts:  # after the other checks: async scheduling wants a drafter on the GPU
        config.speculative_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=drafts, prompt_lookup_min=1, prompt_lookup_max=3,
            target_model_config=model_config, target_parallel_config=config.parallel_config,
        )  # fmt: skip
    return config


def speculate_like_eagle(config: VllmConfig, method: str = "eagle") -> None:
    """Let vLLM treat the drafts as those of a draft model whose one layer is in the cache."""
    draft = copy.copy(config.model_config)
    draft.hf_config = copy.copy(draft.hf_config)
    draft.hf_config.num_hidden_layers = 1
    config.speculative_config.method = method
    config.speculative_config.draft_model_config = draft


def kv_cache_config(
    config: VllmConfig, blocks: int, window: int, scale: int, heads: int = HEADS, kind: str = "sliding"
) -> Any:  # fmt: skip
    """Return the configuration as workers see it. With a window, every second layer has it.

    Blocks of the other layers have ``scale`` times as many tokens. ``heads``: of one rank. The
    ``kind`` of a window is sliding, chunked, mla or states, and "only sliding" where all layers
    have it; of models without one, indexer has layers of two sizes in one group.
    """
    only, kind = kind.startswith("only "), kind.removeprefix("only ")
    common: dict[str, Any] = {"head_size": HEAD, "dtype": torch.float32}
    full: Any = FullAttentionSpec(block_size=BLOCK * scale, num_kv_heads=heads, **common)
    if kind in ("mla", "indexer"):
        full = MLAAttentionSpec(block_size=BLOCK * scale, num_kv_heads=1, **common)
    specs: dict[str, Any] = {f"model.layers.{i}.attn": full for i in range(LAYERS)}
    other = {"block_size": BLOCK, "num_kv_heads": heads * scale} | common
    if kind == "indexer":
        small = MLAAttentionSpec(block_size=BLOCK * scale, num_kv_heads=1, **common | {"head_size": HEAD // 2})
        specs |= {f"model.layers.{i}.indexer.k_cache": small for i in range(LAYERS)}
    elif window:
        narrow: Any = {
            "sliding": lambda: SlidingWindowSpec(sliding_window=window, **other),
            "chunked": lambda: ChunkedLocalAttentionSpec(attention_chunk_size=window, **other),
            "states": lambda: MambaSpec(
                block_size=BLOCK * scale,
                shapes=((3, 8), (5, 16)),
                dtypes=(torch.float32, torch.float32),
                page_size_padded=full.page_size_bytes,
                mamba_cache_mode="align",
            ),
            "mla": lambda: SlidingWindowMLASpec(sliding_window=window, **other | {"num_kv_heads": scale}),
        }[kind]()
        specs = {name: narrow if i % 2 or only else full for i, name in enumerate(specs)}
    groups = planning.get_kv_cache_groups(config, specs)
    assert len(groups) == (2 if window and not only else 1), "the hybrid manager is off"
    layers = max(len(group.layer_names) for group in groups)
    size = sum(spec.page_size_bytes for spec in specs.values()) if kind == "indexer" else full.page_size_bytes * layers
    return planning.get_kv_cache_config_from_groups(config, groups, blocks * size)
