"""KV events of a real scheduler, through evictions, resets, preemptions and agents that are killed:
models of two routers agree with the agent's look-ups whenever the engine comes to rest.
"""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import AgentProcess, eventually
from tests.vllm import agents
from tests.vllm.routers import LATE_S, Lateness, Prompts, Routers
from tests.vllm.setting import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.world import World

ROUNDS = 20
LOOK_STEPS = 10
OPENINGS = 5  # different beginnings of prompts
EXTRA = {"weights_fixed": True}
GAPS = "kvagent_events_gaps_total"
LOG = 1 << 16  # removals that the agent logs for engines that are behind (agent/events)


class Heard:
    """An engine, and the routers that hear it."""

    def __init__(self, worlds: Any, **options: Any) -> None:
        self.routers = Routers()
        self.world: World = worlds(events=self.routers.take, **options)
        self.prompts = Prompts(self.world.side, BLOCK)
        self.requests = 0

    def add(self, dice: random.Random, most: int = 4, openings: int = OPENINGS, **more: Any) -> None:
        """Add requests."""
        for _ in range(dice.randint(1, most)):
            self.requests += 1
            self.world.add(f"r{self.requests}", random_prompt(dice, openings), dice.randint(1, 3 * BLOCK), **more)

    def serve(self, dice: random.Random, most: int = 4, **more: Any) -> None:
        """Add requests, and step until nothing is left to do."""
        self.add(dice, most, **more)
        self.world.run()

    def agree(self, others: tuple[Prompts, ...] = ()) -> int:
        """Wait until routers and agent agree about every prompt. Return the number of blocks."""
        for prompts in others:
            self.prompts.hashes |= prompts.hashes

        def look() -> bool:
            self.world.step()
            return self.prompts.credited(self.routers) == self.prompts.held()

        eventually(look, "routers that agree with the agent", 60.0)
        self.world.run()
        self.routers.check()
        self.prompts.check_tokens(self.routers)
        return len(self.routers.known)


def random_prompt(dice: random.Random, openings: int = OPENINGS) -> list[int]:
    """Return a prompt that begins like others."""
    opening = dice.randrange(openings)
    head = [(opening * 31 + i * 7) % 400 + 5 for i in range(dice.randint(1, 4) * BLOCK)]
    return head + [dice.randrange(5, 400) for _ in range(dice.randint(1, 10 * BLOCK))]


def agent_with(*options: str) -> Iterator[AgentProcess]:
    with tempfile.TemporaryDirectory(prefix="kvagent-") as name:
        folder = Path(name) / "run"
        folder.mkdir(mode=0o700)
        agent = AgentProcess(folder, *(one.replace("DIR", name) for one in options))
        yield agent
        agent.close()


@pytest.fixture
def small() -> Iterator[AgentProcess]:
    """An agent whose memory holds fewer blocks than are saved."""
    yield from agent_with("--pool", "2MiB")


@pytest.fixture
def deep() -> Iterator[AgentProcess]:
    """The same, over a disk. Both outlive the agent."""
    with tempfile.TemporaryDirectory(prefix="kvagent-", dir="/dev/shm") as memory:
        disk = "disk:DIR/disk?capacity=64MiB&write=save"
        yield from agent_with("--pool", "1MiB", "--dram-path", str(Path(memory) / "pool"), "--tier", disk)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_routers_agree_with_the_agent(worlds: Any, small: AgentProcess, asynchronous: bool) -> None:
    seed = int(os.environ.get("KVAGENT_SEED", random.randrange(1 << 30)))
    print(f"KVAGENT_SEED={seed}")
    dice = random.Random(seed)
    options = {"asynchronous": asynchronous, "depth": 1 + asynchronous, "blocks": 40}
    both = [Heard(worlds, **options, extra=EXTRA | {"socket_dir": str(small.folder)}) for _ in range(2)]
    lateness = look_while_they_step(both, small)
    done: set[str] = set()
    rounds = 0
    evicted = 0
    while rounds < ROUNDS or len(done) < len(_BLOWS):
        rounds += 1
        removes = [one.routers.removes for one in both]
        for one in both:
            for _ in range(dice.randint(1, 3)):
                one.serve(dice)
        evicted += sum(one.routers.removes for one in both) - sum(removes)
        blow = dice.choice(list(_BLOWS))
        _BLOWS[blow](dice.choice(both), small, both)
        done.add(blow)
        for one in both:
            one.agree(tuple(other.prompts for other in both))
    while not evicted:  # each agent may have been killed before its memory was full
        gone_before = both[0].routers.removes
        both[0].serve(dice, openings=400)
        evicted += both[0].routers.removes - gone_before
    idle = lateness.clock
    while lateness.clock < idle + 3 * LATE_S:  # the second engine only hears what the first one does
        both[0].serve(dice, openings=400)
    for one in both:
        one.agree(tuple(other.prompts for other in both))
    assert both[0].routers.known == both[1].routers.known
    assert both[0].routers.clears
    assert lateness.seen, "no look came between an eviction and its event"
    lateness.check()
    print(f"{lateness.seen} blocks credited when they were gone, for {lateness.longest * 1e3:.0f} ms at most")
    routers = [(one.routers.stores, one.routers.removes, one.routers.largest) for one in both]
    preempted = sum(one.world.preempted for one in both)
    print(f"{rounds} rounds, {preempted} preemptions, {evicted} evicted; stores, removes, largest batch: {routers}")


def look_while_they_step(both: list[Heard], agent: AgentProcess) -> Lateness:
    """Have idle engines woken, as the engine core is, after each step of another; and look after
    some steps for blocks that routers credit though they are gone.
    """
    lateness = Lateness()
    steps = 0
    nested = False

    def after_step() -> None:
        nonlocal steps, nested
        if nested:
            return
        nested = True
        steps += 1
        looks = (steps % LOOK_STEPS == 0 or lateness.due()) and agent.process.poll() is None
        held = [one.prompts.held(one.routers) for one in both if looks]
        for one in both:
            if not one.world.scheduler.requests:
                one.world.run()
        if looks:
            late = [one.prompts.late(one.routers, found) for one, found in zip(both, held, strict=True)]
            lateness.look((i, block) for i, blocks in enumerate(late) for block in blocks)
        nested = False

    for one in both:

        def step(original: Any = one.world.step) -> None:
            original()
            after_step()

        world: Any = one.world
        world.step = step
    return lateness


def _nothing(one: Heard, agent: AgentProcess, both: list[Heard]) -> None: ...


def _cleared(one: Heard, agent: AgentProcess, both: list[Heard]) -> None:
    assert one.world.forget()


def _reset(one: Heard, agent: AgentProcess, both: list[Heard]) -> None:
    one.world.settle()
    assert one.world.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def _ended(one: Heard, agent: AgentProcess, both: list[Heard]) -> None:
    """Restart the agent, whose blocks stay: the next one knows their tokens from the last."""
    agent.end()
    _started(agent, both)


def _killed(one: Heard, agent: AgentProcess, both: list[Heard]) -> None:
    agent.kill()
    _started(agent, both)


def _started(agent: AgentProcess, both: list[Heard]) -> None:
    for each in both:
        each.world.step()
    agent.start()
    for each in both:
        agents.joined(each.world.side, [w._worker for w in each.world.workers], agent, each.world.step)


_BLOWS = {"nothing": _nothing, "cleared": _cleared, "reset": _reset, "killed": _killed}


def test_routers_see_the_disk(worlds: Any, deep: AgentProcess) -> None:
    seed = int(os.environ.get("KVAGENT_SEED", random.randrange(1 << 30)))
    print(f"KVAGENT_SEED={seed}")
    dice = random.Random(seed)
    both = [Heard(worlds, blocks=40, extra=EXTRA | {"socket_dir": str(deep.folder)}) for _ in range(2)]
    blows = [_ended, _cleared, _reset, _ended]
    seen: set[frozenset[str]] = set()
    rounds = 0
    while rounds < ROUNDS // 4 or blows or len(seen) < 2:
        rounds += 1
        for one in both:
            for _ in range(dice.randint(1, 3)):
                one.serve(dice)
        for one in both:
            one.agree(tuple(other.prompts for other in both))
            seen.update(map(frozenset, one.routers.media.values()))
        (blows.pop() if blows else _nothing)(dice.choice(both), deep, both)
        for one in both:
            one.agree(tuple(other.prompts for other in both))

    def alike() -> bool:
        for one in both:
            one.world.step()
        return both[0].routers.places() == both[1].routers.places()

    eventually(alike, "two engines that tell of the same places", 60.0)
    print(f"{rounds} rounds; stores, removes: {[(one.routers.stores, one.routers.removes) for one in both]}")


def test_a_killed_agent_is_forgotten(worlds: Any, agent: AgentProcess) -> None:
    one = Heard(worlds, extra=EXTRA)
    one.serve(random.Random(1))
    assert one.agree()
    agent.kill()
    one.world.step()  # which notices that it is gone
    one.world.run()
    assert not one.routers.known
    assert not one.world.scheduler.has_requests(), "an engine without an agent comes to rest"
    agent.start()


def test_a_frozen_agent_keeps_an_idle_engine_from_nothing(worlds: Any, agent: AgentProcess) -> None:
    one = Heard(worlds, extra=EXTRA)
    one.serve(random.Random(1))
    held = one.agree()
    agent.freeze()
    try:
        one.world.run()  # an idle engine comes to rest
        one.add(random.Random(2))

        def served() -> bool:
            one.world.step()
            return not one.world.scheduler.requests

        eventually(served, "the answers", 60.0)  # saves that were sent go on until the agent continues
        assert len(one.routers.known) >= held
    finally:
        agent.thaw()
    one.agree()


def test_much_is_told_in_parts(worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvagent.vllm.guests import events as publication

    monkeypatch.setattr(publication, "ASK_BLOCKS", 3)
    one = Heard(worlds, extra=EXTRA)
    one.serve(random.Random(1))
    held = one.agree()
    assert one.world.forget()
    one.routers.largest = 0
    assert one.agree() == held
    assert 0 < one.routers.largest <= publication.ASK_BLOCKS
    assert one.routers.clears


def test_off_means_silence(worlds: Any, agent: AgentProcess) -> None:
    one = Heard(worlds, extra=EXTRA | {"events": "off"})
    one.serve(random.Random(1))
    assert agent.status()["blocks_saved"] > 0
    assert one.routers.stores == 0
    assert one.world.side.take_events is tuple


def test_salts_are_told_and_other_keys_are_not(worlds: Any, agent: AgentProcess) -> None:
    one = Heard(worlds, extra=EXTRA)
    one.serve(random.Random(1), 1, cache_salt="of a tenant")
    assert one.agree()
    assert sorted(map(str, one.routers.salts.values())).count("['of a tenant']") == 1
    assert set(map(str, one.routers.salts.values())) == {"['of a tenant']", "None"}


@pytest.mark.parametrize("offload", ["eager", "lazy"])
def test_blocks_that_are_saved_late_are_told(worlds: Any, agent: AgentProcess, offload: str) -> None:
    """Blocks of ended requests are saved when their request is gone."""
    extra = EXTRA | ({"offload": offload, "watermark_percent": 40, "pin_percent": 15} if offload == "lazy" else {})
    one = Heard(worlds, extra=extra | ({"pin_percent": 2} if offload == "eager" else {}))
    dice = random.Random(3)
    for _ in range(8):
        one.serve(dice)
    assert one.agree()


def test_an_engine_that_was_stopped_is_told_by_an_inventory(worlds: Any, small: AgentProcess) -> None:
    """More blocks go meanwhile than the agent's log has."""
    options: dict[str, Any] = {"blocks": 300, "extra": EXTRA | {"socket_dir": str(small.folder)}}
    one, stopped = Heard(worlds, **options), Heard(worlds, **options)
    dice = random.Random(1)
    for each in one, stopped:
        each.serve(dice)
    for each in one, stopped:
        each.agree((one.prompts, stopped.prompts))
    told, gaps, gone = stopped.routers.stores + stopped.routers.removes, agents.metric(small, GAPS), 0
    while gone <= LOG:
        before = one.routers.removes
        for _ in range(20):
            one.requests += 1
            one.world.add(f"r{one.requests}", [5 + (one.requests * i) % 400 for i in range(1, 1000)], 1)
        one.world.run()
        gone += one.routers.removes - before
    assert agents.metric(small, GAPS) == gaps, "something is gathered for an engine that does not ask"
    one.agree()
    stopped.agree((one.prompts,))
    assert stopped.routers.known == one.routers.known
    told = stopped.routers.stores + stopped.routers.removes - told
    assert told < LOG // 2, "changes that are over are told"
    print(f"{gone} removed meanwhile, {told} told by an inventory")
