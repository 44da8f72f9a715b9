"""A worker's words, and the clock that writes them: the host's, or a GPU's compute stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.cuda import clock as cuda
from kvagent.shm import SyncWords
from kvagent.vllm.scheduler.saves import REVOKES
from kvagent.vllm.worker.clock import EVENTS, HostClock

if TYPE_CHECKING:
    from kvagent.vllm.worker.clock import Clock


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
