"""One real vLLM engine: its times, and the answers of its requests.

``python -m tests.gpu.engines KIND MODEL SOCKETS [--cpu]`` imports vLLM, reads a line of JSON, the
answers that an engine before it had, and prints what it measured after each part: =, and JSON.
Times are in milliseconds. It does not end by itself: it is killed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.agents import Agent
from tests.gpu.copier import copying
from tests.gpu.sizes import CPU, GPU, Size

if TYPE_CHECKING:
    from collections.abc import Sequence

IDLE_S = 1.0  # steps without requests, in which a connector finishes its saves
REPEATS = 3  # hits of one prompt

OURS, OFFLOADING = "KVAgentConnector", "OffloadingConnector"

Answer = tuple[list[int], list[float]]  # tokens, and their log probabilities


@dataclass(frozen=True)
class Kind:
    """An engine of the kit."""

    title: str
    connector: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    apart: bool = False  # the engine core has its own process, as is vLLM's default
    knows: bool = False  # it asks for what an engine before it saved
    brief: bool = False  # no decode
    copies: bool = False  # it decodes beside another engine's saves, with --pace and without

    @property
    def ours(self) -> bool:
        return self.connector == OURS

    @property
    def on_processors(self) -> bool:
        """Whether it runs on them: vLLM's own connectors do not."""
        return self.ours or not self.connector


KINDS = {
    "none": Kind("no connector"),
    "kvagent": Kind("kvagent", OURS, copies=True),
    "again": Kind("kvagent, new agent and engine after SIGKILL of both", OURS, knows=True),
    "offloading": Kind(OFFLOADING, OFFLOADING),
    "simple": Kind("SimpleCPUOffloadConnector", "SimpleCPUOffloadConnector"),
    "apart": Kind("kvagent, core in its own process", OURS, apart=True, knows=True),
    "offloading-apart": Kind("OffloadingConnector, core in its own process", OFFLOADING, apart=True),
    "sync": Kind("kvagent, loads that a step waits for", OURS, {"load_mode": "sync"}, knows=True, brief=True),
    "layerwise": Kind("kvagent, by layers", OURS, {"load_mode": "sync", "layerwise": True}, knows=True, brief=True),
}
"""In the order of their worth: a run that is cut loses the last ones."""


def transfer(kind: Kind, sockets: str, size: Size) -> dict[str, Any] | None:
    """Return the arguments of a connector."""
    if not kind.connector:
        return None
    own: dict[str, Any] = {"cpu_bytes_to_use": size.pool}
    more = {}
    if kind.ours:
        # Hits come after a reset of the engine's own cache, which else stands for new weights.
        own = {"socket_dir": sockets, "weights_fixed": True} | kind.options
        more = {"kv_load_failure_policy": "recompute"}
        if kind.options:
            own["sync_load_bytes"] = size.pool
    return {"kv_connector": kind.connector, "kv_role": "kv_both", "kv_connector_extra_config": own, **more}


class Bench:
    """An engine, and the times and answers of its requests."""

    def __init__(self, model: Path, size: Size, connector: dict[str, Any] | None, *, apart: bool) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        more = {} if connector is None else {"kv_transfer_config": KVTransferConfig(**connector)}
        llm = LLM(model=str(model), skip_tokenizer_init=True, load_format="safetensors", seed=0, **size.engine, **more)
        self._engine = llm.llm_engine
        self._size, self._apart, self._asked = size, apart, 0
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
        """Let it step without requests, which an engine core in its own process does by itself."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if not self._apart:
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

    def decode(self, prompts: Sequence[list[int]], steps: int = 0) -> dict[str, Any]:
        """Return the gaps between tokens of requests that decode while prompts arrive, and the time
        until all of these had their first token, and there were so many gaps.
        """
        size = self._size
        running = [
            self.add(self.prompt(5000 + i, size.batch_tokens // 8), size.batch_tokens) for i in range(size.decoding)
        ]
        while not self._first.keys() >= set(running):
            self.step()
        begin, before = time.perf_counter(), len(self._times[running[0]])
        waiting, added = list(prompts), list[str]()
        while waiting or not self._ended.issuperset(added) or len(self._times[running[0]]) - before <= steps:
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


def measure(name: str, model: Path, sockets: str, size: Size, known: dict[str, list[Answer]]) -> None:
    """Run one engine, and print its row whenever it has grown."""
    kind, begin = KINDS[name], time.perf_counter()
    bench = Bench(model, size, transfer(kind, sockets, size), apart=kind.apart)
    for i in range(2):
        bench.ask([bench.prompt(90 + i, size.batch_tokens)] * (1 + 2 * i), 16)  # what comes once, at the first requests
    row: dict[str, Any] = {"kind": name, "start_s": round(time.perf_counter() - begin, 1), "prompts": {}, "answers": {}}

    def say() -> None:
        sys.stdout.write(f"={json.dumps(row)}\n")
        sys.stdout.flush()

    for tokens in size.prompts:
        row["prompts"][tokens], row["answers"][tokens] = bench.alone(tokens, tokens, known.get(str(tokens)))
        say()
    batch = [bench.prompt(1000 + i, size.batch_tokens) for i in range(size.batch)]
    if not known:
        row["batch_computed"], _ = bench.ask(batch, 1)
        bench.idle()
        bench.forget()
    row["batch_hit"] = []
    for _ in range(2):
        row["batch_hit"].append(bench.ask(batch, 1)[0])
        bench.forget()
    say()
    if not kind.brief:
        decode(bench, row, size, batch, 2000 + 100 * list(KINDS).index(name))
    if kind.ours:
        row["stages"] = Agent(sockets, size.pool).stages()
    say()
    if kind.copies:
        row["beside_copies"] = {}
        for pace in ("auto", "off"):
            row["beside_copies"][pace] = beside_copies(bench, Agent(sockets, size.pool), size, pace)
        say()
    sys.stdout.write("=ended\n")
    sys.stdout.flush()


def decode(bench: Bench, row: dict[str, Any], size: Size, batch: list[list[int]], fresh: int) -> None:
    """Measure decode alone, beside hits, and beside prompts that nobody has asked."""
    row["decode_alone"] = bench.decode([], size.steps)
    row["decode_beside_hits"] = bench.decode(batch)
    bench.idle()
    bench.forget()
    row["decode_beside_new"] = bench.decode([bench.prompt(fresh + i, size.batch_tokens) for i in range(size.batch)])
    bench.idle()
    bench.forget()


def beside_copies(bench: Bench, agent: Agent, size: Size, pace: str) -> dict[str, Any]:
    """Return decode beside another engine's saves, with a new agent of that pace."""
    agent.kill()
    agent.start(pace)
    # The engine looks for the new one in steps with requests.
    agent.until(
        "the engine's return", lambda status: any(e["complete"] for e in status["engine_list"]),
        lambda: bench.ask([bench.prompt(1, 8)], 1),
    )  # fmt: skip
    with copying(agent.sockets, size.block, cpu=size is CPU) as copies:
        row = bench.decode([], size.steps)
    return row | copies


def main() -> None:
    name, model, sockets, *rest = sys.argv[1:]
    size = CPU if rest else GPU
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(KINDS[name].apart)), "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }  # fmt: skip
    if size is CPU:
        from tests.vllm import kernels

        folder = kernels.plugin()
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        kernels.install()
    import vllm  # noqa: F401

    known = json.loads(sys.stdin.readline())
    known = {tokens: [tuple(one) for one in answers] for tokens, answers in known.items()}
    measure(name, Path(model), sockets, size, known if KINDS[name].knows else {})
    signal.pause()


if __name__ == "__main__":
    main()
