"""The connector's log line of a request has all that `kvagent explain` needs to say why it
missed."""

from __future__ import annotations

import json
import logging
import subprocess
from typing import TYPE_CHECKING, Any

from tests.agent import BINARY, AgentProcess, eventually
from tests.simulated import BLOCK, SimulatedEngine

if TYPE_CHECKING:
    import pytest


def explained(agent: AgentProcess, name: str) -> dict[str, Any] | None:
    """Return the agent's explanation of a look-up, None if it is not remembered yet."""
    command = [str(BINARY), "explain", "--request", name, "--json", "--socket-dir", str(agent.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    explanation: dict[str, Any] | None = json.loads(done.stdout) if done.returncode == 0 else None
    return explanation


def test_a_logged_request_is_explained(agent: AgentProcess, caplog: pytest.LogCaptureFixture) -> None:
    engine = SimulatedEngine(agent, "one")
    engine.save("a", "p", 2, 7)
    request = engine.request("cmpl-7", "p", 4)
    with caplog.at_level(logging.DEBUG, "vllm.kvagent"):
        engine.scheduler.on_new_request(request)
        eventually(lambda: engine.scheduler.matched(request, 0)[0] == 2 * BLOCK, "the answer")
    line = next(r.getMessage() for r in caplog.records if "of request cmpl-7" in r.getMessage())
    name = line.partition("look-up ")[2].split()[0]
    explanation = eventually(lambda: explained(agent, name), "the explanation")
    assert explanation["reason"] == "not_stored"
    assert [(f["fate"], f["from"]) for f in explanation["blocks"]] == [("found", 0), ("not_stored", 2)]
    engine.scheduler.finished(request, normally=False)
    engine.close()
