"""Requests of which old weights computed some KV: what they fill after a reset is old as well, whatever hash it gets.

At the reset vLLM has hashes of full blocks only; a block that was partly filled, or that a load had yet to bring, gets
its hash later, and then other requests find it in the engine's own cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.vllm.scheduler.blocks import Blocks, Tables
    from kvagent.vllm.scheduler.requests import Tracked

_ALL = 1 << 62  # blocks


class Mixed:
    """See the module. Blocks are entered before somebody can be let in on them, and before they are freed."""

    def __init__(self, blocks: Blocks, tables: Tables, groups: int) -> None:
        self._blocks = blocks
        self._tables = tables
        self._groups = groups
        self._next: dict[Tracked, list[int]] = {}  # by group: the first block that is not entered

    def add(self, tracked: Tracked) -> None:
        """All its blocks are old, or will be."""
        tracked.mixed = True
        self._next[tracked] = [0] * self._groups

    def look(self, tracked: Tracked, tables: Sequence[Sequence[object]]) -> None:
        """Whether a request that is let in with those blocks found old ones: it is old from the first of them on."""
        self.enter()
        if not self._blocks.aged or tracked in self._next:
            return
        firsts = [next((i for i, one in enumerate(table) if self._blocks.old(one)), -1) for table in tables]
        if any(first >= 0 for first in firsts):
            tracked.mixed = True
            self._next[tracked] = [max(first, 0) for first in firsts]

    def enter(self) -> None:
        """Takes what vLLM has given a hash by now for old."""
        for tracked, firsts in self._next.items():
            for group, first in enumerate(firsts):
                for block in self._tables.slice(tracked.request.request_id, group, first, _ALL):
                    if block.block_hash is not None:
                        self._blocks.enter(block)
                    elif not block.is_null:
                        break
                    firsts[group] += 1

    def remove(self, tracked: Tracked) -> None:
        """Its blocks are taken from it."""
        self._next.pop(tracked, None)

    def clear(self) -> None:
        """Forgets all of them."""
        self._next.clear()
