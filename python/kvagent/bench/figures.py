"""Statistics of the times of many steps."""

from __future__ import annotations

import time


class Times:
    """Seconds of one part of each step: wall time, and this thread's own CPU time."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.own: list[float] = []
        self._wall = self._own = 0.0
        self._sum_wall = self._sum_own = 0.0

    def begin(self) -> None:
        """Start the clocks."""
        self._own, self._wall = time.thread_time(), time.perf_counter()

    def end(self) -> None:
        """Stop the clocks; a step may have several intervals."""
        self._sum_wall += time.perf_counter() - self._wall
        self._sum_own += time.thread_time() - self._own

    def step(self) -> None:
        """Finish the step."""
        self.wall.append(self._sum_wall)
        self.own.append(self._sum_own)
        self._sum_wall = self._sum_own = 0.0

    def skip(self) -> None:
        """Drop the measurements of the warm-up."""
        self.wall.clear()
        self.own.clear()

    def figures(self) -> list[str]:
        """Return microseconds: p50 of CPU time, p50 and p99 of wall time."""
        return [
            f"{percentile(self.own, 50):.0f}",
            f"{percentile(self.wall, 50):.0f}",
            f"{percentile(self.wall, 99):.0f}",
        ]


def percentile(seconds: list[float], percent: int) -> float:
    """Return a percentile in microseconds."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] * 1e6


def mean(seconds: list[float]) -> float:
    """Return the mean in microseconds."""
    return sum(seconds) / len(seconds) * 1e6
