"""Random requests, every position of every step checked, cold and warm, in two engines of one
space.
"""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm.lora.request import LoRARequest

from tests.agent import AgentProcess
from tests.vllm.agents import figures, flip
from tests.vllm.gpu import PRIME
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS = 40  # of a run
LIVES = 6  # at most
SEED = 1  # unless KVAGENT_SEED is set
ROUNDS = int(os.environ.get("KVAGENT_ORACLE_ROUNDS", "1"))  # of each kind; from the second on with seeds by chance
SALTED, ADAPTED, UNREAD, ABORTED = 0.1, 0.05, 0.05, 0.02  # how often; the last of every step
# All layouts, both runners, both schedulers, ranks, groups, hashes of half a block, drafts: each of
# them, and all pairs that have to do with each other.
KINDS: dict[str, dict[str, Any]] = {
    "BLNHC": {"v2": True, "asynchronous": True, "depth": 2, "blocks": 40, "max_batched": 40},
    "LBHNC": {"v2": False, "asynchronous": True, "depth": 2, "blocks": 34, "ranks": 2, "drafts": 3},
    "LHBNC": {"v2": True, "asynchronous": False, "blocks": 40, "ranks": 2, "max_batched": 40, "drafts": 2},
    "BHLNC": {"v2": False, "asynchronous": False, "blocks": 36, "window": 40},
    "BLHNC": {
        "v2": True, "asynchronous": True, "depth": 2, "blocks": 38, "window": 40, "dense": True, "ranks": 2,
        "drafts": 3,
    },
    "LBNHC": {"v2": True, "asynchronous": True, "depth": 3, "blocks": 26, "window": 40, "scale": 2},
    "an indexer": {"asynchronous": True, "depth": 2, "blocks": 34, "kind": "indexer"},
    "MLA with a window": {"asynchronous": True, "blocks": 36, "window": 40, "kind": "mla", "layout": "BLNHC"},
    "chunks": {"asynchronous": True, "depth": 2, "blocks": 34, "window": 64, "kind": "chunked"},
    "states": {"asynchronous": True, "depth": 2, "blocks": 30, "window": 1, "kind": "states"},
    "states in two ranks": {"v2": False, "blocks": 34, "window": 1, "kind": "states", "ranks": 2, "max_batched": 40},
}  # fmt: skip


def live(world: World, seed: int, name: str, *, retrain: bool = False) -> int:
    """Run requests with shared prefixes that arrive and are aborted at random.

    Return how often the weights changed.
    """
    dice = random.Random(seed)
    heads = [[dice.randrange(5, 400) for _ in range(dice.randrange(40, 200))] for _ in range(4)]
    waiting = list(range(REQUESTS))
    trained = 0
    while waiting or world.scheduler.requests:
        if waiting and len(world.scheduler.requests) < 8 and dice.random() < 0.5:
            number = waiting.pop()
            tail = [dice.randrange(5, 400) for _ in range(dice.randrange(1, 60))]
            more: dict[str, Any] = {"cache_salt": dice.choice("xy")} if dice.random() < SALTED else {}
            if dice.random() < ADAPTED:
                more["lora_request"] = LoRARequest("adapter", 1, "/nowhere")
            prompt = dice.choice(heads) + tail
            world.add(f"{name}{number}", prompt, dice.randrange(1, 60), unread=dice.random() < UNREAD, **more)
        if retrain and not trained and len(waiting) <= REQUESTS // 2:
            trained += world.retrain()
        if world.scheduler.requests and dice.random() < ABORTED:
            world.abort(dice.choice(list(world.scheduler.requests)))
        world.step()
    world.run()
    for request, sequence in world.sequences.items():
        output = world.outputs[request]
        start = len(sequence.prompt)
        assert output == sequence.tokens[start : start + len(output)], request
        assert len(output) == sequence.max_tokens or "abort" in world.reasons.get(request, "abort"), request
    return trained


@pytest.mark.parametrize("nth", range(ROUNDS))
@pytest.mark.parametrize("kind", KINDS)
def test_no_byte_is_wrong_cold_or_warm(worlds: Any, agent: AgentProcess, kind: str, nth: int) -> None:
    seed = random.randrange(1 << 30) if nth else int(os.environ.get("KVAGENT_SEED", SEED))
    print(kind, KINDS[kind], "KVAGENT_SEED", seed)
    options = ({"layout": kind} if kind.isupper() else {}) | KINDS[kind]
    first, second = worlds(**options), worlds(**options)
    trained = lives = 0
    while not (lives and met(first, second)):
        assert lives < LIVES, f"{first.preempted + second.preempted} preemptions, {second.side.counts}"
        trained += live(first, seed + lives, f"cold{lives}-", retrain=not lives)
        if second.gpu.weights != first.gpu.weights:
            assert second.retrain()
        live(second, seed + lives, f"warm{lives}-")
        lives += 1
    clean(first, agent, second)
    for world in (first, second):
        print(
            f"{world.steps} steps, {world.gpu.checked} positions checked, {world.preempted} preemptions, "
            f"{world.gpu.rejected} drafts rejected, {sum(world.promised.values())} loads, {world.side.counts}"
        )
    hits = second.side.counts.tokens_loaded
    print(f"{lives} lives of {REQUESTS}; weights changed {trained} times; hits {hits} tokens; {figures(agent)}")
    assert first.gpu.checked > 10_000
    assert (first.gpu.rejected > 0) == (first.drafts > 0)


def met(first: World, second: World) -> bool:
    """Return whether the cases to show have occurred: how soon depends on seed and machine."""
    return first.preempted + second.preempted > 0 and second.side.counts.tokens_loaded > 0


def test_a_byte_that_is_wrong_in_the_pool_is_seen(model: Path, lax_agent: AgentProcess) -> None:
    """The negative control: without checksums, the oracle detects what was changed in the pool."""
    world = World(model, str(lax_agent.folder))
    try:
        prompt = list(range(5, 105))
        world.add("cold", prompt, 4)
        world.run()
        flip(lax_agent.process.pid, struct.pack("<f", (world.sequences["cold"].hashes[20] * 7) % PRIME))
        assert world.scheduler.reset_prefix_cache()
        world.add("warm", prompt, 4)
        world.run()
        assert world.side.counts.tokens_loaded == 96
        assert any("position 20" in bad for bad in world.gpu.bad)
    finally:
        world.close()


@pytest.fixture
def lax_agent() -> Iterator[AgentProcess]:
    """An agent without checksums of contents."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        path = Path(folder) / "run"
        path.mkdir(mode=0o700)
        process = AgentProcess(path, "--integrity", "header")
        yield process
        process.close()
