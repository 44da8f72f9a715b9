"""vLLM's host region, which has rows of equal size, one for each chunk, and the memory that a
session with the agent has beside it.

A frozen agent may wake at any time and write on. If it wrote into vLLM's rows, a row could not be
given back without the agent's word, and requests would wait for it. So it never sees them for
writing: it writes into slots of a staging memory, and what it reports as verified is copied on by
the engine's own process. Slots of loads that were given up stay out of use until the agent reports
them, or until its session has ended; each session has a memory of its own.
"""

from __future__ import annotations

import ctypes
import os

from kvagent.messages import Region, RegionKind
from kvagent.shm import SharedMemory, SyncWords

REGION = 1  # region 0 holds the words
STEP = 1  # the step that every job names; the step word has it from the begin
_PR_SET_PTRACER = 0x59616D61  # from linux/prctl.h
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class SessionMemory:
    """The words of a session, whose step has been reached, and the slots of its staging memory, if
    it has some. ``close`` frees both in this process; words that are set stay so for the agent.
    """

    def __init__(self, *, revokes: int = 1, slots: int = 0, row_bytes: int = 0) -> None:
        self.words = SyncWords(revokes)
        self.words.step = STEP
        self.free = list(range(slots or revokes))
        """The slots that are free, or else the revocation words."""
        self.staging = SharedMemory(slots * row_bytes, "kvagent-staging") if slots else None
        self._row_bytes = row_bytes
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.staging.view)) if self.staging else 0

    def copy(self, slot: int, address: int) -> None:
        """Copy a slot to an address. Other threads run meanwhile."""
        ctypes.memmove(address, self._address + slot * self._row_bytes, self._row_bytes)

    def close(self) -> None:
        """Unmap the memory; the agent's mapping is unaffected."""
        self.words.close()
        if self.staging is not None:
            self.staging.close()


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
            # The agent's process is not known yet, so any one may access this one's memory.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
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
