"""Prompts and what they cost, and the agent's state, for tests with engines behind a proxy."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.agent import eventually
from tests.vllm.engine import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.agent import AgentProcess
    from tests.pd.processes import Engine, Proxy

SALT = "reference"  # requests with it share nothing with others
SEED = int(os.environ.get("KVAGENT_SEED", "1"))


def prompts(seed: int, count: int, longest: int = 900) -> list[list[int]]:
    """Return prompts of random lengths, some of whole blocks, and one of a single token."""
    dice = random.Random(1000 * SEED + seed)
    lengths = [1, BLOCK, *(dice.randrange(1, longest) for _ in range(count - 3)), longest // BLOCK * BLOCK]
    return [[dice.randrange(10, 500) for _ in range(length)] for length in lengths]


def tails(some: list[list[int]]) -> int:
    """Return how many tokens follow the last whole block of each prompt.

    Of a prompt of whole blocks the last token is computed again, which vLLM does not count.
    """
    return sum(len(prompt) % BLOCK for prompt in some)


def compare(proxy: Proxy, decode: Sequence[Engine], some: list[list[int]], at_once: int) -> int:
    """Check a proxy's answers, and return how many prompt tokens the decode engines computed."""
    expected = decode[0].complete_all(some, at_once, cache_salt=SALT)
    before = sum(one.computed() for one in decode)
    begin = time.monotonic()
    assert proxy.complete_all(some, at_once) == expected, "wrong tokens"
    took = time.monotonic() - begin
    computed = sum(one.computed() for one in decode) - before
    if computed != tails(some):
        print({one.log.stem: one.counts() for one in decode})
    print(
        f"{proxy.log.stem}: {computed} of {sum(map(len, some))} prompt tokens computed by D; tails: {tails(some)}; "
        f"{took:.1f} s"
    )  # fmt: skip
    return computed


def left(agent: AgentProcess) -> dict[str, int]:
    """Return what the agent still holds for engines."""
    status = agent.status()
    held = {name: status["transfers"][name] for name in ("open", "complete", "fetching")}
    return {name: count for name, count in {**held, "leases": status["leases"]}.items() if count}


def nothing_left(*agents: AgentProcess, patience_s: float = 20.0) -> None:
    """Wait until the agents hold nothing for engines."""
    try:
        eventually(lambda: not any(map(left, agents)), "an agent without transfers and leases", patience_s)
    except AssertionError as error:
        raise AssertionError(f"{error}: {[left(agent) for agent in agents]}") from None


@contextmanager
def stopping(agent: AgentProcess) -> Iterator[None]:
    """Stop the agent for 60 of every 120 ms."""
    over = threading.Event()

    def stop() -> None:
        while not over.wait(0.06):
            agent.freeze()
            time.sleep(0.06)
            agent.thaw()

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
