"""Real engines that start the node's agent: it outlives the first one, and the second one hits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.vllm import engine as real
from tests.vllm.engine import WHOLE_BLOCKS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import StartedAgents

pytestmark = pytest.mark.engine


def test_one_engine_starts_the_agent_and_the_next_one_hits(
    opt: Path, started: StartedAgents, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{started.programs}{os.pathsep}{os.environ['PATH']}")
    options = {"agent": "start", "pool": "64MiB", "weights_fixed": True}
    assert real.run_elsewhere(opt, started.folder, options=options) == reference
    first = started.status()
    assert first["blocks_saved"] >= WHOLE_BLOCKS / 2
    assert real.run_elsewhere(opt, started.folder, options=options) == reference
    last = started.status()
    assert last["boot"] == first["boot"]
    assert last["blocks_loaded"] - first["blocks_loaded"] >= WHOLE_BLOCKS / 2
