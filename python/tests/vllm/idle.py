"""An engine whose core has a process of its own, as under `vllm serve`: it idles between orders.

It takes an order from each line of its standard input, and answers each with the line "done".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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

    def close(self) -> None:
        self._process.end()


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
