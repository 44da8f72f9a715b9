"""The benches that users run, with the real agent: that they run, not how fast it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.agent import AgentProcess


def test_the_connector_alone_is_measured(agent: AgentProcess) -> None:
    command = [
        sys.executable,
        "-m",
        "kvagent.bench",
        "--socket-dir",
        str(agent.folder),
        "--running",
        "16",
        "--without-vllm",
    ]
    bench = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600, check=False
    )
    assert bench.returncode == 0, bench.stderr
    title, head, row, lookup, without = bench.stdout.splitlines()
    assert title.startswith("us of a step in the connector alone"), title
    assert len(row.split()) == len(head.replace("scheduler own", "own").replace("worker own", "own").split()), row
    running, planned = row.split()[:2]
    assert running == "16"
    assert float(planned) > 0, "no step planned a save: there was nothing to measure"
    assert lookup.startswith("look-up of 64 blocks: own p50 "), lookup
    assert without.startswith("without the real scheduler"), without
