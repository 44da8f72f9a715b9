"""An engine whose core has a process of its own, as under `vllm serve`: it idles between orders.

It takes an order from each line of its standard input, and answers each with the line "done".
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from tests.agent import eventually
from tests.vllm import engine as real
from tests.vllm.forks import Forked


class IdleEngine:
    """Such a process."""

    def __init__(self, model: Path, socket_dir: Path, endpoint: str) -> None:
        arguments = [str(model), str(socket_dir), endpoint]
        self._process = Forked(main, *arguments, VLLM_ENABLE_V1_MULTIPROCESSING="1")
        self._process.hear("done")

    def order(self, what: str, prompts: list[list[int]] | None = None) -> None:
        """``what``: generate or clear."""
        self._process.say(json.dumps([what, prompts]))
        self._process.hear("done")

    def freeze(self) -> None:
        """Stop all its processes, and return when they have stopped."""
        self._signal(signal.SIGSTOP)
        eventually(lambda: {state for _, state in self._processes()} <= {"T", "Z"}, "stopped processes")

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.end()

    def _signal(self, number: signal.Signals) -> None:
        for pid, _ in self._processes():
            os.kill(pid, number)

    def _processes(self) -> list[tuple[int, str]]:
        """Return the process and those that vLLM has started in it, with their states."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = re.fullmatch(r"(\d+) \(.*\) (\S) (\d+) .*\n", stat.read_text(), re.DOTALL)
            except OSError:
                continue  # it has ended
            assert fields, stat
            pid, state, parent = fields.groups()
            found[int(pid)] = state, int(parent)
        mine = [self._process.pid]
        for pid in mine:
            mine += [child for child, (_, parent) in found.items() if parent == pid]
        return [(pid, found[pid][0]) for pid in mine if pid in found]


def main(model: str, socket_dir: str, endpoint: str) -> None:
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    llm: Any = real.make_engine(Path(model), socket_dir, kv_events_config=events)
    print("done", flush=True)
    for line in sys.stdin:
        what, prompts = json.loads(line)
        if what == "generate":
            real.generate(llm, prompts, 2)
        else:
            assert llm.reset_prefix_cache()
        print("done", flush=True)
