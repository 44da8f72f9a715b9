"""Shared memory that the agent maps, and the words that show it an engine's progress
(docs/PROTOCOL.md, section 3).

The words are native unsigned integers of little-endian machines. Each store is one machine word. On
x86-64, stores become visible in program order, on which the agent relies; on other architectures
the engine's device writes the step word and the events, as CUDA engines do.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys

from kvagent.messages import Region, RegionKind, Sync

EVENT_CELL = 16  # bytes: u64 recorded, u64 fired
_CACHE_LINE = 64  # bytes; the kinds of words have different writers and separate cache lines

# From linux/fcntl.h; Python's fcntl lacks these names with some C libraries.
_F_ADD_SEALS = 1033
_F_SEAL_SHRINK = 2
_F_SEAL_GROW = 4


class SharedMemory:
    """Zeroed anonymous memory with a descriptor, mapped here, its size sealed."""

    def __init__(self, size: int, name: str = "kvagent") -> None:
        if size <= 0:
            raise ValueError(f"size: {size} bytes, at least 1")
        self.size = size
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            # The agent reads it with plain loads: if the file shrank meanwhile, that would kill the
            # agent.
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, size)
        except OSError:
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)

    def region(self, number: int) -> Region:
        """Return the region for REGISTER; ``fd`` accompanies it."""
        return Region(id=number, kind=RegionKind.FD, size=self.size)

    def close(self) -> None:
        """Free the memory; the agent's mapping is unaffected. Repeated calls do nothing."""
        if self.fd < 0:
            return
        self.view.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1


class SyncWords:
    """The words of one worker in their own shared memory: its step, its events, its revocations and
    the stages of its loads.
    """

    def __init__(self, events: int, revokes: int, cell: int = EVENT_CELL, *, stages: int = 0) -> None:
        """``cell``: bytes per event cell; a GPU's cell holds the handle of a CUDA event.
        ``stages``: the words of staged loads.
        """
        if sys.byteorder != "little":
            raise OSError("the words are little-endian, this machine is not")
        self.events_off = _CACHE_LINE
        self.revoke_off = _aligned(self.events_off + events * cell)
        self._cell_bytes = cell
        self.stages_off = _aligned(self.revoke_off + revokes * 4)
        self.memory = SharedMemory(_aligned(self.stages_off + stages * 8), "kvagent-sync")
        self.events = events
        self.revokes = revokes
        self._long = self.memory.view.cast("Q")
        self._word = self.memory.view.cast("I")
        self.landed = self._long[self.stages_off // 8 : self.stages_off // 8 + stages]
        """How many stages of each staged load have arrived; the agent writes them."""

    def sync(self, region: int) -> Sync:
        """Return the placement of the words for REGISTER; ``region`` is the region number of
        ``memory``.
        """
        return Sync(region, 0, self.events_off, self.events, self.revoke_off, self.revokes)

    @property
    def step(self) -> int:
        """The last step whose kernels have ended."""
        return self._long[0]

    @step.setter
    def step(self, value: int) -> None:
        if value < self._long[0]:
            raise ValueError(f"step: {value} is before {self._long[0]}: steps only grow")
        self._long[0] = value

    def put_handle(self, event: int, handle: bytes) -> None:
        """Write the handle of a CUDA event into its cell, which has the same size."""
        if len(handle) != self._cell_bytes or self._cell_bytes == EVENT_CELL:
            raise ValueError(f"handle of {len(handle)} bytes in a cell of {self._cell_bytes}")
        start = self._cell(event) * 8
        self.memory.view[start : start + len(handle)] = handle

    def record(self, event: int) -> int:
        """Record an event again: it has not fired until ``fire`` reaches it. Return the record's
        number.
        """
        cell = self._cell(event)
        self._long[cell] += 1
        return self._long[cell]

    def fire(self, event: int, number: int | None = None) -> None:
        """Fire an event up to the given record, or the last one."""
        cell = self._cell(event)
        self._long[cell + 1] = max(self._long[cell + 1], self._long[cell] if number is None else number)

    def revoke(self, index: int) -> None:
        """Revoke the save that names this word: it is not committed from now on."""
        self._word[self._revoke_word(index)] = 1

    def clear_revoke(self, index: int) -> None:
        """Free the word for another save, after the job that named it was reported."""
        self._word[self._revoke_word(index)] = 0

    def revoked(self, index: int) -> bool:
        """Return whether the word is set."""
        return self._word[self._revoke_word(index)] != 0

    def close(self) -> None:
        """Free the memory. Repeated calls do nothing."""
        self.landed.release()
        self._long.release()
        self._word.release()
        self.memory.close()

    def _cell(self, event: int) -> int:
        if not 0 <= event < self.events:
            raise IndexError(f"event: {event}, allowed is 0 to {self.events - 1}")
        return (self.events_off + event * self._cell_bytes) // 8

    def _revoke_word(self, index: int) -> int:
        if not 0 <= index < self.revokes:
            raise IndexError(f"revocation word: {index}, allowed is 0 to {self.revokes - 1}")
        return self.revoke_off // 4 + index


def _aligned(offset: int) -> int:
    return -(-offset // _CACHE_LINE) * _CACHE_LINE
