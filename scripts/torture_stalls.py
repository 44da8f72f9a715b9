"""Measure when the machine's processors stalled, to compare late look-ups with.

A host takes processors from a virtual machine, for hundreds of milliseconds if it has too few. No thread can answer
then, whatever its priority. So each processor has a sleeper, a thread of the highest priority that sleeps for a
millisecond at a time and records when it woke late; and the kernel's own count (steal) is read.

As a program this is a sleeper: torture_stalls.py PROCESSOR prints a line for each stall, with its start and end in
seconds of Unix time, until its input ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 0.001
STALL_S = 0.002  # a later end is a stall: a timer of Linux is late by 0.06 ms
PRIORITY = 50  # of SCHED_FIFO: above everything except the kernel
END_LIMIT_S = 10
READY = "watching"


def sleep_and_record(processor: int) -> None:
    """Print the stalls of a processor until standard input ends."""
    os.sched_setaffinity(0, {processor})
    with contextlib.suppress(
        PermissionError
    ):  # without the right it sees what a thread of the agent sees, including other work
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    before = time.monotonic()
    print(READY, file=sys.stderr, flush=True)
    while True:
        ended = select.select([sys.stdin], [], [], WAIT_S)[0]
        woke = time.monotonic()
        took, before = woke - before, woke  # without a gap, so that no stall is missed
        if took > WAIT_S + STALL_S:  # including the one in which the input ended
            now = time.time()
            print(f"{now - took:.6f} {now:.6f}")
        if ended:
            return


class Stalls:
    """The stalls of all processors during ``watching``."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        self.stolen_s = 0.0  # of all processors, as counted by the kernel
        self.sleepers: list[int] = []  # their process numbers

    @contextlib.contextmanager
    def watching(self) -> Iterator[Stalls]:
        """Start the sleepers, and read their records at the end."""
        stolen = stolen_s()
        running: list[tuple[subprocess.Popen[str], TextIO]] = []
        with contextlib.ExitStack() as files:
            try:
                for processor in sorted(os.sched_getaffinity(0)):
                    out = files.enter_context(tempfile.TemporaryFile("w+"))
                    running.append((start_sleeper(processor, out), out))
                self.sleepers = [process.pid for process, _ in running]
                yield self
            finally:
                for process, _ in running:
                    process.communicate(timeout=END_LIMIT_S)
                for _, seen in running:
                    seen.seek(0)
                    self.spans += [(float(start), float(end)) for start, end in map(str.split, seen)]
                self.spans.sort()
                self.stolen_s = stolen_s() - stolen

    def longest_s(self) -> float:
        """Return the longest stall."""
        return max((end - start for start, end in self.spans), default=0.0)

    def within_s(self, start: float, end: float) -> float:
        """Return how long some processor was stalled between two times."""
        total, covered = 0.0, start
        for a, b in self.spans:
            a, b = max(a, covered), min(b, end)
            if b > a:
                total, covered = total + b - a, b
        return total


def start_sleeper(processor: int, out: TextIO) -> subprocess.Popen[str]:
    """Start the sleeper of a processor, and return when it is ready."""
    command = [sys.executable, __file__, str(processor)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.readline().strip()
    if said != READY:
        process.communicate(timeout=END_LIMIT_S)
        sys.exit(f"torture: no measurement of the machine's stalls: {said}")
    return process


def stolen_s() -> float:
    """Return the seconds of processors that the host has taken since the machine started."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sleep_and_record(int(sys.argv[1]))
