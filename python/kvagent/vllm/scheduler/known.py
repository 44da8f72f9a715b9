"""Blocks of one group that need not be offered to the agent.

They were offered lately, and it did not say that it lacks them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

RECENT_S = 10.0  # for that long at least, and twice at most, a block is not offered again
MAX_RECENT = 32768  # blocks remembered so, of each of two ages


class Known:
    """Keys of one group, in two sets by age, of which the older is dropped whole."""

    def __init__(self) -> None:
        self.young: set[bytes] = set()
        self.old: set[bytes] = set()
        self._turn = 0.0

    def none(self, keys: Collection[bytes]) -> bool:
        """Whether all of them are to be offered."""
        return self.young.isdisjoint(keys) and self.old.isdisjoint(keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self.young or key in self.old

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """The agent does not have them."""
        self.young.difference_update(keys)
        self.old.difference_update(keys)

    def age(self, now: float) -> None:
        """Called in every step."""
        if now >= self._turn or len(self.young) > MAX_RECENT:
            self.old, self.young = self.young, set()
            self._turn = now + RECENT_S

    def forget(self) -> None:
        """The agent has nothing any more."""
        self.young.clear()
        self.old.clear()
