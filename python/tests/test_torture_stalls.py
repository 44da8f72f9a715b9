"""scripts/torture_stalls.py: the share of a late look-up during which the machine stalled."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "torture_stalls.py"
SPEC = importlib.util.spec_from_file_location("torture_stalls", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
torture_stalls = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(torture_stalls)


def test_overlapping_stalls_count_once() -> None:
    stalls = torture_stalls.Stalls()
    stalls.spans = [(1.0, 2.0), (1.5, 1.75), (1.5, 2.5), (4.0, 5.0)]
    assert stalls.longest_s() == 1.0
    for start, end, still in [(0, 1, 0), (0, 1.25, 0.25), (1.25, 3, 1.25), (0, 9, 2.5), (2.5, 4, 0), (4.5, 4.75, 0.25)]:
        assert stalls.within_s(start, end) == pytest.approx(still)


def test_a_stopped_sleeper_records_a_stall() -> None:
    stalls = torture_stalls.Stalls()
    with stalls.watching():
        assert [os.sched_getaffinity(pid) for pid in stalls.sleepers] == [{n} for n in sorted(os.sched_getaffinity(0))]
        first = time.time()
        os.kill(stalls.sleepers[-1], signal.SIGSTOP)
        time.sleep(0.1)  # the measured span, not a wait for something
        last = time.time()
        os.kill(stalls.sleepers[-1], signal.SIGCONT)
    assert stalls.within_s(first, last) > 0.09
    assert stalls.longest_s() > 0.09
