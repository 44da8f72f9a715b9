"""vLLM's host region: rows of equal size, one for each chunk."""

from __future__ import annotations

import ctypes
import os

from kvagent.messages import Region, RegionKind
from kvagent.vllm.worker.memory import allow_ptrace

REGION = 1  # region 0 holds the words


class Rows:
    """The rows. ``close`` drops the descriptor; nothing else refers to vLLM's memory."""

    def __init__(self, view: memoryview, fd: int | None) -> None:
        """``view`` has one row for each chunk. ``fd``: the file that it maps from its begin, or
        None.
        """
        if view.strides is None or view.ndim != 2 or not view.c_contiguous:
            raise ValueError(f"primary_kv_view: {view.ndim} dimensions, allowed is a contiguous view of 2")
        self.count, self.bytes = view.shape[0] if view.shape else 0, view.strides[0]
        self.size = self.count * self.bytes
        flat = view.cast("B") if view.format == "B" else view.cast("B", (self.size,))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(flat)) if self.size else 0
        flat.release()
        whole = fd is not None and os.fstat(fd).st_size >= self.size
        self._fd = os.dup(fd) if whole and fd is not None else None

    def region(self) -> tuple[Region, int | None]:
        """Return the region for REGISTER with its descriptor."""
        if self._fd is None:
            allow_ptrace()
            return Region(REGION, RegionKind.PEER, self.size, addr=self._address), None
        return Region(REGION, RegionKind.FD, self.size), self._fd

    def address(self, row: int) -> int:
        """Return where a row begins. IndexError if there is no such row."""
        if not 0 <= row < self.count:
            raise IndexError(f"row {row}, allowed is 0 to {self.count - 1}")
        return self._address + row * self.bytes

    def close(self) -> None:
        """Close the descriptor. Repeated calls do nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
