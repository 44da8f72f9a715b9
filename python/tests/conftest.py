from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import reruns
from tests.agent import LIMITS, PATIENCE_S, AgentProcess, StartedAgents

if TYPE_CHECKING:
    from collections.abc import Iterator


pytest_runtest_logreport = reruns.report


def pytest_configure(config: pytest.Config) -> None:
    reruns.configure(config)
    config.addinivalue_line("markers", "stops: an agent that stands still is to be seen as soon as the product sees it")


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeouts, so that a slow machine is not taken for a dead agent.

    Tests of timeouts set their own.
    """
    if request.node.get_closest_marker("stops") is None:
        for limit in LIMITS:
            monkeypatch.setattr(limit, PATIENCE_S)


def fresh_agent() -> Iterator[AgentProcess]:
    # Not tmp_path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        path = Path(folder) / "run"
        path.mkdir(mode=0o700)
        process = AgentProcess(path)
        yield process
        process.close()


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    """A fresh agent."""
    yield from fresh_agent()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartedAgents]:
    """A directory in which agents are started; no fixture starts one."""
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        agents = StartedAgents(Path(folder), monkeypatch)
        yield agents
        agents.close()


@pytest.fixture
def far() -> Iterator[AgentProcess]:
    """A fresh agent of another node."""
    yield from fresh_agent()
