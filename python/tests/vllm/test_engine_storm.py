"""Two real engines share an agent that is killed and stopped, while their requests arrive and are
aborted.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import TYPE_CHECKING

import pytest

from tests.agent import eventually
from tests.vllm import storm
from tests.vllm.agents import figures
from tests.vllm.forks import Forked

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine
BLOWS = int(os.environ.get("KVAGENT_STORM_BLOWS", "8"))
SEED = int(os.environ.get("KVAGENT_SEED", "1"))
REST_S, STILL_S = (0.2, 1.5), (0.1, 2.0)  # between two blows; that a stopped agent stands still


def test_kills_and_freezes_while_two_engines_share(opt: Path, node: AgentProcess, reference: list[list[int]]) -> None:
    dice = random.Random(SEED)
    print("KVAGENT_SEED", SEED)
    engines = [
        Forked(storm.main, str(opt), str(node.folder), str(SEED + i), VLLM_ENABLE_V1_MULTIPROCESSING="0")
        for i in range(2)
    ]
    try:
        for engine in engines:
            engine.say(json.dumps(reference))
        for engine in engines:
            engine.hear("ready")
        for _ in range(BLOWS):
            blow(node, dice)
        for engine in engines:
            engine.say("end")
        for engine in engines:
            told = json.loads(engine.hear("{"))
            print(told)
            assert (told["wrong"], told["left"], told["pinned"], told["taken"]) == ([], 0, 0, 0)
            assert told["answered"] > 0
            assert told["aborted"] > 0
            assert told["counted"]["tokens_loaded"] > 0
            assert engine.wait() == 0
    finally:
        for engine in engines:
            engine.close()
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
