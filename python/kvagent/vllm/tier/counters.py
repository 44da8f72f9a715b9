"""What the tier counts, in chunks unless it says blocks."""

from __future__ import annotations

from dataclasses import dataclass, fields

PREFIX = "vllm:kvagent_tier_"
CONNECTED = "connected", "Whether the tier has an agent that answers."
HELP = {
    "errors": "Errors of the tier's own in vLLM's calls.",
    "lookups": "Chunks that were asked for.",
    "hits": "Chunks that were stored.",
    "unanswered": "Chunks for which the agent's answer did not come in time.",
    "loaded": "Chunks that arrived and verified.",
    "loads_failed": "Chunks that did not arrive, or did not verify.",
    "stored": "Chunks that the agent stored, or had already.",
    "stores_failed": "Chunks that the agent did not store.",
    "events_stored": "Blocks of vLLM of which KV events said that the agent holds them.",
    "events_removed": "Blocks of vLLM of which KV events said that the agent no longer holds them.",
    "events_unsaid": "Chunks whose tokens the agent was not told, because it did not read for too long.",
}


@dataclass(slots=True)
class TierCounts:
    """The counters."""

    errors: int = 0
    lookups: int = 0
    hits: int = 0
    unanswered: int = 0
    loaded: int = 0
    loads_failed: int = 0
    stored: int = 0
    stores_failed: int = 0
    events_stored: int = 0
    events_removed: int = 0
    events_unsaid: int = 0

    def since(self, last: TierCounts) -> dict[str, int]:
        """Return what has grown since the last call with the same ``last``, which is updated."""
        grown = {}
        for one in fields(self):
            now, before = getattr(self, one.name), getattr(last, one.name)
            if now != before:
                grown[one.name] = now - before
                setattr(last, one.name, now)
        return grown
