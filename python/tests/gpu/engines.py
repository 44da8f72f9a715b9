"""Times of a real vLLM engine with one connector after the other: the README's table.

``cd python; python -m tests.gpu.engines MODEL`` in vLLM's environment, with kvagent's wheel in it.
MODEL is a folder with a model; a model of Llama 3.1 8B's shape with random weights is written there
if it is empty. Each engine has a process of its own, and the engine core in it; with kvagent it is
killed, and another one finds what it saved. Each engine's times, in milliseconds, and whether hits
had the same tokens are a line of JSON, then a table. ``--cpu`` plays it on processors, with
prompts and a model that are small.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT_S = 300.0  # for one engine
IDLE_S = 1.0  # steps without requests, in which a connector finishes its saves
REPEATS = 3  # hits of one prompt

Answer = tuple[list[int], list[float]]  # tokens, and their log probabilities


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
    vocabulary: int
    pool: int  # bytes
    shape: dict[str, Any]  # of the model
    engine: dict[str, Any]  # arguments of vLLM


GPU = Size(
    (2033, 8177, 32753), 8, 8177, 16, 12, 120_000, 30 << 30,
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
    (33, 225), 4, 97, 4, 4, 500, 64 << 20,
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


def transfer(name: str, sockets: str, size: Size) -> dict[str, Any] | None:
    """Return the arguments of a connector; "again" is kvagent in a new engine."""
    if name == "none":
        return None
    if name in ("kvagent", "again"):
        # Hits come after a reset of the engine's own cache, which else stands for new weights.
        own = {"socket_dir": sockets, "agent": "start", "pool": str(size.pool), "weights_fixed": True}
        return {"kv_connector": "KVAgentConnector", "kv_load_failure_policy": "recompute"} | {
            "kv_role": "kv_both", "kv_connector_extra_config": own,
        }  # fmt: skip
    return {
        "kv_connector": {"offloading": "OffloadingConnector", "simple": "SimpleCPUOffloadConnector"}[name],
        "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": size.pool},
    }  # fmt: skip


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


class Bench:
    """An engine, and the times and answers of its requests."""

    def __init__(self, model: Path, size: Size, connector: dict[str, Any] | None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        more = {} if connector is None else {"kv_transfer_config": KVTransferConfig(**connector)}
        llm = LLM(model=str(model), skip_tokenizer_init=True, load_format="safetensors", seed=0, **size.engine, **more)
        self._engine = llm.llm_engine
        self._size, self._asked = size, 0
        self._first: dict[str, float] = {}
        self._ended: set[str] = set()
        self._answers: dict[str, Answer] = {}
        self._times: dict[str, list[float]] = {}  # of each token

    def prompt(self, seed: int, tokens: int) -> list[int]:
        """Return a random prompt."""
        dice = random.Random(seed)
        return [dice.randrange(5, self._size.vocabulary) for _ in range(tokens)]

    def add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        self._asked += 1
        name = f"request-{self._asked}"
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def step(self) -> None:
        for one in self._engine.step():
            now, said = time.perf_counter(), one.outputs[0]
            tokens = list(said.token_ids)
            self._first.setdefault(one.request_id, now)
            times = self._times.setdefault(one.request_id, [])
            times.extend([now] * (len(tokens) - len(times)))
            probable = [
                round(float(at[token].logprob), 6) for token, at in zip(tokens, said.logprobs or [], strict=True)
            ]
            self._answers[one.request_id] = (tokens, probable)
            if one.finished:
                self._ended.add(one.request_id)

    def ask(self, prompts: Sequence[list[int]], tokens: int = 8) -> tuple[float, list[Answer]]:
        """Return the time to the last one's first token, and the answers."""
        begin = time.perf_counter()
        names = [self.add(prompt, tokens) for prompt in prompts]
        while not self._ended.issuperset(names):
            self.step()
        return self.ms(begin, max(self._first[name] for name in names)), [self._answers[name] for name in names]

    @staticmethod
    def ms(begin: float, end: float) -> float:
        return round((end - begin) * 1e3, 1)

    def idle(self, seconds: float = IDLE_S) -> None:
        """Step without requests, as an engine core of its own does."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.step()
            time.sleep(0.002)

    def forget(self) -> None:
        """Reset the engine's own cache."""
        for _ in range(50):
            if self._engine.reset_prefix_cache():
                return
            self.idle(0.1)
        raise AssertionError("the engine's cache is still in use")

    def alone(self, seed: int, tokens: int, known: list[Answer] | None) -> tuple[dict[str, Any], list[Answer]]:
        """Return the times of one prompt, computed and hit, how many hits had the same tokens, how
        far apart their log probabilities were, and its answers.
        """
        prompt = self.prompt(seed, tokens)
        row: dict[str, Any] = {}
        if known is None:
            row["computed"], _ = self.ask([prompt])
            self.idle()
            row["local"], known = self.ask([prompt])
            self.forget()
        row["hit"], row["same_tokens"], row["most_apart"] = [], 0, 0.0
        for _ in range(REPEATS):
            took, answers = self.ask([prompt])
            row["hit"].append(took)
            row["same_tokens"] += answers[0][0] == known[0][0]
            row["most_apart"] = max(
                row["most_apart"], *(abs(a - b) for a, b in zip(answers[0][1], known[0][1], strict=True))
            )
            self.forget()
        return row, known

    def decode(self, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """Return the gaps between tokens of requests that decode while prompts arrive, and the time
        until all of these had their first token.
        """
        size = self._size
        running = [
            self.add(self.prompt(5000 + i, size.batch_tokens // 8), size.batch_tokens) for i in range(size.decoding)
        ]
        while not self._first.keys() >= set(running):
            self.step()
        begin, before = time.perf_counter(), len(self._times[running[0]])
        waiting, added = list(prompts), list[str]()
        while waiting or not self._ended.issuperset(added):
            if waiting and len(self._times[running[0]]) - before >= size.every * len(added):
                added.append(self.add(waiting.pop(0), 1))
            self.step()
        whole = self.ms(begin, time.perf_counter())
        times = self._times[running[0]][before:]
        self._engine.abort_request(running)
        while self._engine.has_unfinished_requests():
            self.step()
        gaps = sorted(self.ms(one, two) for one, two in itertools.pairwise(times))
        return {"ms": whole, "gap_p50": gaps[len(gaps) // 2], "gap_p99": gaps[int(len(gaps) * 0.99)]}


def run_one(name: str, model: Path, sockets: str, size: Size, known: dict[str, list[Answer]]) -> dict[str, Any]:
    """Run one engine. ``known`` has the answers of the engine before this one, if it saved."""
    bench = Bench(model, size, transfer(name, sockets, size))
    for i in range(2):
        bench.ask([bench.prompt(90 + i, size.batch_tokens)] * (1 + 2 * i), 16)  # what comes once, at the first requests
    row: dict[str, Any] = {"connector": name, "prompts": {}, "answers": {}}
    for tokens in size.prompts:
        row["prompts"][tokens], row["answers"][tokens] = bench.alone(tokens, tokens, known.get(str(tokens)))
    batch = [bench.prompt(1000 + i, size.batch_tokens) for i in range(size.batch)]
    if not known:
        row["batch_computed"], _ = bench.ask(batch, 1)
        bench.idle()
        bench.forget()
    row["batch_hit"] = []
    for _ in range(2):
        row["batch_hit"].append(bench.ask(batch, 1)[0])
        bench.forget()
    row["decode_beside_hits"] = bench.decode(batch)
    bench.idle()
    bench.forget()
    fresh = [bench.prompt((3000 if known else 2000) + i, size.batch_tokens) for i in range(size.batch)]
    row["decode_beside_new"] = bench.decode(fresh)
    return row


def child(arguments: argparse.Namespace, size: Size) -> None:
    """Run one engine in this process, which ends as if it were killed."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if size is CPU:
        from tests.vllm import kernels

        kernels.plugin()
        kernels.install()
    known = json.loads(os.environ.get("KNOWN_ANSWERS", "{}"))
    known = {tokens: [tuple(one) for one in answers] for tokens, answers in known.items()}
    row = run_one(arguments.one, arguments.model, arguments.socket_dir, size, known)
    sys.stdout.write(f"={json.dumps(row)}\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def engine(name: str, arguments: argparse.Namespace, answers: dict[str, Any]) -> dict[str, Any] | None:
    """Run an engine in a process of its own; return its row, or None if it said nothing."""
    command = [sys.executable, "-m", "tests.gpu.engines", str(arguments.model), "--one", name]
    command += ["--socket-dir", arguments.socket_dir, *(["--cpu"] if arguments.cpu else [])]
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if arguments.cpu:
        settings["VLLM_TARGET_DEVICE"] = "cpu"
    if name == "again":
        settings["KNOWN_ANSWERS"] = json.dumps(answers)
    run = subprocess.run(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    rows = [line[1:] for line in run.stdout.splitlines() if line.startswith("={")]
    row: dict[str, Any] | None = json.loads(rows[0]) if rows else None
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows, as Markdown."""

    def spread(values: list[float]) -> str:
        return f"{min(values):.0f} to {max(values):.0f}"

    lines = [["", *(row["connector"] for row in rows)], ["---", *("--:" for _ in rows)]]
    for tokens in rows[0]["prompts"]:
        of = [row["prompts"][tokens] for row in rows]
        lines.append([f"{tokens} tokens, computed", *(str(one.get("computed", "")) for one in of)])
        lines.append([f"{tokens} tokens, hit", *(spread(one["hit"]) for one in of)])
        lines.append(["hits with the tokens of before", *(f"{one['same_tokens']} of {REPEATS}" for one in of)])
        lines.append(["log probabilities apart", *(f"{one['most_apart']:.1g}" for one in of)])
    lines.append(["a batch, computed", *(str(row.get("batch_computed", "")) for row in rows)])
    lines.append(["a batch, hit", *(spread(row["batch_hit"]) for row in rows)])
    for beside in ("hits", "new"):
        of = [row[f"decode_beside_{beside}"] for row in rows]
        lines.append([f"decode beside {beside}: whole; gap p50, p99",
                      *(f"{one['ms']:.0f}; {one['gap_p50']}, {one['gap_p99']}" for one in of)])  # fmt: skip
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.engines", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the model")
    names = ("none", "kvagent", "again", "offloading", "simple")
    parser.add_argument("--connectors", nargs="+", choices=names, default=names, help="again: kvagent in a new engine")
    parser.add_argument("--socket-dir", default="/tmp/kvagent-engines", help="the agent's (default %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="on processors, with a small model")
    parser.add_argument("--one", choices=names, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = CPU if arguments.cpu else GPU
    if arguments.one:
        child(arguments, size)
    if not (arguments.model / "config.json").exists():
        arguments.model.mkdir(parents=True, exist_ok=True)
        write_model(arguments.model, size)
    print(json.dumps({"size": asdict(size)}))
    rows: list[dict[str, Any]] = []
    answers: dict[str, Any] = {}
    for name in arguments.connectors:
        row = engine(name, arguments, answers)
        if row is None:
            sys.stderr.write(f"{name}: no figures; its messages are above\n")
            continue
        said = row.pop("answers")
        answers = said if name == "kvagent" else answers
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(table(rows) if rows else "", end="")
    sys.exit(len(rows) < len(arguments.connectors))


if __name__ == "__main__":
    main()
