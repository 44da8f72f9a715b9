"""Runs a failed test again, twice at most, in a run of scripts/flaky, and adds those that pass then
to its list. Wrong bytes, tokens or sums are never a chance: their tests fail at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

RERUNS = 2
NEVER_CHANCE = (
    r"(?i)wrong|corrupt|other bytes|bytes differ|leak",
    r"assert (?:b['\"]|bytearray|memoryview|array\(|tensor\()",
    r"assert \[+-?\d+, ",  # tokens, or rows of blocks
)
"""Patterns of what a failure says that is not asked twice."""

_failures: dict[str, str] = {}
"""Of tests that failed and run again, what the first failure said."""


def configure(config: pytest.Config) -> None:
    if os.environ.get("KVAGENT_FLAKY"):
        config.option.reruns = RERUNS
        config.option.rerun_except = [*(config.option.rerun_except or []), *NEVER_CHANCE]


def report(report: pytest.TestReport) -> None:
    if str(report.outcome) == "rerun":  # pytest-rerunfailures' own
        _failures.setdefault(report.nodeid, report.longreprtext)
    elif report.when == "call" and report.passed and (text := _failures.pop(report.nodeid, None)) is not None:
        with Path(os.environ["KVAGENT_FLAKY"]).open("a") as out:
            out.write(f"FLAKY {report.nodeid}\n{text}\n\n")
