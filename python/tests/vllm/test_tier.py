"""vLLM's own offloading with a secondary tier: its own `fs` for comparison, and the agent's.

Random requests over the real scheduler and tiering manager; every position of every step is
checked.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.kv_offload.base import OffloadingManager

from tests.vllm.tiered import SLOWLY, TieredWorld, clean

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REQUESTS = 40  # of a run
LIVES = 6  # at most
SEED = 1  # unless KVAGENT_SEED is set
ABORTED, RESET, FORGOTTEN = 0.02, 0.01, 0.0  # how often, of all steps
FENCED = hasattr(OffloadingManager, "on_reset_flushed")
"""Whether vLLM lets no tier fill a row until the GPU's copies that a reset found under way have
ended: from 0.33 on. With windows, bytes are wrong after such a reset in 0.33 too.
"""
KINDS: dict[str, dict[str, Any]] = {
    "v2-async": {"v2": True, "asynchronous": True, "depth": 2, "blocks": 40, "rows": 30, "max_batched": 40},
    "v1": {"v2": False, "asynchronous": False, "blocks": 36, "rows": 24, "max_batched": 64},
    "v2-chunk2": {"v2": True, "asynchronous": True, "depth": 2, "blocks": 44, "rows": 16, "chunk": 2},
    "v2-ranks": {"v2": True, "asynchronous": False, "blocks": 40, "rows": 30, "ranks": 2},
    "v2-window": {"v2": True, "asynchronous": True, "depth": 2, "blocks": 44, "rows": 30, "window": 40},
}


def live(
    world: TieredWorld, seed: int, name: str, happen: Callable[[random.Random], None] = lambda _: None, *,
    fenced: bool = FENCED,
) -> None:  # fmt: skip
    """Run requests with shared prefixes that arrive and are aborted at random.

    ``fenced``: the region is reset in the midst of copies too.
    """
    dice = random.Random(seed)
    heads = [[dice.randrange(5, 400) for _ in range(dice.randrange(40, 200))] for _ in range(4)]
    waiting = list(range(REQUESTS))
    while waiting or world.scheduler.requests:
        if waiting and len(world.scheduler.requests) < 8 and dice.random() < 0.5:
            tail = [dice.randrange(5, 400) for _ in range(dice.randrange(1, 60))]
            world.add(f"{name}{waiting.pop()}", dice.choice(heads) + tail, dice.randrange(1, 60))
        if world.scheduler.requests and dice.random() < ABORTED:
            world.abort(dice.choice(list(world.scheduler.requests)))
        if dice.random() < RESET:
            world.reset()
        # Resets the region though requests wait for their loads.
        if fenced and not world.windowed and dice.random() < FORGOTTEN:
            world.scheduler.reset_prefix_cache(reset_connector=True)
        happen(dice)
        world.step()
    world.rest()
    for request, sequence in world.sequences.items():
        output = world.outputs[request]
        start = len(sequence.prompt)
        assert output == sequence.tokens[start : start + len(output)], request
        assert len(output) == sequence.max_tokens or "abort" in world.reasons.get(request, "abort"), request


@pytest.mark.parametrize("kind", KINDS)
def test_no_byte_is_wrong_over_vllms_own_tier(tiered: Callable[..., TieredWorld], tmp_path: Path, kind: str) -> None:
    if not FENCED:
        pytest.skip("before 0.33, vLLM's own tier gives wrong bytes in these runs")
    seed = int(os.environ.get("KVAGENT_SEED", SEED))
    print(kind, KINDS[kind], "KVAGENT_SEED", seed)
    world = tiered({"type": "fs", "root_dir": str(tmp_path / "fs")}, seed=seed, pace=SLOWLY, **KINDS[kind])
    for i in range(LIVES):
        live(world, seed + i % 2, f"life{i}-")
        if i >= 2 and min(world.preempted, world.heard.loaded, world.resets):
            break
    clean(world)
    print(
        f"{world.steps} steps, {world.gpu.checked} positions checked, {world.preempted} preemptions, {world.resets} "
        f"resets, {world.loaded} blocks and {world.heard.loaded} chunks loaded"
    )
    assert min(world.preempted, world.heard.loaded, world.resets) > 0


PROMPT = [i % 400 + 5 for i in range(100)]


def test_a_byte_that_is_wrong_in_a_tier_without_checksums_is_seen(
    tiered: Callable[..., TieredWorld], tmp_path: Path
) -> None:
    """The negative control: the oracle sees what was changed in the files of vLLM's own tier."""
    world = tiered({"type": "fs", "root_dir": str(tmp_path / "fs")})
    world.prompt("cold", PROMPT)
    world.forget()
    for file in (tmp_path / "fs").rglob("*.bin"):
        file.write_bytes(bytes(reversed(file.read_bytes())))
    assert world.prompt("warm", PROMPT) == 96
    assert world.gpu.bad
