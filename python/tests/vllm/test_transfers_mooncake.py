"""Prefill and decode engines at agents that have a store of Mooncake's and do not know each other:
real schedulers and drivers.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import mooncake_store
from tests.agent import START_S, AgentProcess, eventually
from tests.vllm.setting import BLOCK
from tests.vllm.test_transfers import CONSUMER, PRODUCER, PROMPT, SENDS
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def agents() -> Iterator[list[AgentProcess]]:
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kvagent-")))
        url = ends.enter_context(mooncake_store.running(folder))
        made = []
        for number in range(2):
            run = folder / f"run-{number}"
            run.mkdir(mode=0o700)
            made.append(AgentProcess(run, *mooncake_store.flags(url, number, folder / f"state-{number}")))
            ends.callback(made[-1].close)
        for agent in made:
            eventually(partial(mooncake_store.connected, agent), "an agent whose helper has connected", START_S)
        yield made


class Nodes:
    """Engines at two agents."""

    def __init__(self, model: Path, agents: list[AgentProcess]) -> None:
        self._model, self._agents = model, agents
        self.made: list[tuple[World, AgentProcess]] = []

    def engine(self, number: int, **options: Any) -> World:
        extra = {"transfer_ttl_ms": 1000}
        world = World(self._model, str(self._agents[number].folder), extra=extra, **options)
        self.made.append((world, self._agents[number]))
        return world

    def run(self) -> None:
        """Step all engines, one after the other, until nothing is left to do."""

        def over() -> bool:
            for world, _ in self.made:
                if world.scheduler.has_requests():
                    world.step()
                world.settle()
            return not any(world.scheduler.has_requests() for world, _ in self.made)

        eventually(over, "the end of all requests", PATIENCE_S)

    def ended(self) -> None:
        """Check that nothing is left over. No agent is told that another's transfer was delivered:
        it ends at its time.
        """
        for world, agent in self.made:
            clean(world, agent)
            assert world.side.blocks.awaited == 0
            eventually(partial(without_transfers, agent), "an agent without transfers", PATIENCE_S)


def without_transfers(agent: AgentProcess) -> bool:
    told = agent.status()["transfers"]
    return not any(told[name] for name in ("open", "complete"))


@pytest.fixture
def nodes(model: Path, agents: list[AgentProcess]) -> Iterator[Nodes]:
    made = Nodes(model, agents)
    yield made
    for world, _ in made.made:
        world.close()


def prompts(salt: int, count: int) -> list[list[int]]:
    """Return prompts that no other test has."""
    return [[salt, i + 5, *PROMPT] * (1 + i % 3) for i in range(count)]


def early(name: str) -> dict[str, Any]:
    """Return what a proxy that asks both at once tells the decode engine."""
    return {"do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": name}


def check(decode: World, name: str, prompt: list[int], tokens: int) -> None:
    assert decode.outputs[name] == decode.sequences[name].tokens[len(prompt) : len(prompt) + tokens]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_after_the_other(nodes: Nodes, asynchronous: bool) -> None:
    """The last blocks are being written to the store when the decode engine asks for them."""
    how = {"asynchronous": asynchronous, "depth": 2 if asynchronous else 1}
    prefill, decode = nodes.engine(0, transfer=PRODUCER, **how), nodes.engine(1, transfer=CONSUMER, **how)
    prompt = prompts(7 + asynchronous, 1)[0]
    prefill.add("p-0", prompt, 1, params=SENDS)
    nodes.run()
    decode.add("d-0", prompt, 20, params=prefill.params["p-0"])
    nodes.run()
    check(decode, "d-0", prompt, 20)
    assert decode.side.counts.tokens_loaded == len(prompt) // BLOCK * BLOCK
    nodes.ended()


@pytest.mark.parametrize("v2", [False, True])
def test_a_decode_engine_that_is_asked_first(nodes: Nodes, v2: bool) -> None:
    """That the store has nothing is not remembered."""
    prefill, decode = (
        nodes.engine(0, transfer=PRODUCER, v2=v2, max_batched=32),
        nodes.engine(1, transfer=CONSUMER, v2=v2),
    )
    prompt = prompts(9 + v2, 1)[0]
    decode.add("cmpl-x-0", prompt, 20, params=early("x"))
    for _ in range(50):
        decode.step()
    assert not decode.outputs["cmpl-x-0"], "it computed its prompt itself"
    prefill.add("cmpl-x-0", prompt, 1, params=SENDS)
    nodes.run()
    check(decode, "cmpl-x-0", prompt, 20)
    assert decode.side.counts.tokens_loaded == len(prompt) // BLOCK * BLOCK
    nodes.ended()


def test_two_prefill_and_two_decode_engines(nodes: Nodes) -> None:
    """Nothing is computed twice, whoever asks whom, and when."""
    prefill = [nodes.engine(0, transfer=PRODUCER | {"engine_id": f"p{i}"}, blocks=256) for i in range(2)]
    decode = [nodes.engine(1, transfer=CONSUMER | {"engine_id": f"d{i}"}, blocks=256) for i in range(2)]
    some = prompts(11, 8)
    for i, prompt in enumerate(some):
        if i % 2:
            params = early(str(i)) | {"remote_engine_id": f"p{i % 4 // 2}"}
            decode[i // 2 % 2].add(f"cmpl-{i}-0", prompt, 8, params=params)
        prefill[i % 4 // 2].add(f"cmpl-{i}-0", prompt, 1, params=SENDS)
    nodes.run()
    for i, prompt in enumerate(some):
        if i % 2 == 0:
            decode[i // 2 % 2].add(f"cmpl-{i}-0", prompt, 8, params=prefill[i % 4 // 2].params[f"cmpl-{i}-0"])
    nodes.run()
    for i, prompt in enumerate(some):
        check(decode[i // 2 % 2], f"cmpl-{i}-0", prompt, 8)
    loaded = sum(world.side.counts.tokens_loaded for world in decode)
    assert loaded == sum(len(prompt) // BLOCK * BLOCK for prompt in some)
    nodes.ended()
