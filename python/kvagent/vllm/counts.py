"""What the scheduler's side counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Look-ups and loads."""

    lookups: int = 0
    lookups_unanswered: int = 0
    lookups_pending: int = 0
    """For which lower tiers took longer than they were waited for."""
    loads: int = 0
    loads_failed: int = 0
    loads_late: int = 0
    tokens_promised: int = 0
    tokens_loaded: int = 0
    media_bypassed: int = 0
    """Requests with images, audio or video that were neither saved nor loaded, from some time on at least (media)."""
