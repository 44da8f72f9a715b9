"""The counters of the scheduler's side, and the deltas of counters between two reports."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any


@dataclass(slots=True)
class Counts:
    """Look-ups and loads."""

    lookups: int = 0
    lookups_unanswered: int = 0
    lookups_pending: int = 0
    """Look-ups whose lower tiers took longer than the wait."""
    loads: int = 0
    loads_failed: int = 0
    loads_late: int = 0
    tokens_promised: int = 0
    tokens_loaded: int = 0
    media_bypassed: int = 0
    """Requests with images, audio or video that were neither saved nor loaded, or no longer from
    some point on (media).
    """


class CounterDeltas:
    """The growth of the counters of a dataclass. ``prefix`` is prepended to their names."""

    def __init__(self, counts: Any, prefix: str = "") -> None:
        self._counts = counts
        names = [field.name for field in fields(counts)]
        self._names = [prefix + name for name in names]
        self._values = attrgetter(*names)
        self._last: tuple[int, ...] = (0,) * len(names)

    def take(self) -> dict[str, int]:
        """Return by name what grew since the last call.

        Called in every step, and cheap if nothing did.
        """
        now, before = self._values(self._counts), self._last
        if now == before:
            return {}
        self._last = now
        return {name: b - a for name, a, b in zip(self._names, before, now, strict=True) if b != a}
