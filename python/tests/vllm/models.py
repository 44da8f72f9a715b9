"""Tiny models of other kinds with random weights, as files that vLLM loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.vllm.engine import VOCABULARY

if TYPE_CHECKING:
    from pathlib import Path

WINDOW = 80  # tokens of a sliding window or a chunk: not a whole number of blocks
CHUNK = 64
_COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "initializer_range": 0.3,
    "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip


def _short_conv() -> Any:
    from transformers import Lfm2Config

    layers = ["conv", "full_attention", "conv", "full_attention"]
    return Lfm2Config(layer_types=layers, block_auto_adjust_ff_dim=False, conv_L_cache=4, **_COMMON)


def _sliding() -> Any:
    from transformers import Gemma3TextConfig

    layers = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return Gemma3TextConfig(layer_types=layers, sliding_window=WINDOW, head_dim=32, **_COMMON)


def _chunked() -> Any:
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        attention_chunk_size=CHUNK, no_rope_layers=[1, 0, 1, 0], interleave_moe_layer_step=8, head_dim=32,
        intermediate_size_mlp=128, **_COMMON,
    )  # fmt: skip


KINDS = {"states": _short_conv, "sliding window": _sliding, "chunks": _chunked}


def write(kind: str, folder: Path, seed: int = 5) -> Path:
    """Write the weights and the configuration of a model of a kind."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
