"""Memory between the agent and vLLM's region, into which the agent loads.

A frozen agent may wake at any time and write on. If it wrote into vLLM's rows, a row could not be
given back without the agent's word, and requests would wait for it. So it never sees them for
writing: it writes into slots of this memory, and what it reports as verified is copied on by the
engine's own process. Slots of loads that were given up stay out of use until the agent reports
them, or until its session has ended; each session has a staging memory of its own.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kvagent.shm import SharedMemory, SyncWords
from kvagent.vllm.tier.rows import REGION

if TYPE_CHECKING:
    from kvagent.messages import Region

STEP = 1  # the step that every job names; the step word has it from the begin


class Words:
    """The words of a session: its step has been reached, and saves may be revoked."""

    def __init__(self, revokes: int) -> None:
        self.sync = SyncWords(events=1, revokes=revokes)
        self.sync.step = STEP
        self.region = self.sync.memory.region(0), self.sync.memory.fd

    def close(self) -> None:
        """Free the words in this process."""
        self.sync.close()


class Staging:
    """Slots of ``row_bytes`` each, all free. ``close`` frees the memory in this process."""

    def __init__(self, slots: int, row_bytes: int) -> None:
        self.words = Words(revokes=1)
        self.slots = slots
        self._memory = SharedMemory(slots * row_bytes, "kvagent-staging")
        self._row_bytes = row_bytes
        anchor = ctypes.c_char.from_buffer(self._memory.view)
        self._address = ctypes.addressof(anchor)
        del anchor
        self._free = list(range(slots))

    @property
    def region(self) -> tuple[Region, int]:
        """Return the region for REGISTER with its descriptor."""
        return self._memory.region(REGION), self._memory.fd

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take free slots; at least ``count`` are free."""
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def give(self, slots: list[int]) -> None:
        """Give slots back, to which the agent does not write any more."""
        self._free += slots

    def copy(self, slot: int, address: int) -> None:
        """Copy a slot to an address. Other threads run meanwhile."""
        ctypes.memmove(address, self._address + slot * self._row_bytes, self._row_bytes)

    def close(self) -> None:
        """Unmap the memory; the agent's mapping is unaffected."""
        self.words.close()
        self._memory.close()
