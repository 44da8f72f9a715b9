"""What the connector counts, under which names the counters are exported, and their growth between
two reports.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any


@dataclass(slots=True)
class Counts:
    """Look-ups and loads."""

    lookups: int = 0
    lookups_unanswered: int = 0
    lookups_late: int = 0
    """Answers that came after their look-up was given up."""
    lookups_pending: int = 0
    """Look-ups whose lower tiers took longer than the wait."""
    loads: int = 0
    loads_failed: int = 0
    loads_late: int = 0
    loads_sync: int = 0
    loads_sync_failed: int = 0
    tokens_promised: int = 0
    tokens_loaded: int = 0
    transfers_offered: int = 0
    transfers_wanted: int = 0
    transfers_overdue: int = 0
    media_bypassed: int = 0
    """Requests with images, audio or video that were neither saved nor loaded, or no longer from
    some point on (media).
    """
    adapters_unknown: int = 0
    """Requests with a LoRA adapter whose content was not known when they arrived (adapters)."""
    requests_unsaved: int = 0
    """Requests that their own switches kept from being saved, and so on (switches)."""
    requests_unloaded: int = 0
    requests_limited: int = 0
    requests_pinned: int = 0
    requests_brief: int = 0
    keeps_lost: int = 0
    """Requests whose blocks the agent was not told to keep or to drop."""
    switches_ignored: int = 0
    events_stored: int = 0
    """Blocks of which KV events said that the agent holds them, or that it no longer does."""
    events_removed: int = 0
    events_unsaid: int = 0
    """Blocks whose tokens the agent was not told, because it did not read for too long."""


@dataclass(slots=True)
class SaveCounts:
    """Outcomes of saves, in blocks."""

    planned: int = 0
    stored: int = 0
    existed: int = 0
    refused: int = 0
    revoked: int = 0
    missed: int = 0
    """Blocks that vLLM evicted before they were offered: with lazy offload, or of ended requests
    that waited for their turn.
    """


@dataclass(slots=True)
class WorkerCounts:
    """Blocks moved by one worker, and loads that did not arrive as promised."""

    saved: int = 0
    loaded: int = 0
    loads_failed: int = 0
    loads_late: int = 0


GAUGES = {
    "uncached": "1 if the engine cannot be served and runs without the agent; its log says why.",
}

HELP = {
    "errors": "Errors in the connector's scheduler part; the requests went on uncached.",
    "lookups": "Look-ups that reserve.",
    "lookups_unanswered": "Look-ups that the agent did not answer in time.",
    "lookups_late": "Answers that came after their look-up was given up.",
    "lookups_pending": "Look-ups whose lower tiers took longer than the wait for them.",
    "loads": "Loads begun.",
    "loads_failed": "Loads with missing blocks.",
    "loads_late": "Loads given up at their deadline.",
    "loads_sync": "Loads that a step waited for.",
    "loads_sync_failed": "Loads that a step waited for in vain: their requests were preempted.",
    "tokens_promised": "Prompt tokens that were promised to be loaded.",
    "tokens_loaded": "Prompt tokens that were loaded.",
    "transfers_offered": "Prompts computed for a decode engine.",
    "transfers_wanted": "Requests whose prompt a prefill engine computes.",
    "transfers_overdue": "Requests whose prompt was not complete when remote_wait_ms had passed.",
    "media_bypassed": "Requests with images, audio or video that were neither saved nor loaded.",
    "adapters_unknown": "Requests with a LoRA adapter whose content was not known when they arrived.",
    "requests_unsaved": "Requests that asked not to be saved.",
    "requests_unloaded": "Requests that asked not to be loaded.",
    "requests_limited": "Requests that limited how many tokens are loaded.",
    "requests_pinned": "Requests that asked for their blocks to be kept for a time.",
    "requests_brief": "Requests that asked for their blocks to be dropped after a time.",
    "keeps_lost": "Requests that the agent could not be told of, so that their blocks are not kept or dropped.",
    "switches_ignored": "Switches of requests that were ignored: unknown, out of range, or against a transfer.",
    "events_stored": "Blocks that KV events told to be in the agent's memory.",
    "events_removed": "Blocks that KV events told to be there no longer.",
    "events_unsaid": "Blocks that KV events cannot tell of, because the agent did not take their tokens.",
    "saves_planned": "Blocks offered to the agent.",
    "saves_stored": "Blocks that the agent stored.",
    "saves_existed": "Blocks that the agent already had.",
    "saves_refused": "Blocks that the agent did not store.",
    "saves_revoked": "Blocks whose save was revoked: for lack of free blocks, or because it took too long.",
    "saves_missed": "Blocks that were not offered: evicted before, or too many to be pinned when their request ended.",
    "worker_errors": "Errors in the connector's worker parts; the loads in flight failed.",
    "worker_saved": "Blocks stored, counted by every rank.",
    "worker_loaded": "Blocks loaded, counted by every rank.",
    "worker_loads_failed": "Failed loads, counted by every rank.",
    "worker_loads_late": "Late loads, counted by every rank.",
}


class CounterDeltas:
    """The growth of the counters of a dataclass. ``prefix`` is prepended to their names."""

    def __init__(self, counts: Any, prefix: str = "") -> None:
        self._counts = counts
        names = [field.name for field in fields(counts)]
        self._names = [prefix + name for name in names]
        one = attrgetter(names[0])
        self._values = attrgetter(*names) if len(names) > 1 else lambda counts: (one(counts),)
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
