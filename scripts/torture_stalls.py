"""When the machine stood still: what a look-up that was late is held against.

A virtual machine's processors are taken away from it by its host, for hundreds of milliseconds where that has too few.
Nothing that runs then can answer, whatever its priority, so two things are looked at: on each processor a thread of the
highest priority that sleeps for a millisecond and notes when it woke late, and what the kernel was told of (steal).

Run as a program, it is such a witness: torture_stalls.py PROCESSOR, a line for each stall, its start and end in seconds
of Unix time, until its input ends.
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
STALL_S = 0.002  # later than that is a stall: a timer of Linux is late by 0.06 ms
PRIORITY = 50  # of SCHED_FIFO: before all that is not of the kernel
END_LIMIT_S = 10
READY = "watching"


def witness(processor: int) -> None:
    """Prints the stalls of a processor until standard input ends."""
    os.sched_setaffinity(0, {processor})
    with contextlib.suppress(
        PermissionError
    ):  # else it sees what a thread of the agent sees: what computes counts, too
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    print(READY, file=sys.stderr, flush=True)
    while True:
        before = time.monotonic()
        ended = select.select([sys.stdin], [], [], WAIT_S)[0]
        took = time.monotonic() - before
        if took > WAIT_S + STALL_S:  # also the one in which the end came
            now = time.time()
            print(f"{now - took:.6f} {now:.6f}")
        if ended:
            return


class Stalls:
    """Watches all processors while it is entered; afterwards it knows their stalls."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        self.stolen_s = 0.0  # of all processors, as the kernel counts it
        self.witnesses: list[int] = []  # their process numbers

    @contextlib.contextmanager
    def watching(self) -> Iterator[Stalls]:
        """Starts the witnesses, and reads what they saw at the end."""
        stolen = stolen_s()
        running: list[tuple[subprocess.Popen[str], TextIO]] = []
        with contextlib.ExitStack() as files:
            try:
                for processor in sorted(os.sched_getaffinity(0)):
                    out = files.enter_context(tempfile.TemporaryFile("w+"))
                    running.append((start_witness(processor, out), out))
                self.witnesses = [process.pid for process, _ in running]
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
        """The longest stall."""
        return max((end - start for start, end in self.spans), default=0.0)

    def within_s(self, start: float, end: float) -> float:
        """For how long of a stretch of time some processor stood still."""
        total, covered = 0.0, start
        for a, b in self.spans:
            a, b = max(a, covered), min(b, end)
            if b > a:
                total, covered = total + b - a, b
        return total


def start_witness(processor: int, out: TextIO) -> subprocess.Popen[str]:
    """Starts the witness of a processor, and returns when it watches."""
    command = [sys.executable, __file__, str(processor)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.readline().strip()
    if said != READY:
        process.communicate(timeout=END_LIMIT_S)
        sys.exit(f"torture: no witness of the machine's stalls: {said}")
    return process


def stolen_s() -> float:
    """Seconds of processors that the host has taken since the machine started."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    witness(int(sys.argv[1]))
