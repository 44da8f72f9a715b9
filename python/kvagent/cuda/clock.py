"""A GPU's clock: the compute stream itself signals its progress to the agent.

After a step's kernels, the stream records the step's event, then writes the step's number into host
memory that the agent maps. Nothing waits. When the agent reads the number, the event was recorded
and has fired.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvagent.cuda.driver import IPC_HANDLE

if TYPE_CHECKING:
    from kvagent.cuda.torchgpu import TorchGpu
    from kvagent.shm import SyncWords

EVENTS = 256  # of a worker; an event is reused after that many steps


class CudaClock:
    """The clock of one GPU. ``words`` have cells of IPC_HANDLE bytes."""

    def __init__(self, words: SyncWords, gpu: TorchGpu) -> None:
        self._gpu = gpu
        self._events = [gpu.event() for _ in range(words.events)]
        for i, event in enumerate(self._events):
            words.put_handle(i, bytes(event.ipc_handle()))
        self._write = gpu.word(words)

    def begin(self, step: int) -> None:
        """Do nothing before the step's kernels are launched."""

    def end(self, step: int) -> None:
        """Record the step's event and write its number, after all kernels are launched."""
        self._events[self.event(step)].record()
        self._write(step)

    def event(self, step: int) -> int:
        """Return the event that fires when the step's kernels have ended."""
        return step % len(self._events)

    def close(self) -> None:
        """Stop signalling."""
        self._write = _nothing  # the words are about to be freed
        self._gpu.close()


def _nothing(step: int) -> None:
    """Do nothing: the words are gone."""


__all__ = ["EVENTS", "IPC_HANDLE", "CudaClock"]
