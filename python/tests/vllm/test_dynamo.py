"""Dynamo's own indexer, unmodified, subscribed to vLLM's own publisher: it credits the blocks that
the agent has, through evictions, resets and agents that are killed.

KVAGENT_DYNAMO is the Python that it is installed in (scripts/env dynamo). scripts/test-vllm sets it
for the locked vLLM; under others the test is left out.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import eventually
from tests.vllm import agents
from tests.vllm.routers import Prompts
from tests.vllm.setting import BLOCK
from tests.vllm.test_kv_events import EXTRA, random_prompt, small

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent import AgentProcess

__all__ = ["small"]
PYTHON = os.environ.get("KVAGENT_DYNAMO", "")
MODEL = "m"
ROUNDS = 12
PATIENCE_S = 60.0
pytestmark = pytest.mark.skipif(not PYTHON, reason="KVAGENT_DYNAMO is not set: Dynamo's indexer is LEFT OUT")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Indexer:
    """Dynamo's indexer in a process of its own, with one worker."""

    def __init__(self, events: int) -> None:
        self._port = free_port()
        command = [PYTHON, "-m", "dynamo.indexer", "--block-size", str(BLOCK), "--port", str(self._port)]
        command += ["--workers", f"1=tcp://127.0.0.1:{events}", "--model-name", MODEL]
        quiet = os.environ | {"DYN_LOG": "error"}
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=quiet)
        eventually(self._listens, "an indexer that answers", PATIENCE_S)

    def cpu(self, prompt: list[int]) -> int:
        """Return how many blocks of a prompt are in CPU memory, or in a higher tier."""
        answer = self._ask("/query", {"token_ids": prompt, "model_name": MODEL})
        return int(answer["instances"].get("1", {}).get("cpu", 0)) // BLOCK

    def gpu(self, prompt: list[int]) -> int:
        answer = self._ask("/query", {"token_ids": prompt, "model_name": MODEL})
        return int(answer["instances"].get("1", {}).get("gpu", 0)) // BLOCK

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _listens(self) -> bool:
        try:
            return "active" in json.dumps(self._ask("/workers"))
        except ConnectionError:
            return False

    def _ask(self, path: str, question: Any = None) -> Any:
        data = None if question is None else json.dumps(question).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            connection.request("POST" if data else "GET", path, data, {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


@pytest.fixture
def indexers() -> Iterator[Any]:
    made: list[Indexer] = []

    def make(events: int) -> Indexer:
        made.append(Indexer(events))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_dynamos_indexer_agrees_with_the_agent(worlds: Any, small: AgentProcess, indexers: Any) -> None:
    seed = int(os.environ.get("KVAGENT_SEED", random.randrange(1 << 30)))
    print(f"KVAGENT_SEED={seed}")
    dice = random.Random(seed)
    port = free_port()
    world = worlds(events=f"tcp://*:{port}", extra=EXTRA | {"socket_dir": str(small.folder)}, blocks=48)
    indexer = indexers(port)
    prompts = Prompts(world.side, BLOCK)
    served = 0

    def serve(most: int) -> None:
        nonlocal served
        for _ in range(dice.randint(1, most)):
            served += 1
            world.add(f"r{served}", random_prompt(dice), dice.randint(1, 2 * BLOCK))
        world.run()

    def agree() -> None:
        """Compare when nothing is in the engine's own cache: credits of CPU memory include it."""
        assert world.forget()

        def look() -> bool:
            world.step()
            held = prompts.held()
            return all(indexer.cpu(list(prompt)) == blocks for prompt, blocks in held.items())

        eventually(look, "an indexer that agrees with the agent", PATIENCE_S)
        assert not any(indexer.gpu(list(prompt)) for prompt in prompts.hashes)

    def subscribed() -> bool:
        serve(1)
        return any(indexer.cpu(list(prompt)) for prompt in prompts.hashes)

    eventually(subscribed, "a subscription", PATIENCE_S)
    killed = rounds = most = 0
    while rounds < ROUNDS or not killed:
        rounds += 1
        for _ in range(dice.randint(1, 4)):
            serve(4)
        agree()
        most = max(most, *prompts.held().values())
        blow = dice.random()
        if blow < 0.3:
            killed += 1
            small.kill()
            world.step()
            world.run()
            eventually(lambda: not any(indexer.cpu(list(p)) for p in prompts.hashes), "no credit", PATIENCE_S)
            small.start()
            agents.joined(world.side, [w._worker for w in world.workers], small, world.step)
        elif blow < 0.5:
            assert world.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            agree()
            assert not any(prompts.held().values())
    assert most
    counts = world.side.counts
    print(f"{rounds} rounds, {killed} kills: {counts.events_stored} stores, {counts.events_removed} removes")
