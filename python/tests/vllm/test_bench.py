"""The bench, with the real agent: that it runs, not how fast it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.agent import AgentProcess


def test_the_connector_is_measured(agent: AgentProcess) -> None:
    command = [sys.executable, "-m", "tests.vllm.bench", "--socket-dir", str(agent.folder), "--running", "16"]
    bench = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600, check=False
    )
    assert bench.returncode == 0, bench.stderr
    title, _, row = bench.stdout.splitlines()[-3:]
    assert title.startswith("us of a step: p50"), title
    running, planned, *figures = row.split()
    assert running == "16"
    assert float(planned) > 0, "no step planned a save: there was nothing to measure"
    assert len(figures) == 11, row
