"""Tells the agent how far a worker's kernels are: the step word, and an event for each of the last steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvagent.shm import SyncWords

EVENTS = 1024  # cells of a worker on a CPU; a step's is used again after that many steps


class Clock(Protocol):
    """A step's begin and end. ``event`` is the number of the event that tells its end."""

    def begin(self, step: int) -> None:
        """The step's kernels are about to be launched."""

    def end(self, step: int) -> None:
        """All kernels of the step are launched."""

    def event(self, step: int) -> int:
        """The event that fires when they have ended."""

    def close(self) -> None:
        """Nothing is told any more."""


class HostClock:
    """A CPU's: the kernels have ended when the forward pass returns."""

    def __init__(self, words: SyncWords) -> None:
        self._words = words
        self._cells = words.cells

    def begin(self, step: int) -> None:
        """The step's kernels are about to be launched."""
        self._cells[2 * (step % self._words.events)] += 1

    def end(self, step: int) -> None:
        """All kernels of the step have ended."""
        self._words.step = step
        recorded = 2 * (step % self._words.events)
        self._cells[recorded + 1] = self._cells[recorded]

    def event(self, step: int) -> int:
        """The event that fires when they have ended."""
        return step % self._words.events

    def close(self) -> None:
        """Nothing is told any more."""
