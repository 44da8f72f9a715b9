"""A real engine on the CPU: a tiny OPT with random weights, and a process for a second one."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.agent import BINARY, be_patient, eventually
from tests.vllm.forks import Forked

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 32  # tokens: CPU attention takes multiples of it
LAYERS, HIDDEN, VOCABULARY = 2, 64, 512


def write_model(folder: Path, ffn: int = 128, seed: int = 5) -> Path:
    """Write random weights, large enough that outputs depend on the prompt (load_format=dummy gives
    zeros).
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    decoder = "model.decoder."
    tensors = {
        f"{decoder}embed_tokens.weight": weights(VOCABULARY, HIDDEN),
        f"{decoder}embed_positions.weight": weights(2050, HIDDEN),
    }
    for norm in ("final_layer_norm", *(f"layers.{i}.{n}" for i in range(LAYERS) for n in _NORMS)):
        tensors |= {f"{decoder}{norm}.weight": torch.ones(HIDDEN), f"{decoder}{norm}.bias": torch.zeros(HIDDEN)}
    for i in range(LAYERS):
        for name, out, into in (
            *((f"self_attn.{p}_proj", HIDDEN, HIDDEN) for p in ("q", "k", "v", "out")),
            ("fc1", ffn, HIDDEN), ("fc2", HIDDEN, ffn),
        ):  # fmt: skip
            tensors[f"{decoder}layers.{i}.{name}.weight"] = weights(out, into)
            tensors[f"{decoder}layers.{i}.{name}.bias"] = weights(out)
    folder.mkdir(exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"))
    config = {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "max_position_embeddings": 2048,
        "num_hidden_layers": LAYERS, "num_attention_heads": 2, "hidden_size": HIDDEN, "word_embed_proj_dim": HIDDEN,
        "ffn_dim": ffn, "vocab_size": VOCABULARY, "do_layer_norm_before": True, "activation_function": "relu",
        "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


_NORMS = ("self_attn_layer_norm", "final_layer_norm")


def make_engine(model: Path, socket_dir: str | None, **more: Any) -> Any:
    """Return a vllm.LLM, with the connector if there is a socket directory; ``options`` are the
    connector's.

    Its weights do not change unless the options say so: each reset concerns the cache alone.
    """
    from vllm import LLM

    from tests.vllm import kernels

    kernels.plugin()
    kernels.install()
    gc.freeze()  # while it starts, vLLM looks for garbage often, in all that was ever imported
    return LLM(**arguments(model, socket_dir, **more))


def arguments(model: Path, socket_dir: str | None, **more: Any) -> dict[str, Any]:
    """Return the arguments of vLLM for make_engine."""
    from vllm.config import KVEventsConfig, KVTransferConfig

    transfer, role = None, more.pop("kv_role", "kv_both")
    if isinstance(more.get("kv_events_config"), dict):
        more["kv_events_config"] = KVEventsConfig(**more["kv_events_config"])
    options = more.pop("options", {"weights_fixed": True})
    if socket_dir is not None:
        extra = {
            "socket_dir": socket_dir, "min_load_tokens": BLOCK, "load_deadline_ms": more.pop("deadline_ms", 10_000),
            "pin_percent": 20, "lookup_grace_ms": 10_000, "lookup_age_ms": more.pop("age_ms", 10_000),
            "start_wait_ms": 20_000, **options,
        }  # fmt: skip
        transfer = KVTransferConfig(
            kv_connector="KVAgentConnector", kv_role=role, kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        )  # fmt: skip
    return {
        "model": str(model), "skip_tokenizer_init": True, "load_format": "safetensors", "dtype": "float32",
        "enforce_eager": True, "kv_cache_memory_bytes": 16 << 20, "kv_transfer_config": transfer, "block_size": BLOCK,
        "max_model_len": 1024, "disable_log_stats": True,
    } | more  # fmt: skip


def generate(engine: Any, prompts: list[list[int]], tokens: int = 24) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    results = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def _prompts() -> list[list[int]]:
    """Return six prompts, two of which share a prefix."""
    head = [(i * 37) % 450 + 10 for i in range(160)]
    return [head + [20 + i] * (20 + i) for i in range(2)] + [
        [(i * (7 + n)) % 450 + 10 for i in range(100 + 50 * n)] for n in range(4)
    ]


PROMPTS = _prompts()
WHOLE_BLOCKS = sum((len(p) - 1) // BLOCK for p in PROMPTS)


def sides(llm: Any) -> tuple[Any, Any]:
    """Return the connector's sides of an engine in this process: the scheduler's, and its only
    worker's.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler, get_kv_transfer_group()._worker


def preemptions(llm: Any) -> list[str]:
    """Return a list to which each request is added that the engine preempts from now on."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, found = scheduler._preempt_request, []

    def called(request: Any, *more: Any, **named: Any) -> Any:
        found.append(request.request_id)
        return preempt(request, *more, **named)

    scheduler._preempt_request = called
    return found


def settle(llm: Any) -> None:
    """Step an idle engine until its last saves are reported: a reset would revoke them."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler

    def heard() -> bool:
        llm.llm_engine.step()
        return not scheduler.has_requests()

    eventually(heard, "the end of all saves")


def keeps_its_pool() -> bool:
    """Return whether the agent can keep its pool when it ends."""
    run = subprocess.run([str(BINARY), "serve", "--help"], check=True, capture_output=True, text=True, timeout=60)
    return "--dram-path" in run.stdout


def exported(llm: Any) -> dict[str, int]:
    """Return the connector's counters in the registry that vLLM serves at /metrics."""
    return {one.name: int(one.value) for one in llm.get_metrics() if one.name.startswith("vllm:kvagent_")}


def documented() -> set[str]:
    """Return the connector's counters and gauges of docs/VLLM.md, as get_metrics names
    them.
    """
    docs = Path(os.environ.get("KVAGENT_DOCS") or Path(__file__).resolve().parents[3] / "docs")
    return set(re.findall(r"`(vllm:kvagent_(?!tier_)\w+?)(?:_total)?`", (docs / "VLLM.md").read_text()))


def print_metrics(model: str, socket_dir: str) -> None:
    """Print what an engine says, and its metrics before and after it, as JSON in the last line.

    Scheduler and worker are in processes of their own, as under `vllm serve`.
    """
    llm = make_engine(Path(model), socket_dir, disable_log_stats=False, distributed_executor_backend="mp")
    before = exported(llm)
    said = generate(llm, PROMPTS)
    generate(llm, [[5, 6, 7]], 1)  # counters are reported at most ten times a second
    print(json.dumps({"said": said, "before": before, "after": exported(llm)}))


def run_elsewhere(model: Path, socket_dir: Path, **more: Any) -> list[list[int]]:
    """Return the answers to PROMPTS of an engine in another process, whose saves have ended."""
    answers: list[list[int]] = told_elsewhere(print_answers, str(model), str(socket_dir), json.dumps(more))
    return answers


def told_elsewhere(function: Callable[..., object], *arguments: str) -> Any:
    """Call a function that starts an engine, in another process. Return the JSON that it printed
    last.
    """
    # Several workers are on one NUMA node.
    process = Forked(function, *arguments, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    limit = threading.Timer(ELSEWHERE_S, process.kill)
    limit.start()
    try:
        lines = process.stdout.readlines()
        assert process.wait() == 0, "what it said is above"
        return json.loads(next(line for line in reversed(lines) if line.startswith(("[[", '{"'))))  # logs follow
    finally:
        limit.cancel()
        process.close()


ELSEWHERE_S = 600.0  # for what takes half a minute on an idle machine


def print_answers(model: str, socket_dir: str, options: str) -> None:
    """Print the answers to PROMPTS, as JSON in the last line; ``options`` are make_engine's."""
    from tests.vllm import kernels

    be_patient()
    kernels.let_stages_receive()
    llm = make_engine(Path(model), socket_dir, **json.loads(options))
    said = generate(llm, PROMPTS)
    settle(llm)
    print(json.dumps(said), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__mp_main__":  # a worker that such a process spawned
    from tests.vllm import kernels

    kernels.install()

if __name__ == "__main__":
    print_metrics(*sys.argv[1:])
