"""Random requests in each mode of loads and saves, while loads are delayed, blocks are corrupted,
and the agent is frozen and killed: no output is wrong, and nothing is left over.

A fault strikes at a random moment of a step (faults), in both engines, one after the other. Where
the engine may compute from bytes that did not come, if it discards the result, the fake GPU
computes wrong bytes and wrong tokens from them; else a wrong byte that it reads is an error.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import eventually
from tests.holding import HoldingAgent
from tests.vllm import agents
from tests.vllm.agents import figures
from tests.vllm.faults import KINDS, Faults
from tests.vllm.setting import BLOCK
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REQUESTS = 30  # of a run
LIVES = 8  # at most
ABORTED, FORGOTTEN = 0.02, 0.05  # how often, of steps
SWITCHED = 0.08  # how often a request has each of its switches
ERRORS = 0.15  # how often a load raises an error before it is planned, and how often after
SEED = int(os.environ.get("KVAGENT_SEED", "1"))
ROUNDS = int(os.environ.get("KVAGENT_ORACLE_ROUNDS", "1"))  # of each kind; from the second on with seeds by chance
COMMON: dict[str, Any] = {
    "weights_fixed": True,  # a reset concerns the engine's own cache alone
    "lookup_age_ms": 300, "lookup_grace_ms": 300, "load_deadline_ms": 60, "sync_wait_ms": 50, "pin_percent": 15,
}  # fmt: skip
LAZY: dict[str, Any] = {"offload": "lazy", "watermark_percent": 25}
MODES: dict[str, dict[str, Any]] = {
    "async": {},
    "sync": {"load_mode": "sync"},
    "auto": {"load_mode": "auto"},
    "layerwise": {"load_mode": "sync", "layerwise": True},
    "lazy": LAZY,
    "lazy and layerwise": LAZY | {"load_mode": "auto", "layerwise": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "V1": {"v2": False, "blocks": 40, "max_batched": 64},
    "V2 async": {"v2": True, "asynchronous": True, "depth": 2, "blocks": 40, "max_batched": 48},
    "V1 async": {"v2": False, "asynchronous": True, "depth": 3, "blocks": 40, "max_batched": 48, "drafts": 2},
    "V2": {"v2": True, "blocks": 40, "max_batched": 64, "ranks": 2, "layout": "LHBNC"},
}
RUNS = [
    ("async", "V1"), ("async", "V2 async"), ("sync", "V2"), ("sync", "V2 async"), ("auto", "V1"), ("auto", "V1 async"),
    ("layerwise", "V1"), ("layerwise", "V2 async"), ("lazy", "V2"), ("lazy", "V2 async"),
    ("lazy and layerwise", "V1 async"), ("lazy and layerwise", "V2"),
]  # fmt: skip


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[HoldingAgent]:
    one = HoldingAgent(tmp_path / "modes")
    yield one
    one.close()


def switched(dice: random.Random) -> dict[str, Any] | None:
    """Return the switches of a request, mostly none."""
    switches = {"save": False, "load": False, "max_load_tokens": dice.randrange(0, 120), "ttl": 0.01, "pin": 5}
    return {f"kvagent.{one}": value for one, value in switches.items() if dice.random() < SWITCHED} or None


class Loads:
    """What a world loads, by request: at most what its switches allow. ``errors`` decides which
    loads raise an error, before they are planned or afterwards.
    """

    def __init__(self, world: World, errors: random.Random | None = None) -> None:
        self.given: dict[str, dict[str, Any]] = {}
        self.blocks = 0
        plan = world.side.loads.plan

        def planned(job: int, tracked: Any, tables: Any, external: int) -> Any:
            switches = self.given.get(tracked.request.request_id, {})
            assert switches.get("kvagent.load", True), "loaded against its switch"
            assert external <= switches.get("kvagent.max_load_tokens", external), "more than its switch allows"
            self.blocks += external // BLOCK
            if errors is not None and errors.random() < ERRORS:
                raise RuntimeError("planted")
            promise = plan(job, tracked, tables, external)
            if errors is not None and errors.random() < ERRORS:
                raise RuntimeError("planted")
            return promise

        world.side.loads.plan = planned


def live(world: World, faults: Faults, loads: Loads, seed: int, name: str) -> None:
    """Run requests with shared prefixes that arrive and are aborted at random, while faults
    strike.
    """
    dice = random.Random(seed)
    heads = [[dice.randrange(5, 400) for _ in range(dice.randrange(40, 200))] for _ in range(4)]
    left = list(range(REQUESTS))
    while left or world.scheduler.requests:
        if left and len(world.scheduler.requests) < 8 and dice.random() < 0.5:
            one = f"{name}{left.pop()}"
            tail = [dice.randrange(5, 400) for _ in range(dice.randrange(1, 60))]
            params = switched(dice)
            loads.given[one] = params or {}
            world.add(one, dice.choice(heads) + tail, dice.randrange(1, 60), params=params)
        if world.scheduler.requests and dice.random() < ABORTED:
            world.abort(dice.choice(list(world.scheduler.requests)))
        if dice.random() < FORGOTTEN:
            world.forget()
        faults.step()
        world.step()
    faults.end()
    world.run()
    assert not world.gpu.bad, world.gpu.bad[:3]
    for request, sequence in world.sequences.items():
        output, start = world.outputs[request], len(sequence.prompt)
        assert output == sequence.tokens[start : start + len(output)], request
        assert len(output) == sequence.max_tokens or "abort" in world.reasons.get(request, "abort"), request


@pytest.mark.stops
@pytest.mark.parametrize("nth", range(ROUNDS))
@pytest.mark.parametrize(("mode", "way"), RUNS)
def test_no_output_is_wrong(worlds: Any, agent: HoldingAgent, mode: str, way: str, nth: int) -> None:
    seed = random.randrange(1 << 30) if nth else SEED
    print(mode, "|", way, "KVAGENT_SEED", seed)
    extra = COMMON | MODES[mode]
    engines: list[World] = [worlds(extra=extra, **WAYS[way]) for _ in range(2)]
    faults = [Faults(world, agent, random.Random(seed + i)) for i, world in enumerate(engines)]
    loads = [Loads(world) for world in engines]
    for world in engines:
        world.gpu.taints = "load_mode" in extra
    lives = 0
    while not (lives and met(engines, faults)):
        assert lives < LIVES, f"in all of them not met: {[fault.struck for fault in faults]}"
        for i, world in enumerate(engines):
            eventually(partial(registered, world, agent), "the engine at the running agent")
            live(world, faults[i], loads[i], seed + lives, f"{i}-{lives}-")
        lives += 1
    clean(engines[0], agent, engines[1])
    for world, fault in zip(engines, faults, strict=True):
        print(f"{world.steps} steps, {world.preempted} preemptions, {dict(fault.struck)}, {world.side.counts}")
    print(f"{lives} lives of {REQUESTS}; {figures(agent)}")


class NoFaults(Faults):
    """Lets every step be."""

    def step(self) -> None:
        pass


@pytest.mark.stops
@pytest.mark.parametrize(
    ("mode", "way"), [("async", "V1"), ("async", "V2 async"), ("sync", "V2"), ("layerwise", "V2 async")]
)
def test_no_output_is_wrong_where_loads_raise_errors(
    worlds: Any, agent: HoldingAgent, monkeypatch: pytest.MonkeyPatch, mode: str, way: str
) -> None:
    monkeypatch.setattr("kvagent.vllm.boundary.MAX_ERRORS", 10**9)
    print(mode, "|", way, "KVAGENT_SEED", SEED)
    extra = COMMON | MODES[mode]
    engines: list[World] = [worlds(extra=extra, **WAYS[way]) for _ in range(2)]
    for i, world in enumerate(engines):
        world.gpu.taints = "load_mode" in extra
        loads = Loads(world, random.Random(SEED + i))
        for lives in range(2):
            eventually(partial(registered, world, agent), "the engine at the running agent")
            live(world, NoFaults(world, agent, random.Random(SEED)), loads, SEED + lives, f"{i}-{lives}-")
    assert sum(world.scheduler.connector.errors.counts.errors for world in engines) > 2
    clean(engines[0], agent, engines[1])


def registered(world: World, agent: HoldingAgent) -> bool:
    """Run a step. Return whether all parts of the engine are at the running agent."""
    world.step()
    world.settle()
    links = [world.side.agent._link, *(worker._worker._link for worker in world.workers)]
    return world.side.agent.session is not None and agents.at(links, agents.boot(agent))


def met(engines: list[World], faults: list[Faults]) -> bool:
    """Return whether what is to be shown has occurred: how soon depends on seed and machine."""
    struck = sum((fault.struck for fault in faults), Counter[str]())
    counts = [world.side.counts for world in engines]
    return (
        all(struck[kind] > 1 for kind in KINDS)
        and sum(world.preempted for world in engines) > 0
        and sum(one.tokens_loaded for one in counts) > 0
        and sum(one.loads_failed for one in counts) > 0
        and sum(one.loads_late for one in counts) > 0
    )
