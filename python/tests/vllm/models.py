"""Tiny models of several kinds with random weights, as files that vLLM loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.vllm.engine import VOCABULARY

if TYPE_CHECKING:
    from pathlib import Path

WINDOW = 80  # tokens of a sliding window: not a whole number of blocks
CHUNK = 64
LATENT = 64  # numbers of an MLA layer's key, besides those of its position
_COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "initializer_range": 0.3,
    "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip


def _mamba() -> Any:
    from transformers import NemotronHConfig

    layers = ["linear_attention", "full_attention", "linear_attention", "mlp"]
    more = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "head_dim": 32}
    return NemotronHConfig(layers_block_type=layers, rescale_prenorm_residual=False, **more, **_COMMON)


def _sliding() -> Any:
    from transformers import Olmo3Config

    layers = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return Olmo3Config(layer_types=layers, sliding_window=WINDOW, **_COMMON)


def _chunked() -> Any:
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        attention_chunk_size=CHUNK, no_rope_layers=[1, 0, 1, 0], interleave_moe_layer_step=8, head_dim=32,
        intermediate_size_mlp=128, **_COMMON,
    )  # fmt: skip


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(head_dim=32, **_COMMON)


def _sparse() -> Any:
    from transformers import DeepseekV32Config

    more = {"kv_lora_rank": LATENT, "q_lora_rank": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "qk_nope_head_dim": 32}
    more |= {"index_topk": 128, "index_n_heads": 2, "first_k_dense_replace": 8}
    return DeepseekV32Config(**more, **_COMMON | {"tie_word_embeddings": False})


KINDS = {"sparse": _sparse, "mamba": _mamba, "sliding window": _sliding, "chunks": _chunked, "llama": _llama}


def write(kind: str, folder: Path, seed: int = 5) -> Path:
    """Write the weights and the configuration of a model of a kind."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def write_draft(folder: Path, seed: int = 6) -> Path:
    """Write an EAGLE draft of one layer, for the llama."""
    import torch
    from safetensors.torch import save_file

    config = KINDS["llama"]()
    config.num_hidden_layers, config.architectures = 1, ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    size, inner = config.hidden_size, config.intermediate_size
    shapes = {"fc": (size, 2 * size), "layers.0.mlp.down_proj": (size, inner)}
    shapes |= {f"layers.0.self_attn.{name}_proj": (size, size) for name in "qkvo"}
    shapes |= {f"layers.0.mlp.{name}_proj": (inner, size) for name in ("gate", "up")}
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"{name}.weight": torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(size)
    save_file(tensors, str(folder / "model.safetensors"))
    return folder
