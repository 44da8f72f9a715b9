"""Stand-ins in torch for the C++ kernels that vLLM's CPU backend needs, which its CUDA wheel lacks.

For tests only.

The engine around them is the real one: LLM, EngineCore, the scheduler, CPUWorker, CPUModelRunner.
They compute plain attention over the paged KV cache, and the states of convolutions and of Mamba 2,
token by token; each function's arguments are those of vLLM's op of the same name.
"""

from __future__ import annotations

import atexit
import functools
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest

_SEEN: list[bool] = []


@functools.cache
def plugin() -> Path:
    """Make the stand-ins a plugin of vLLM, for this process and those that have the returned folder
    in PYTHONPATH: engines share only with those that have the same plugins.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvagent-standins-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    info = folder / "standins-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: standins\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nstandins = tests.vllm.kernels:install\n")
    sys.path.append(str(folder))
    return folder


def install() -> None:
    """Install the stand-ins, and let configurations set constants of the connector."""
    from tests import constants

    constants.allow()
    install_kernels()


def install_kernels() -> None:
    """Install the stand-ins where vLLM looks for its ops. Repeated calls do nothing.

    scripts/cpu-vllm installs a copy of this file alone.
    """
    if _SEEN:
        return
    _SEEN.append(True)
    ops = torch.ops._C
    for function in (
        init_cpu_memory_env, get_scheduler_metadata, compute_slot_mapping_kernel_impl, cpu_attn_reshape_and_cache,
        cpu_attention_with_kv_cache, greedy_argmax, fused_gumbel_argmax, rejection_greedy_sample_kernel_impl,
        causal_conv1d_update_cpu_vec, selective_state_update_cpu,
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


def let_states_be_kept() -> None:
    """Replace vLLM 0.33's scan of Mamba 2 for CPUs, which lacks the states in the middle of a
    prompt that its runner keeps.
    """
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    ssd_combined._mamba_chunk_scan_combined_fwd = mamba_chunk_scan_combined_fwd


def let_the_second_runner_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose vLLM's second model runner, whose Triton kernels the interpreter runs."""
    from vllm.v1.worker import gpu_worker

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(gpu_worker, "HAS_TRITON", True)


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
    lengths: torch.Tensor, scale: float, causal: bool, alibi: Any, window: int, tables: torch.Tensor, *_: Any,
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
            if window > 0:
                scores = scores.masked_fill(torch.arange(length)[None] <= rows - window, -math.inf)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)


def causal_conv1d_update_cpu_vec(
    x: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None,
    indices: torch.Tensor, *_: Any,
) -> torch.Tensor:  # fmt: skip
    """Move each row's state on by one token, in place, and return the convolution's output."""
    out = torch.empty_like(x)
    for row, at in enumerate(indices.flatten().tolist()):
        seen = torch.cat([states[at], x[row][:, None].to(states.dtype)], 1)
        out[row] = (seen * weight).sum(1) + (0 if bias is None else bias)
        states[at] = seen[:, 1:]
    return torch.nn.functional.silu(out) if activation else out


def mamba_chunk_scan_combined_fwd(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, chunk_size: int,
    out: torch.Tensor, *, dt_bias: torch.Tensor, initial_states: torch.Tensor | None,
    return_intermediate_states: bool, cu_seqlens: torch.Tensor, cu_chunk_seqlens: torch.Tensor,
    last_chunk_indices: torch.Tensor, state_dtype: torch.dtype, **named: Any,
) -> torch.Tensor:  # fmt: skip
    """Return the states at the ends of all chunks, or of the last one of each prompt."""
    ends = cu_chunk_seqlens[1:].tolist()
    states = torch.zeros(len(ends), x.shape[1], x.shape[2], b.shape[2])
    step, chunk = torch.nn.functional.softplus(dt.float() + dt_bias), 0
    for row, end in enumerate(cu_seqlens[1:].tolist()):
        state = torch.zeros(states.shape[1:]) if initial_states is None else initial_states[row].float()
        for at in range(int(cu_seqlens[row]), end):
            out[at] = _mamba(state, x[at], step[at][:, None], a[:, None, None], b[at], c[at], named["D"])
            if at + 1 == ends[chunk]:
                states[chunk] = state
                chunk += 1
    return (states if return_intermediate_states else states[last_chunk_indices]).to(state_dtype)


def selective_state_update_cpu(
    states: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    d: torch.Tensor | None, z: torch.Tensor | None, bias: torch.Tensor, softplus: bool, indices: torch.Tensor,
    targets: torch.Tensor | None, null: int, out: torch.Tensor, accepted: Any, *_: Any,
) -> None:  # fmt: skip
    """Move each row's state on by one token, in place."""
    assert softplus
    assert z is None
    assert accepted is None
    for row, at in enumerate(indices.flatten().tolist()):
        to = at if targets is None else int(targets.flatten()[row])
        state = states[at].float()
        step = torch.nn.functional.softplus(dt[row].float() + bias)
        out[row] = _mamba(state, x[row], step, a, b[row], c[row], None if d is None else d[:, 0])
        states[to] = state.to(states.dtype)


def _mamba(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    d: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Move a state [heads, dim, n] on by a token, in place, and return the output [heads, dim]."""
    b, c = (one.float().repeat_interleave(len(state) // len(one), 0)[:, None] for one in (b, c))
    x, dt = x.float(), dt.expand(x.shape).float()[..., None]
    state.mul_(torch.exp(dt * a)).add_(dt * x[..., None] * b)
    return (state * c).sum(-1) + (0 if d is None else d.float()[:, None] * x)


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
