"""The torch calls that a GPU's clock needs.

Imported only by a worker whose KV cache is on a GPU.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from kvagent.cuda.driver import CudaError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.shm import SyncWords


class TorchGpu:
    """One GPU. ``close`` waits for writes in flight, so that nothing writes to freed memory."""

    def __init__(self, device: Any) -> None:
        self._device = torch.device(device)
        self._registered = 0

    def event(self) -> Any:
        """Return a new event."""
        with torch.cuda.device(self._device):
            return torch.cuda.Event(interprocess=True)

    def word(self, words: SyncWords) -> Callable[[int], None]:
        """Map the words for the GPU.

        Return a function that writes the step word on the current stream.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(words.memory.view))
        with torch.cuda.device(self._device):
            result = torch.cuda.cudart().cudaHostRegister(address, words.memory.size, 0)
        if int(result):
            raise CudaError(
                f"cudaHostRegister of {words.memory.size} bytes: error {int(result)}; the step word cannot be written "
                "by the GPU (ulimit -l may be too low)"
            )
        self._registered = address
        on_gpu = torch.zeros(1, dtype=torch.int64, device=self._device)
        in_words = torch.frombuffer(words.memory.view, dtype=torch.int64, count=1)

        def write(step: int) -> None:
            on_gpu.fill_(step)
            in_words.copy_(on_gpu, non_blocking=True)

        return write

    def close(self) -> None:
        """Unmap the words after all writes have ended."""
        if self._registered:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = 0
