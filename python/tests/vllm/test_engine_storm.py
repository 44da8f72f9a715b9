"""Two real engines share an agent that is killed and stopped, while their requests arrive and are
aborted.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.agent import eventually
from tests.vllm.agents import figures

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine
BLOWS = int(os.environ.get("KVAGENT_STORM_BLOWS", "8"))
SEED = int(os.environ.get("KVAGENT_SEED", "1"))
REST_S, STILL_S = (0.2, 1.5), (0.1, 2.0)  # between two blows; that a stopped agent stands still
PATIENCE_S = 300.0  # for an engine's start, and its end


def test_kills_and_freezes_while_two_engines_share(opt: Path, node: AgentProcess, reference: list[list[int]]) -> None:
    dice = random.Random(SEED)
    print("KVAGENT_SEED", SEED)
    engines = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.storm", str(opt), str(node.folder), str(SEED + i)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        for engine in engines:
            say(engine, json.dumps(reference))
        for engine in engines:
            hear(engine, "ready")
        for _ in range(BLOWS):
            blow(node, dice)
        for engine in engines:
            say(engine, "end")
        for engine in engines:
            told = json.loads(hear(engine, "{"))
            print(told)
            assert (told["wrong"], told["left"], told["pinned"], told["taken"]) == ([], 0, 0, 0)
            assert told["answered"] > 0
            assert told["aborted"] > 0
            assert told["counted"]["tokens_loaded"] > 0
            assert engine.wait(PATIENCE_S) == 0
    finally:
        for engine in engines:
            engine.kill()
            engine.communicate()
    eventually(lambda: node.status()["leases"] == 0, "an agent without leases")
    print(f"{BLOWS} blows; {figures(node)}")


def blow(agent: AgentProcess, dice: random.Random) -> None:
    """Kill the agent and restart it, or stop it for a while."""
    time.sleep(dice.uniform(*REST_S))  # the subject: any moment of the engines' requests
    if dice.random() < 0.5:
        agent.kill()
        agent.start()
        return
    agent.freeze()
    try:
        time.sleep(dice.uniform(*STILL_S))  # the subject: a stop that look-ups outlast, or not
    finally:
        agent.thaw()


def say(engine: subprocess.Popen[str], line: str) -> None:
    assert engine.stdin is not None
    engine.stdin.write(line + "\n")
    engine.stdin.flush()


def hear(engine: subprocess.Popen[str], begins: str) -> str:
    """Return the next line with this prefix."""
    assert engine.stdout is not None
    for line in engine.stdout:
        if line.startswith(begins):
            return line
    raise AssertionError(f"the engine ended with {engine.wait(PATIENCE_S)}")
