"""The agent as a secondary tier of vLLM's own offloading: random requests while the agent ends,
freezes, restarts and holds wrong bytes; who shares with whom; what is left after a restart.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.options import OptionError
from tests.agent import AgentProcess, eventually
from tests.vllm.agents import figures, flip
from tests.vllm.engine import keeps_its_pool
from tests.vllm.gpu import PRIME
from tests.vllm.test_tier import KINDS, PROMPT, SEED, live
from tests.vllm.tiered import UNDEFINED, TieredWorld, clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent import StartedAgents

LIVES = 2
OTHER = [i % 300 + 7 for i in range(140)]
SPOILS = 0.03  # how often, of all steps
STORM = 150  # steps of a life, in which it happens
POOL = "pool-of-the-test"
STORMS = ("v2-async", "v2-chunk2", "v2-window")
SOON = {"lookup_age_ms": 100, "load_deadline_ms": 300, "drain_wait_ms": 100}  # where an agent stands still
ROUNDS = int(os.environ.get("KVAGENT_ORACLE_ROUNDS", "1"))


@pytest.fixture
def kept() -> Iterator[AgentProcess]:
    """An agent that keeps its pool where possible."""
    with (
        tempfile.TemporaryDirectory(prefix="kvagent-") as folder,
        tempfile.TemporaryDirectory(prefix="kvagent-", dir="/dev/shm") as memory,
    ):
        path = Path(folder) / "run"
        path.mkdir(mode=0o700)
        process = AgentProcess(path, *(["--dram-path", str(Path(memory) / POOL)] if keeps_its_pool() else []))
        yield process
        process.close()


def tier(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the configuration of the tier. No test starts with the weights of a model."""
    patient = {"lookup_age_ms": 10_000, "start_wait_ms": 20_000, "weights_fixed": True, "weights_version": "1"}
    return {"type": "KVAgentTier", "module_path": "kvagent.vllm.tier", "socket_dir": str(folder)} | patient | more


def there(world: TieredWorld) -> bool:
    """Return whether the tier has an agent for loads and for saves."""
    return bool(world.tier._courier.loading and world.tier._courier.saving)


def told(world: TieredWorld, agent: AgentProcess) -> None:
    heard = world.heard
    print(
        f"{world.steps} steps, {world.gpu.checked} positions checked, {world.preempted} preemptions, {world.resets} "
        f"resets; chunks: {heard.stored} stored, {heard.loaded} loaded, {heard.failed} failed; {figures(agent)}"
    )


class Weather:
    """What happens to an agent: in each life of the engine it ends once, freezes twice, and values
    of its pool change by chance.
    """

    def __init__(self, world: TieredWorld, agent: AgentProcess) -> None:
        self._world, self._agent = world, agent
        self._frozen = False
        self._steps, self._plan = 0, dict[int, Callable[[], None]]()
        self.ends = self.freezes = self.spoiled = 0

    def begin(self, dice: random.Random) -> None:
        """Plan a life."""
        self.calm()
        first, second, end = sorted(dice.sample(range(5, STORM), 3))
        self._steps = 0
        self._plan = {first: self._freeze, first + dice.randrange(1, 60): self.calm, end: self._end}
        self._plan |= {second: self._freeze, second + dice.randrange(1, 60): self.calm}

    def __call__(self, dice: random.Random) -> None:
        self._steps += 1
        if happens := self._plan.pop(self._steps, None):
            happens()
        if not self._frozen and self._world.sequences and dice.random() < SPOILS:
            self._spoil(dice)

    def calm(self) -> None:
        if self._frozen:
            self._agent.thaw()
            self._frozen = False

    def _freeze(self) -> None:
        if not self._frozen:
            self._agent.freeze()
            self._frozen = True
            self.freezes += 1

    def _end(self) -> None:
        self._agent.kill()  # frozen or not
        self._frozen = False
        self._agent.start()
        self.ends += 1

    def _spoil(self, dice: random.Random) -> None:
        sequence = dice.choice(list(self._world.sequences.values()))
        value = (dice.choice(sequence.hashes[: len(sequence.prompt)]) * 7 + 13 * dice.randrange(4)) % PRIME
        with contextlib.suppress(AssertionError):  # it is not there
            flip(self._agent.process.pid, struct.pack("<f", value), POOL)
            self.spoiled += 1


@pytest.mark.parametrize("nth", range(ROUNDS))
@pytest.mark.parametrize("kind", KINDS)
def test_no_byte_is_wrong_cold_or_warm(
    tiered: Callable[..., TieredWorld], agent: AgentProcess, kind: str, nth: int
) -> None:
    seed = int(os.environ.get("KVAGENT_SEED", SEED)) + 1000 * nth
    print(kind, KINDS[kind], "KVAGENT_SEED", seed)
    first, second = (tiered(tier(agent.folder), seed=seed, **KINDS[kind]) for _ in range(2))
    for i in range(LIVES):
        live(first, seed + i, f"first{i}-", fenced=True)
        live(second, seed + i, f"second{i}-", fenced=True)
    clean(first, second)
    told(first, agent)
    told(second, agent)
    assert second.heard.loaded
    eventually(lambda: agent.status()["leases"] == 0, "all leases given back")


@pytest.mark.parametrize("nth", range(ROUNDS))
@pytest.mark.parametrize("kind", STORMS)
def test_no_byte_is_wrong_whatever_happens_to_the_agent(
    tiered: Callable[..., TieredWorld], kept: AgentProcess, kind: str, nth: int
) -> None:
    seed = int(os.environ.get("KVAGENT_SEED", SEED)) + 1000 * nth
    print(kind, KINDS[kind], "KVAGENT_SEED", seed)
    world = tiered(tier(kept.folder, **SOON), seed=seed, **KINDS[kind])
    weather = Weather(world, kept)
    for i in range(4 * LIVES):
        weather.begin(random.Random(seed + i))
        live(world, seed + i % 2, f"life{i}-", weather, fenced=True)
        weather.calm()
        eventually(lambda: there(world), "the tier at an agent")
        if i + 1 >= LIVES and min(weather.ends, weather.freezes, weather.spoiled):
            break
    world.rest()
    clean(world)
    told(world, kept)
    print(f"{weather.ends} ends, {weather.freezes} freezes, {weather.spoiled} values changed")
    assert min(weather.ends, weather.freezes, weather.spoiled) > 0
    eventually(lambda: kept.status()["leases"] == 0, "all leases given back")


def test_a_value_that_is_wrong_in_the_pool_is_not_loaded(
    tiered: Callable[..., TieredWorld], agent: AgentProcess
) -> None:
    world = tiered(tier(agent.folder))
    world.prompt("cold", PROMPT)
    world.forget()
    flip(agent.process.pid, struct.pack("<f", (world.sequences["cold"].hashes[20] * 7) % PRIME))
    assert world.prompt("warm", PROMPT) < 96
    assert world.heard.failed
    clean(world)


def test_an_engine_starts_without_an_agent_and_finds_it_later(
    tiered: Callable[..., TieredWorld], agent: AgentProcess
) -> None:
    agent.kill()
    try:
        world = tiered(tier(agent.folder, start_wait_ms=0))
        assert world.prompt("alone", PROMPT) == 0
        assert not world.heard.stored
    finally:
        agent.start()
    eventually(lambda: there(world), "the tier at the agent")
    world.forget()
    assert world.prompt("cold", PROMPT) == 0
    world.forget()
    assert world.prompt("warm", PROMPT) == 96
    clean(world)


def test_an_engine_starts_the_agent_and_the_next_one_finds_what_it_stored(
    started: StartedAgents, tiered: Callable[..., TieredWorld]
) -> None:
    # tiered ends first, and with it the engines, which would start another agent
    options = tier(started.folder, agent="start", pool="64MiB")
    first = tiered(options)
    assert there(first), "the engine's start does not wait for it"
    assert first.prompt("cold", PROMPT) == 0
    second = tiered(options)
    assert second.prompt("warm", PROMPT) == 96
    assert started.running() == [started.serving()]
    clean(first, second)
    with pytest.raises(OptionError, match=r"agent: start; pool: 2TiB: .* the machine has"):
        tiered(tier(started.folder / "other", agent="start", pool="2TiB"))


def test_all_requests_finish_while_the_agent_stands_still(
    tiered: Callable[..., TieredWorld], agent: AgentProcess
) -> None:
    world = tiered(tier(agent.folder, **SOON), seed=SEED, **KINDS["v2-async"])
    live(world, SEED, "before-", fenced=True)
    agent.freeze()
    live(world, SEED, "frozen-", fenced=True)
    world.forget()  # drains
    clean(world)
    agent.thaw()
    eventually(lambda: there(world), "the tier at the agent")
    live(world, SEED, "after-", fenced=True)
    clean(world)
    told(world, agent)


def region(world: TieredWorld) -> bytes:
    """Return what vLLM's host region holds."""
    return bytes(world.manager.primary_tier.get_kv_memoryview())


def frozen_at(world: TieredWorld, agent: AgentProcess, call: str, deadline_s: float) -> None:
    """Freeze the agent when the tier is given its next job. From then on jobs have that long: a
    limit that is short from the start also strikes an agent that is merely late.
    """
    submit, courier = getattr(world.tier, call), world.tier._courier

    def freeze(job: Any) -> None:
        setattr(world.tier, call, submit)
        agent.freeze()
        courier._loads._deadline_s = courier._saves._deadline_s = deadline_s
        submit(job)

    setattr(world.tier, call, freeze)


def test_a_load_that_was_given_up_reaches_no_row_when_the_agent_wakes(
    tiered: Callable[..., TieredWorld], agent: AgentProcess
) -> None:
    world = tiered(tier(agent.folder), rows=8)
    world.prompt("cold", PROMPT)
    world.forget()
    frozen_at(world, agent, "submit_load", 0.3)
    assert world.prompt("warm", PROMPT) == 0
    assert world.heard.failed == 6
    world.prompt("other", OTHER)  # uses the rows
    before = region(world)
    agent.thaw()
    eventually(lambda: not world.tier._courier._loads._flying, "the end of the agent's load")
    assert region(world) == before, "a row was written after it had been given back"
    assert agent.status()["blocks_loaded"] == 6, "the agent did not load, so this shows nothing"
    clean(world)


@pytest.mark.parametrize("way", ["deadline", "drain"])
def test_a_save_that_was_given_up_stores_nothing_when_the_agent_wakes(
    tiered: Callable[..., TieredWorld], agent: AgentProcess, way: str
) -> None:
    world = tiered(tier(agent.folder, **({"drain_wait_ms": 50} if way == "drain" else {})), rows=8)
    frozen_at(world, agent, "submit_store", 60.0 if way == "drain" else 0.1)
    world.add("cold", PROMPT, 1)
    while not world.heard.open:
        world.step()
    if way == "drain":
        world.settle()
        assert world.scheduler.reset_prefix_cache(reset_connector=True)
    world.rest()
    assert not world.heard.stored
    for row in world.played[0]._rows:  # as if vLLM used them for something else
        row.fill_(UNDEFINED)
    agent.thaw()
    eventually(lambda: not world.tier._courier._saves._flying, "the end of the agent's save")
    assert agent.status()["blocks_saved"] == 0
    world.forget()
    assert world.prompt("warm", PROMPT) == 0
    clean(world)


@pytest.mark.parametrize("end", ["kill", "close"])
def test_a_restarted_agent_has_what_was_stored(
    tiered: Callable[..., TieredWorld], kept: AgentProcess, end: str
) -> None:
    if not keeps_its_pool():
        pytest.skip("this agent cannot keep its pool")
    world = tiered(tier(kept.folder))
    world.prompt("cold", PROMPT)
    if end == "kill":
        kept.kill()
    else:
        kept.process.terminate()
        kept.process.wait()
    kept.start()
    eventually(lambda: there(world), "the tier at the agent")
    world.forget()
    assert world.prompt("warm", PROMPT) == 96
    clean(world)


SHARING: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "equal engines": ({}, {}, 96),
    "other chunks": ({}, {"chunk": 2}, 0),
    "another tenant": ({"tenant": "other"}, {}, 0),
    "other weights": ({"weights_version": "2"}, {}, 0),
    "other heads": ({}, {"ranks": 2, "split": True}, 0),
}


@pytest.mark.parametrize("case", SHARING)
def test_engines_share_what_is_equal(tiered: Callable[..., TieredWorld], agent: AgentProcess, case: str) -> None:
    of_tier, of_world, found = SHARING[case]
    first = tiered(tier(agent.folder), rows=30)
    second = tiered(tier(agent.folder, **of_tier), rows=30, **of_world)
    assert first.prompt("first", PROMPT) == 0
    assert second.prompt("second", PROMPT) == found
    assert second.prompt("again", PROMPT) == 96
    clean(first, second)


def test_another_model_finds_nothing(tiered: Callable[..., TieredWorld], agent: AgentProcess, model: Path) -> None:
    first = tiered(tier(agent.folder))
    assert first.prompt("first", PROMPT) == 0
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace('"vocab_size": 512', '"vocab_size": 640'))
    second = tiered(tier(agent.folder))
    assert second.prompt("second", PROMPT) == 0
    clean(first, second)
