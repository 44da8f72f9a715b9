"""An engine whose core has a process of its own, as under `vllm serve`: it idles between orders.

`python -m tests.vllm.idle MODEL SOCKET_DIR ENDPOINT` takes an order from each line of its standard
input, and answers each with the line "done".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.vllm import engine as real
from tests.vllm import kernels


class IdleEngine:
    """Such a process."""

    def __init__(self, model: Path, socket_dir: Path, endpoint: str) -> None:
        command = [sys.executable, "-m", "tests.vllm.idle", str(model), str(socket_dir), endpoint]
        env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._read()

    def order(self, what: str, prompts: list[list[int]] | None = None) -> None:
        """``what``: generate or clear."""
        assert self._process.stdin is not None
        print(json.dumps([what, prompts]), file=self._process.stdin, flush=True)
        self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(real.ELSEWHERE_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()) != "done\n":
            assert line, "the engine ended"


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


if __name__ == "__mp_main__":  # a core or a worker that such a process spawned
    kernels.install()

if __name__ == "__main__":
    main(*sys.argv[1:])
