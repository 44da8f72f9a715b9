"""Stand-ins in torch for the sparse attention of DeepSeek-V3.2, which vLLM has for GPUs alone.

For tests only. The layers, their KV cache specifications and group, block tables and slots are
vLLM's. Each key of the indexer has as many bytes as vLLM's, but they hold 32 exact numbers of it in
place of 128 rounded ones, so that the output does not depend on how requests share steps.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest

_KEPT = 32  # numbers of an indexer's key
_BYTES = 4 * _KEPT


def let_sparse_attention_run(monkeypatch: pytest.MonkeyPatch, latent: int) -> None:
    """Let vLLM's sparse MLA backend for another device run on the CPU. ``latent``: kv_lora_rank."""
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.model_executor.models import deepseek_v2
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.mla import cpu_mla, indexer, xpu_mla_sparse

    class Builder(xpu_mla_sparse.XPUMLASparseMetadataBuilder):
        """Tells the lengths of requests too, for the indexer."""

        def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            made = super().build(common_prefix_len, common, fast_build)
            made.lengths = common.seq_lens
            return made

    backend = xpu_mla_sparse.XPUMLASparseBackend
    path = f"{backend.__module__}.{backend.__qualname__}"
    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(lambda *_, **__: path))
    # Or vLLM's platform rules out prefix caching, for a kernel that is not used here.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for one in (backend, indexer.DeepseekV32IndexerBackend):
        monkeypatch.setattr(one, "get_builder_cls", staticmethod(lambda: Builder))
    update = cpu_mla.CPUMLAImpl.do_kv_cache_update
    monkeypatch.setattr(xpu_mla_sparse.XPUMLASparseImpl, "do_kv_cache_update", update, raising=False)
    monkeypatch.setattr(xpu_mla_sparse.XPUMLASparseImpl, "record_logical_topk_ready", lambda _: None, raising=False)
    attend = functools.partial(attend_to_chosen, latent)
    monkeypatch.setattr(xpu_mla_sparse, "triton_bf16_mla_sparse_interface", attend)
    monkeypatch.setattr(SparseAttnIndexer, "forward_cpu", choose)
    monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", unquantized)


def unquantized(x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x, torch.ones(len(x), 1)


def attend_to_chosen(
    latent: int, q: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, None, None]:
    """Attend to the chosen rows of the cache; -1 stands for none."""
    keys = rows[chosen[:, 0].clamp(min=0).long(), 0].float()
    scores = torch.einsum("qhd,qkd->qhk", q.float(), keys) * sm_scale
    weights = scores.masked_fill((chosen < 0), -torch.inf).softmax(-1)
    return torch.einsum("qhk,qkd->qhd", weights, keys[..., :latent]).to(q.dtype), None, None


def choose(self: Any, hidden: torch.Tensor, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Keep the keys of a step, and choose the tokens that each of its tokens attends to."""
    from vllm.forward_context import get_forward_context

    found = get_forward_context().attn_metadata
    chosen: torch.Tensor = self.topk_indices_buffer
    if found is None:
        return chosen
    about = found[self.k_cache.prefix]
    cache, size = self.k_cache.kv_cache, self.k_cache.kv_cache.shape[1]
    slots = about.slot_mapping[: len(k)]
    used = slots >= 0
    exact = k[: len(slots)][used][:, :_KEPT].float().contiguous().view(torch.uint8)
    cache[slots[used] // size, slots[used] % size, :_BYTES] = exact
    chosen[: len(hidden)] = -1
    bounds = about.query_start_loc.tolist()
    for row, (begin, end) in enumerate(zip(bounds, bounds[1:])):  # noqa: B905, RUF007
        length = int(about.lengths[row])
        blocks = about.block_table[row, : -(-length // size)].long()
        keys = cache[blocks].reshape(-1, cache.shape[2])[:length, :_BYTES].contiguous().view(torch.float32)
        scores = torch.einsum("qhd,kd->qhk", q[begin:end, :, :_KEPT].float(), keys).relu()
        scores = (scores * weights[begin:end, :, None]).sum(1)
        last = torch.arange(length - (end - begin), length)[:, None]
        scores = scores.masked_fill(torch.arange(length)[None] > last, -torch.inf)
        best = scores.topk(min(self.topk_tokens, length))
        chosen[begin:end, : best.indices.shape[1]] = best.indices.masked_fill(best.values.isinf(), -1).int()
    return chosen
