"""Runs everything that needs a GPU: ``run RESULTS`` in the archive that `make gpu-kit` makes.

It needs a GPU that nothing else uses, vLLM in its Python, and nothing from the network. RESULTS
gets DATE-GPU.json, with everything that was measured, and DATE-GPU.md, its tables, for
docs/measurements/. Both are written again after each part, and parts go in the order of their
worth, so a run that is cut has the first ones. ``--cpu`` runs all parts on processors, small, with
the software driver of KVAGENT_LIBCUDA, but for vLLM's own connectors, which need a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu.agents import Agent
from tests.gpu.engines import KINDS
from tests.gpu.report import page
from tests.gpu.sizes import CPU, GPU

LIMIT_S = 540.0  # of the whole run
CHECK_S = 60.0  # of a check of the proof
ENGINE_S = 50.0  # what has to be left for another engine
ENGINE_MOST_S = 150.0  # of one engine, so that one that hangs does not take the time of all others
# Those that neither measure nor count the GPU's memory run beside the writing of the model.
CHECKS = ("import", "order", "event-of-the-dead", "copy-of-the-dead")
ALONE = ("engine-killed", "warm-up-killed", "agent-killed", "footprint", "transfer", "compute")


class Child:
    """An engine's process, with all that it starts. It imports vLLM while another one runs."""

    def __init__(self, kind: str, kit: Kit) -> None:
        self._killed = False
        command = [sys.executable, "-m", "tests.gpu.engines", kind, str(kit.model), kit.agent.sockets, *kit.cpu]
        settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        settings |= {"VLLM_TARGET_DEVICE": "cpu"} if kit.cpu else {}
        with (kit.results / "engines.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                bufsize=0, start_new_session=True,
            )  # fmt: skip

    def run(self, known: dict[str, Any], end: float) -> tuple[dict[str, Any], bool]:
        """Let it measure; return its row, and whether it came to the end of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        row: dict[str, Any] = {}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(known).encode() + b"\n")
        said = b""
        while select.select([self._process.stdout], [], [], max(end - time.monotonic(), 0))[0]:
            more = self._process.stdout.read(1 << 16)
            *lines, said = (said + more).split(b"\n")
            for line in lines:
                if line.startswith(b"={"):
                    row = json.loads(line[1:])
            if not more or b"=ended" in lines:
                return row, bool(more)
        return row, False

    def kill(self) -> None:
        """Kill all of its processes by SIGKILL, and wait until none is left."""
        if self._killed:
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            for _ in range(500):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.poll()
                time.sleep(0.02)


class Kit:
    """A run, and what it has found."""

    def __init__(self, results: Path, *, cpu: bool, seconds: float) -> None:
        self.cpu = ["--cpu"] if cpu else []
        self.results = results
        self._begin = time.monotonic()
        self._end = self._begin + seconds
        self._size = CPU if cpu else GPU
        self._folder = Path(tempfile.mkdtemp(prefix="kvagent-gpu-", dir="/dev/shm"))
        self.model = self._folder / "model"
        self._children: list[Child] = []
        self.agent = Agent(str(Path(tempfile.mkdtemp(prefix="kvagent-")) / "run"), self._size.pool)
        self._found: dict[str, Any] = {"host": host(), "proof": [], "processors": [], "engines": [], "not_run": []}

    def say(self, text: str) -> None:
        """Print a line, and write what was found so far."""
        print(f"[{time.monotonic() - self._begin:4.0f} s] {text}", flush=True)
        name = f"{self._found['host']['date']}-{self._found['host']['gpu'].replace(' ', '-').lower()}"
        (self.results / f"{name}.json").write_text(json.dumps(self._found, indent=1))
        (self.results / f"{name}.md").write_text(page(self._found, name))

    def left(self) -> float:
        return self._end - time.monotonic()

    def run(self, kinds: list[str]) -> bool:
        """Run all parts; return whether all came to their end."""
        command = [sys.executable, "-m", "tests.gpu.model", str(self.model), *self.cpu]
        writing = subprocess.Popen(command)
        first = self.child(kinds[0])
        for check in CHECKS:
            self.prove(check)
        if writing.wait():
            raise AssertionError("there is no model")
        self.say("model")
        for check in ALONE:
            self.prove(check)
        self.processors()
        self.agent.start()
        self.engines(first, kinds)
        return not self._found["not_run"]

    def child(self, kind: str) -> Child:
        self._children.append(Child(kind, self))
        return self._children[-1]

    def prove(self, check: str) -> None:
        """Run one check of the proof."""
        command = ["kvagent", "proof", "--json", "--check", check, *(["--quick"] if self.cpu else [])]
        try:
            run = subprocess.run(command, stdout=subprocess.PIPE, timeout=min(CHECK_S, self.left()))
            report = json.loads(run.stdout)
            self._found["proof"] += report["checks"]
            self._found["host"] |= {"gpu": "CPU" if self.cpu else report["gpu"], "driver": report["driver"]}
            ended = run.returncode == 0
        except (subprocess.TimeoutExpired, ValueError):
            ended = False
        self.note(f"proof {check}", ended=ended)

    def processors(self) -> None:
        """Measure copies and sums on processors."""
        memory = ["--memory", str(256 << 20), "--rounds", "3"]
        run = subprocess.run(["kvbench", "bench", "transfer", "--json", *memory], stdout=subprocess.PIPE)
        ended = run.returncode == 0
        self._found["processors"] = json.loads(run.stdout)["rows"] if ended else []
        self.note("processors", ended=ended)

    def engines(self, following: Child, kinds: list[str]) -> None:
        """Run one engine after the other; each imports vLLM beside the one before it."""
        known: dict[str, Any] = {}
        for i, kind in enumerate(kinds):
            child = following
            if i + 1 < len(kinds):
                following = self.child(kinds[i + 1])
            row: dict[str, Any] = {}
            ended = False
            if self.left() > ENGINE_S:
                end = min(self._end, time.monotonic() + ENGINE_MOST_S)
                row, ended = child.run(known if KINDS[kind].knows else {}, end)
            child.kill()
            if kind == "kvagent":
                known = row.get("answers", {})
                self.agent.kill()
                self.agent.start()
            if row:
                self._found["engines"].append({key: value for key, value in row.items() if key != "answers"})
            self.note(f"engine {kind}", ended=ended)

    def note(self, part: str, *, ended: bool) -> None:
        if not ended:
            self._found["not_run"].append(part)
        self.say(f"{part}{'' if ended else ': NO END'}")

    def close(self) -> None:
        """End what runs, and remove what it made, but the results."""
        for child in self._children:
            child.kill()
        if self.agent.status():
            self.agent.kill()
        self.agent.forget()
        log = Path(f"{self.agent.sockets}.log")
        if log.exists():
            shutil.move(log, self.results / "agent.log")
        shutil.rmtree(Path(self.agent.sockets).parent, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def host() -> dict[str, str]:
    """Return the conditions of the run; the proof knows the GPU. This process does not open it."""
    choices = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()  # such as "always [never]"
    version = subprocess.run(["kvagent", "version"], capture_output=True, text=True, check=True).stdout.split()[1]
    return {
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(), "gpu": "GPU", "driver": "unknown",
        "kernel": platform.release(),
        "huge pages of /dev/shm": choices[choices.index("[") + 1 : choices.index("]")],
        "processors": str(os.cpu_count()), "python": platform.python_version(),
        "torch": metadata.version("torch"), "vllm": metadata.version("vllm"), "kvagent": version,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="run", description=__doc__)
    parser.add_argument("results", type=Path, help="folder of the results")
    parser.add_argument("--cpu", action="store_true", help="on processors, with a small model")
    parser.add_argument("--engines", nargs="+", choices=KINDS, metavar="KIND", help=f"only these: {', '.join(KINDS)}")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="of the whole run (default %(default)s)")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    kit = Kit(arguments.results.resolve(), cpu=arguments.cpu, seconds=arguments.seconds)
    try:
        kinds = [name for name, kind in KINDS.items() if kind.on_processors or not arguments.cpu]
        sys.exit(not kit.run(arguments.engines or kinds))
    finally:
        kit.close()


if __name__ == "__main__":
    main()
