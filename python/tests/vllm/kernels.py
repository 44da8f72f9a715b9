"""Stand-ins in torch for the C++ kernels that vLLM's CPU backend needs, which its CUDA wheel lacks.

For tests only.

The engine around them is the real one: LLM, EngineCore, the scheduler, CPUWorker, CPUModelRunner.
They compute plain attention over the paged KV cache; each function's arguments are those of vLLM's
op of the same name.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_SEEN: list[bool] = []


def install() -> None:
    """Install the stand-ins where vLLM looks for its ops. Repeated calls do nothing."""
    if _SEEN:
        return
    _SEEN.append(True)
    ops = torch.ops._C
    for function in (
        init_cpu_memory_env, get_scheduler_metadata, compute_slot_mapping_kernel_impl, cpu_attn_reshape_and_cache,
        cpu_attention_with_kv_cache, greedy_argmax, fused_gumbel_argmax, rejection_greedy_sample_kernel_impl,
    ):  # fmt: skip
        setattr(ops, function.__name__, function)


def let_stages_receive() -> None:
    """Make the buffers between pipeline stages where they are used: without a warm-up of compiled
    models, which enforce_eager leaves out, vLLM 0.33 has none on CPUs.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

    gather = getattr(Runner, "sync_and_gather_intermediate_tensors", None)
    if gather is None:
        return

    def made(self: Any, *given: Any, **named: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *given, **named)

    Runner.sync_and_gather_intermediate_tensors = made


def init_cpu_memory_env(nodes: Any) -> None:
    """Do nothing: vLLM binds memory to NUMA nodes here."""


def get_scheduler_metadata(*_: Any) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int8)


def compute_slot_mapping_kernel_impl(
    starts: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, block: int
) -> None:
    bounds = starts.tolist()
    for row, (begin, end) in enumerate(zip(bounds, bounds[1:])):  # noqa: B905, RUF007
        at = positions[begin:end].long()
        slots[begin:end] = tables[row][at // block].long() * block + at % block


def cpu_attn_reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, *_: Any
) -> None:
    block = keys.shape[2]
    count = min(len(slots), len(key))
    used = slots[:count] >= 0
    at = slots[:count][used]
    keys[at // block, :, at % block] = key[:count][used].to(keys.dtype)
    values[at // block, :, at % block] = value[:count][used].to(values.dtype)


def cpu_attention_with_kv_cache(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, output: torch.Tensor, starts: torch.Tensor,
    lengths: torch.Tensor, scale: float, causal: bool, alibi: Any, window: Any, tables: torch.Tensor, *_: Any,
) -> None:  # fmt: skip
    bounds, block = starts.tolist(), keys.shape[2]
    heads, size = query.shape[1], query.shape[2]
    out = output.view(output.shape[0], heads, size)
    for row, (begin, end) in enumerate(zip(bounds, bounds[1:])):  # noqa: B905, RUF007
        length = int(lengths[row])
        if end <= begin:
            continue
        blocks = tables[row, : -(-length // block)].long()
        k, v = (c[blocks].transpose(1, 2).reshape(-1, c.shape[1], size)[:length].float() for c in (keys, values))
        repeat = heads // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), k) * scale
        if causal:
            rows = torch.arange(length - (end - begin), length)[:, None]
            scores = scores.masked_fill(torch.arange(length)[None] > rows, -math.inf)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)


def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1).view(-1)


def fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Return the only token that is not excluded (top_k=1), as in the tests: no noise is needed."""
    assert bool((torch.isfinite(logits).sum(-1) == 1).all()), "the tests leave nothing to chance"
    return logits.argmax(dim=-1).view(-1)


def rejection_greedy_sample_kernel_impl(
    output: torch.Tensor, ends: torch.Tensor, drafts: torch.Tensor, best: torch.Tensor, bonus: torch.Tensor,
    greedy: torch.Tensor | None, most: int,
) -> None:  # fmt: skip
    """Accept each request's drafts that match the model's output, then its own token or the
    bonus.
    """
    begin = 0
    for row, end in enumerate(ends.tolist()):
        if greedy is None or bool(greedy[row]):
            said = best[begin:end]
            wrong = (drafts[begin:end] != said).nonzero()
            count = int(wrong[0]) + 1 if len(wrong) else end - begin
            output[row, :count] = said[:count]
            if not len(wrong):
                output[row, count] = bonus.view(-1)[row]
        begin = end
