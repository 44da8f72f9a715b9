"""An engine in its own process whose requests arrive, are aborted and reset at random, until it is
told to end.

It reads a line of JSON with the model's outputs for PROMPTS, prints "ready", runs until it reads
another line, finishes its requests, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import random
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.vllm import engine as real
from tests.vllm.engine import PROMPTS

if TYPE_CHECKING:
    from collections.abc import Callable

LIVE = 8  # requests at once
ABORTED, ALL_ABORTED, FORGOTTEN, SALTED = 0.05, 0.005, 0.02, 0.2  # how often, the first three of steps
END_S = 60.0  # for what is left to come back, with an agent that runs


class Storm:
    """The engine and its requests."""

    def __init__(self, llm: Any, said: list[list[int]], seed: int) -> None:
        self._llm, self._said, self._dice = llm, said, random.Random(seed)
        self._asked: dict[str, tuple[int, int]] = {}  # prompt and tokens
        self._number = self.aborted = self.answered = 0
        self.wrong: list[str] = []

    def step(self, *, more: bool) -> None:
        """Run a step; with ``more``, requests may arrive and end."""
        if more and len(self._asked) < LIVE and self._dice.random() < 0.5:
            self._ask()
        if more and self._asked and self._dice.random() < ABORTED:
            self._abort([self._dice.choice(list(self._asked))])
        if more and self._dice.random() < ALL_ABORTED:
            self._abort(list(self._asked))
        if self._dice.random() < FORGOTTEN:
            self._forget()
        for result in self._llm.llm_engine.step():
            if result.finished and (asked := self._asked.pop(result.request_id, None)) is not None:
                self._hold(result, *asked)

    def _ask(self) -> None:
        from vllm import SamplingParams

        prompt, tokens = self._dice.randrange(len(PROMPTS)), self._dice.randrange(1, len(self._said[0]) + 1)
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        salt = {"cache_salt": "salt"} if self._dice.random() < SALTED else {}
        self._number += 1
        self._asked[str(self._number)] = prompt, tokens
        self._llm.llm_engine.add_request(
            str(self._number), {"prompt_token_ids": PROMPTS[prompt], **salt}, params
        )  # fmt: skip

    def _abort(self, names: list[str]) -> None:
        self._llm.llm_engine.abort_request(names)
        self.aborted += len(names)
        for name in names:
            del self._asked[name]

    def _forget(self) -> None:
        """Reset the cache; running requests restart.

        vLLM cannot reset while a request waits for its load, or for free blocks after it, nor while
        a load that was given up holds blocks: a stopped agent may write to them.
        """
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        side, _ = real.sides(self._llm)
        if not side.blocks.loading and all(request.status.name == "RUNNING" for request in scheduler.requests.values()):
            self._llm.reset_prefix_cache(reset_running_requests=True)

    def _hold(self, result: Any, prompt: int, tokens: int) -> None:
        self.answered += 1
        if list(result.outputs[0].token_ids) != self._said[prompt][:tokens]:
            self.wrong.append(f"prompt {prompt}, {tokens} tokens: {list(result.outputs[0].token_ids)}")

    def until(self, shown: Callable[[], object]) -> None:
        """Continue, with a running agent, until the storm has seen what it is for."""
        deadline = time.monotonic() + END_S
        while not shown() and time.monotonic() < deadline:
            self.step(more=True)

    def end(self) -> None:
        """Finish all requests."""
        deadline = time.monotonic() + END_S
        core = self._llm.llm_engine.engine_core.engine_core
        while (self._asked or core.scheduler.has_requests()) and time.monotonic() < deadline:
            self.step(more=False)


def main(model: str, socket_dir: str, seed: str) -> None:
    """Run the storm."""
    said = json.loads(sys.stdin.readline())
    llm = real.make_engine(Path(model), socket_dir, deadline_ms=300, age_ms=500)
    storm = Storm(llm, said, int(seed))
    print("ready", flush=True)
    side, _ = real.sides(llm)
    while not select.select([sys.stdin], [], [], 0)[0]:
        storm.step(more=True)
    storm.until(lambda: storm.answered and storm.aborted and side.counts.tokens_loaded)
    storm.end()
    pool = side.blocks.pool
    told = {
        "answered": storm.answered, "aborted": storm.aborted, "wrong": storm.wrong, "left": len(storm._asked),
        "pinned": side.blocks.saving + side.blocks.loading,
        "taken": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), "counted": dict(vars(side.counts)),
    }  # fmt: skip
    print(json.dumps(told), flush=True)
    llm.llm_engine.engine_core.shutdown()
