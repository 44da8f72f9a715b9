"""What the kit asks of an engine, on a GPU and on processors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """What is asked of an engine, and what it is made of."""

    # Tokens of each that is asked alone: one more than whole blocks have, so that every hit, the
    # engine's own too, computes one token, and has the same answer.
    prompts: tuple[int, ...]
    batch: int  # prompts that are asked at once, and beside decode
    batch_tokens: int
    decoding: int  # requests that decode meanwhile
    every: int  # steps of decode between two of those prompts
    steps: int  # of decode alone, and beside another engine's saves
    vocabulary: int
    pool: int  # bytes
    block: int  # bytes of a block that the other engine saves
    shape: dict[str, Any]  # of the model
    engine: dict[str, Any]  # arguments of vLLM


GPU = Size(
    (2033, 8177, 32753), 8, 8177, 16, 12, 500, 120_000, 30 << 30, 2 << 20,
    {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "torch_dtype": "bfloat16",
    },
    {
        "dtype": "bfloat16", "max_model_len": 40960, "max_num_batched_tokens": 8192, "max_num_seqs": 64,
        "kv_cache_memory_bytes": 36 << 30,
        "compilation_config": {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24],
        },
    },
)  # fmt: skip
CPU = Size(
    (33, 225), 4, 97, 4, 4, 20, 500, 64 << 20, 64 << 10,
    {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512, "torch_dtype": "float32",
    },
    {
        "dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 512, "max_num_seqs": 16,
        "max_num_batched_tokens": 128, "kv_cache_memory_bytes": 24 << 20,
        "compilation_config": {"custom_ops": ["none"]},
    },
)  # fmt: skip
