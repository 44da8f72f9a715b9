"""Times of many steps as what is printed of them."""

from __future__ import annotations

import time


class Times:
    """Seconds of one part of each step: by the clock, and of this thread's own work, whatever else the machine does."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.own: list[float] = []
        self._wall = self._own = 0.0
        self._sum_wall = self._sum_own = 0.0

    def begin(self) -> None:
        """A stretch of it begins."""
        self._own, self._wall = time.thread_time(), time.perf_counter()

    def end(self) -> None:
        """The stretch ends; a step may have several."""
        self._sum_wall += time.perf_counter() - self._wall
        self._sum_own += time.thread_time() - self._own

    def step(self) -> None:
        """The step ends."""
        self.wall.append(self._sum_wall)
        self.own.append(self._sum_own)
        self._sum_wall = self._sum_own = 0.0

    def skip(self) -> None:
        """Drops what was measured: it was to warm up."""
        self.wall.clear()
        self.own.clear()

    def figures(self) -> list[str]:
        """Microseconds: p50 of the thread's own time, p50 and p99 by the clock."""
        return [
            f"{percentile(self.own, 50):.0f}",
            f"{percentile(self.wall, 50):.0f}",
            f"{percentile(self.wall, 99):.0f}",
        ]


def percentile(seconds: list[float], percent: int) -> float:
    """In microseconds."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] * 1e6


def mean(seconds: list[float]) -> float:
    """In microseconds."""
    return sum(seconds) / len(seconds) * 1e6
