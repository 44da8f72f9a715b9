"""A Llama model of random weights: ``python -m tests.gpu.model FOLDER [--cpu]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.gpu.sizes import CPU, GPU, Size


def write_model(folder: Path, size: Size) -> None:
    """Write a Llama model of random weights, of which each prompt has another continuation."""
    import torch
    from safetensors.torch import save_file

    shape = size.shape
    hidden, ffn, heads = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * heads, shape["num_key_value_heads"] * heads
    tiny, kind = size is CPU, getattr(torch, shape["torch_dtype"])
    device = "cpu" if tiny else "cuda"
    generator = torch.Generator(device).manual_seed(7)

    def weights(*dimensions: int, spread: float = 0.02) -> torch.Tensor:
        drawn = torch.randn(*dimensions, generator=generator, device=device)
        return (drawn * (0.2 if tiny else spread)).to(kind).cpu()

    def layer(i: int) -> dict[str, torch.Tensor]:
        at, ones = f"model.layers.{i}.", torch.ones(hidden, dtype=kind)
        return {
            f"{at}self_attn.q_proj.weight": weights(queries, hidden, spread=0.03),
            f"{at}self_attn.k_proj.weight": weights(keys, hidden, spread=0.03),
            f"{at}self_attn.v_proj.weight": weights(keys, hidden),
            f"{at}self_attn.o_proj.weight": weights(hidden, queries),
            f"{at}mlp.gate_proj.weight": weights(ffn, hidden), f"{at}mlp.up_proj.weight": weights(ffn, hidden),
            f"{at}mlp.down_proj.weight": weights(hidden, ffn),
            f"{at}input_layernorm.weight": ones, f"{at}post_attention_layernorm.weight": ones.clone(),
        }  # fmt: skip

    ends = {
        "model.embed_tokens.weight": weights(shape["vocab_size"], hidden, spread=1.0),
        "lm_head.weight": weights(shape["vocab_size"], hidden, spread=0.05),
        "model.norm.weight": torch.ones(hidden, dtype=kind),
    }
    index: dict[str, str] = {}
    for i, tensors in enumerate([ends, *(layer(i) for i in range(shape["num_hidden_layers"]))]):
        name = f"model-{i:05d}.safetensors"
        save_file(tensors, str(folder / name), metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = shape | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    write_model(place, CPU if "--cpu" in sys.argv else GPU)
