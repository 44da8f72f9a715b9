"""What the tier counts, in chunks unless it says blocks."""

from __future__ import annotations

from dataclasses import dataclass

from kvagent.vllm.counters import count, texts

PREFIX = "vllm:kvagent_tier_"
CONNECTED = "connected", "Whether the tier has an agent that answers."


@dataclass(slots=True)
class TierCounts:
    """The counters."""

    errors: int = count("Errors of the tier's own in vLLM's calls.")
    lookups: int = count("Chunks that were asked for.")
    hits: int = count("Chunks that were stored.")
    unanswered: int = count("Chunks for which the agent's answer did not come in time.")
    loaded: int = count("Chunks that arrived and verified.")
    loads_failed: int = count("Chunks that did not arrive, or did not verify.")
    stored: int = count("Chunks that the agent stored, or had already.")
    stores_failed: int = count("Chunks that the agent did not store.")
    events_stored: int = count("Blocks of vLLM of which KV events said that the agent holds them.")
    events_removed: int = count("Blocks of vLLM of which KV events said that the agent no longer holds them.")
    events_unsaid: int = count("Chunks whose tokens the agent was not told, because it did not read for too long.")


HELP = texts(TierCounts)
