"""A worker's words, and the clock that writes them: the host's, or a GPU's compute stream.

Tells the agent how far a worker's kernels are: the step word, and an event for each of the last steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kvagent.cuda import clock as cuda
from kvagent.shm import SyncWords
from kvagent.vllm.plan import REVOKES

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


@dataclass(slots=True)
class Sync:
    """Both. ``close`` frees the words once nothing writes to them."""

    words: SyncWords
    clock: Clock

    def close(self) -> None:
        """See the class."""
        self.clock.close()
        self.words.close()


def make_sync(device: Any, gpu: cuda.Gpu | None = None) -> Sync:
    """For KV caches on that device: None for the host's memory. ``gpu`` stands in for torch's."""
    if device is None:
        words = SyncWords(EVENTS, REVOKES)
        return Sync(words, HostClock(words))
    if gpu is None:
        from kvagent.cuda.torchgpu import TorchGpu

        gpu = TorchGpu(device)
    words = SyncWords(cuda.EVENTS, REVOKES, cuda.IPC_HANDLE)
    try:
        return Sync(words, cuda.CudaClock(words, gpu))
    except BaseException:
        words.close()
        raise
