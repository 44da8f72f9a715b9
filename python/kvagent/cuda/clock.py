"""A GPU's clock: the compute stream itself tells the agent how far it is.

Behind a step's kernels the stream records the step's event, then writes the step's number into host memory that the
agent maps. Nothing waits. When the agent sees the number, the event was recorded and has fired.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvagent.cuda.driver import IPC_HANDLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.shm import SyncWords

EVENTS = 256  # of a worker; a step's is recorded again after that many steps


class Event(Protocol):
    """A CUDA event that other processes can open; torch.cuda.Event(interprocess=True) is one."""

    def ipc_handle(self) -> bytes:
        """Its handle."""

    def record(self) -> None:
        """Records it on the current stream."""


class Gpu(Protocol):
    """What the clock needs of torch (torchgpu), or what a test puts in its place."""

    def event(self) -> Event:
        """A new event."""

    def word(self, words: SyncWords) -> Callable[[int], None]:
        """Makes the words' memory writable for the GPU; gives what writes the step word on the current stream."""

    def close(self) -> None:
        """Ends that, behind all that was written."""


class CudaClock:
    """See the module. ``words`` have cells of IPC_HANDLE bytes."""

    def __init__(self, words: SyncWords, gpu: Gpu) -> None:
        self._gpu = gpu
        self._events = [gpu.event() for _ in range(words.events)]
        for i, event in enumerate(self._events):
            words.put_handle(i, bytes(event.ipc_handle()))
        self._write = gpu.word(words)

    def begin(self, step: int) -> None:
        """The step's kernels are about to be launched."""

    def end(self, step: int) -> None:
        """All kernels of the step are launched."""
        self._events[self.event(step)].record()
        self._write(step)

    def event(self, step: int) -> int:
        """The event that fires when they have ended."""
        return step % len(self._events)

    def close(self) -> None:
        """Nothing is told any more."""
        self._write = _nothing  # the words' memory goes
        self._gpu.close()


def _nothing(step: int) -> None:
    """There are no words any more."""


__all__ = ["EVENTS", "IPC_HANDLE", "CudaClock", "Event", "Gpu"]
