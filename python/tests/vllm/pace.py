"""Decode steps of a real engine on the CPU, alone and beside a flood of another engine's saves,
with the agent's pace off and auto.

``python -m tests.vllm.pace [ROUNDS]`` prints a line of JSON for each setting: times that pass, and
processor time of the engine's thread (``own``), in which waiting for memory is, and waiting for a
processor is not. The other engine is played: a process whose KV cache of 64 MiB is saved again and
again under new keys.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvagent import messages as m
from kvagent.session import Session
from tests import agent as played
from tests.agent import BINARY, PATIENCE_S, AgentProcess, chain, run_of
from tests.vllm import engine as real

REQUESTS = 8
STEPS = 150  # of a phase
LEARNS = 600  # steps beside the flood, before the first round
FLOOD = {"BLOCKS": 64, "BLOCK_BYTES": 128 << 10, "LAYERS": 8}  # of the played engine: blocks of 1 MiB
JOB, JOBS = 16, 2  # blocks of a job, and jobs in flight


def flood(socket_dir: str) -> None:
    """Save blocks until killed. Print a line once the first ones are saved."""
    vars(played).update(FLOOD)
    path = Path(socket_dir) / "session.sock"
    connects: Any = SimpleNamespace(connect=lambda: Session.connect(path, timeout_s=PATIENCE_S))
    engine = played.Engine(connects, "flood")
    engine.compute(range(FLOOD["BLOCKS"]), 1)
    engine.words.record(0)
    engine.words.fire(0)
    for i in itertools.count():
        first = i * JOB % FLOOD["BLOCKS"]
        run = run_of(chain(f"flood{i}", JOB), range(first, first + JOB))
        # Only a save that can be revoked is slowed.
        engine.worker.save(run, epoch=engine.worker.epoch, step=engine.step, event=0, revoke=i % JOBS)
        if i >= JOBS - 1:
            engine.wait(m.Done)
        if i == JOBS:
            print("ready", flush=True)


class Flood:
    """The flood as a process."""

    def __init__(self, socket_dir: str) -> None:
        command = [sys.executable, "-m", "tests.vllm.pace", "flood", socket_dir]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Decode:
    """The engine's steps."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._numbers = itertools.count()

    def steps(self, count: int) -> list[tuple[float, float]]:
        """Return the times of that many decode steps, in seconds: passed, and the thread's own."""
        from vllm import SamplingParams

        took: list[tuple[float, float]] = []
        while len(took) < count:
            params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True, detokenize=False)
            names = [str(next(self._numbers)) for _ in range(REQUESTS)]
            for name in names:
                tokens = [(int(name) * 7 + j) % 450 + 10 for j in range(20)]
                self._llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, params)
            for _ in range(5):  # prompts
                self._llm.llm_engine.step()
            for _ in range(min(count - len(took), 800)):
                own, begin = time.thread_time(), time.perf_counter()
                self._llm.llm_engine.step()
                took.append((time.perf_counter() - begin, time.thread_time() - own))
            self._llm.llm_engine.abort_request(names)
        return took


def saved(socket_dir: str) -> int:
    """Return the bytes that the agent has saved."""
    command = [str(BINARY), "status", "--json", "--socket-dir", socket_dir]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)["bytes_saved"])


def measure(llm: Any, socket_dir: str, rounds: int) -> list[dict[str, float]]:
    """Return the figures of each round."""
    decode = Decode(llm)
    decode.steps(50)
    one = Flood(socket_dir)
    decode.steps(LEARNS)
    one.end()
    told: list[dict[str, float]] = []
    for _ in range(rounds):
        alone = decode.steps(STEPS)
        one = Flood(socket_dir)
        before, begin = saved(socket_dir), time.perf_counter()
        beside = decode.steps(STEPS)
        rate = (saved(socket_dir) - before) / (time.perf_counter() - begin)
        one.end()
        told.append({"rate": rate, **_quantiles("alone", alone), **_quantiles("beside", beside)})
    return told


def _quantiles(name: str, steps: list[tuple[float, float]]) -> dict[str, float]:
    told: dict[str, float] = {}
    for kind, times in zip(("", " own"), zip(*steps, strict=True), strict=True):
        cuts = statistics.quantiles(times, n=100, method="inclusive")
        told |= {f"{name}{kind} p50": cuts[49] * 1e3, f"{name}{kind} p99": cuts[98] * 1e3}
    return told


def main(rounds: int) -> None:
    """Measure both settings, one after the other, and print their figures."""
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        model = real.write_model(Path(folder) / "model", ffn=4096)
        for setting in ("off", "auto"):
            path = Path(folder) / setting
            path.mkdir(mode=0o700)
            agent = AgentProcess(path, "--pace", setting)
            llm = real.make_engine(model, str(path), options={"weights_fixed": True, "save_decode": False})
            told = measure(llm, str(path), rounds)
            llm.llm_engine.engine_core.shutdown()
            cpu = agent.status()["paces"]
            agent.close()
            row: dict[str, Any] = {name: round(statistics.median(one[name] for one in told), 2) for name in told[0]}
            for name in ("p50", "p99", "own p50", "own p99"):
                row[f"{name} ratios"] = [round(one[f"beside {name}"] / one[f"alone {name}"], 2) for one in told]
            row["MB/s"] = round(row.pop("rate") / 1e6)
            print(json.dumps({"pace": setting, "load": round(os.getloadavg()[0]), **row, "agent": cpu}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["flood"]:
        flood(sys.argv[2])
    else:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
