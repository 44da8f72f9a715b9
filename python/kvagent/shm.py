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

from kvagent.messages import Region, RegionKind, Sync

_CACHE_LINE = 64  # bytes; the kinds of words have different writers and separate cache lines

# From linux/fcntl.h; Python's fcntl lacks these names with some C libraries.
_F_ADD_SEALS = 1033
_F_SEAL_SHRINK = 2
_F_SEAL_GROW = 4


class SharedMemory:
    """Zeroed anonymous memory with a descriptor, mapped here, its size sealed."""

    def __init__(self, size: int, name: str = "kvagent") -> None:
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
    """The words of one worker: its step, cells of events, revocations and stages of loads."""

    def __init__(self, revokes: int, *, events: int = 0, cell: int = 16, stages: int = 0) -> None:
        """``cell``: bytes per event; a GPU's holds the handle of a CUDA event."""
        self.events, self.revokes, self.cell = events, revokes, cell
        self.events_off = _CACHE_LINE
        self.revoke_off = _aligned(self.events_off + events * cell)
        self.stages_off = _aligned(self.revoke_off + revokes * 4)
        self.memory = SharedMemory(_aligned(self.stages_off + stages * 8), "kvagent-sync")
        self._long = self.memory.view.cast("Q")
        self.revocations = self.memory.view[self.revoke_off : self.revoke_off + revokes * 4].cast("I")
        """A word for each save in flight, not 0 if it is revoked."""
        self.landed = self._long[self.stages_off // 8 : self.stages_off // 8 + stages]
        """How many stages of each staged load have arrived; the agent writes them."""

    def sync(self, region: int) -> Sync:
        """Return the placement of the words for REGISTER, in the region of this number."""
        return Sync(region, 0, self.events_off, self.events, self.revoke_off, self.revokes)

    @property
    def step(self) -> int:
        """The last step whose kernels have ended."""
        return self._long[0]

    @step.setter
    def step(self, value: int) -> None:
        self._long[0] = value

    def put_handle(self, event: int, handle: bytes) -> None:
        """Write the handle of a CUDA event into its cell, which has the same size."""
        start = self.events_off + event * self.cell
        self.memory.view[start : start + self.cell] = handle

    def revoke(self, index: int) -> None:
        """Revoke the save that names this word: it is not committed from now on."""
        self.revocations[index] = 1

    def clear_revoke(self, index: int) -> None:
        """Free the word for another save, after the job that named it was reported."""
        self.revocations[index] = 0

    def close(self) -> None:
        """Free the memory. Repeated calls do nothing."""
        for view in (self.landed, self.revocations, self._long):
            view.release()
        self.memory.close()


def _aligned(offset: int) -> int:
    return -(-offset // _CACHE_LINE) * _CACHE_LINE
