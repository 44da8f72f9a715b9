"""What the connector counts, under which names the counters are exported, and their growth between
two reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def count(text: str) -> Any:
    """Return a counter of a dataclass, with what /metrics says of it."""
    return field(default=0, metadata={"help": text})


def texts(cls: type[Any], prefix: str = "") -> dict[str, str]:
    """Return what /metrics says of the counters of a dataclass, by name."""
    return {prefix + one.name: one.metadata["help"] for one in fields(cls)}


@dataclass
class Counts:
    """What the scheduler's side and its guests count. Saves are counted in blocks."""

    lookups: int = count("Look-ups that reserve.")
    lookups_unanswered: int = count("Look-ups that the agent did not answer in time.")
    lookups_late: int = count("Answers that came after their look-up was given up.")
    lookups_pending: int = count("Look-ups whose lower tiers took longer than the wait for them.")
    loads: int = count("Loads begun.")
    loads_failed: int = count("Loads with missing blocks.")
    loads_late: int = count("Loads given up at their deadline.")
    loads_sync: int = count("Loads that a step waited for.")
    loads_sync_failed: int = count("Loads that a step waited for in vain: their requests were preempted.")
    tokens_promised: int = count("Prompt tokens that were promised to be loaded.")
    tokens_loaded: int = count("Prompt tokens that were loaded.")
    transfers_offered: int = count("Prompts computed for a decode engine.")
    transfers_wanted: int = count("Requests whose prompt a prefill engine computes.")
    transfers_overdue: int = count("Requests whose prompt was not complete when remote_wait_ms had passed.")
    media_bypassed: int = count("Requests with images, audio or video that were neither saved nor loaded.")
    adapters_unknown: int = count("Requests with a LoRA adapter whose content was not known when they arrived.")
    requests_unsaved: int = count("Requests that asked not to be saved.")
    requests_unloaded: int = count("Requests that asked not to be loaded.")
    requests_limited: int = count("Requests that limited how many tokens are loaded.")
    requests_hinted: int = count("Requests with hints of how their blocks will be used.")
    hints_lost: int = count("Requests of whose end and hints the agent could not be told.")
    switches_ignored: int = count("Switches of requests that were ignored: unknown, out of range, or a transfer's.")
    events_stored: int = count("Blocks that KV events told to be in the agent's memory.")
    events_removed: int = count("Blocks that KV events told to be there no longer.")
    events_unsaid: int = count("Blocks that KV events cannot tell of, because the agent did not take their tokens.")
    saves_planned: int = count("Blocks offered to the agent.")
    saves_stored: int = count("Blocks that the agent stored.")
    saves_existed: int = count("Blocks that the agent already had.")
    saves_refused: int = count("Blocks that the agent did not store.")
    saves_revoked: int = count("Blocks whose save was revoked: for lack of free blocks, or because it took too long.")
    saves_missed: int = count("Blocks not offered: evicted before, or too many to be pinned when their request ended.")


@dataclass
class WorkerCounts:
    """Blocks moved by one worker, and loads that did not arrive as promised."""

    saved: int = count("Blocks stored, counted by every rank.")
    loaded: int = count("Blocks loaded, counted by every rank.")
    loads_failed: int = count("Failed loads, counted by every rank.")
    loads_late: int = count("Late loads, counted by every rank.")


@dataclass
class ErrorCounts:
    """Errors of one part in calls of vLLM's."""

    errors: int = count("Errors in this part of the connector; what it was about went on uncached.")


GAUGES = {
    "uncached": "1 if the engine cannot be served and runs without the agent; its log says why.",
}
HELP = texts(ErrorCounts) | texts(Counts) | texts(ErrorCounts, "worker_") | texts(WorkerCounts, "worker_")


class CounterDeltas:
    """The growth of the counters of a dataclass. ``prefix`` is prepended to their names."""

    def __init__(self, counts: Any, prefix: str = "") -> None:
        self._counts, self._prefix = counts, prefix
        self._last = dict(vars(counts))

    def take(self) -> dict[str, int]:
        """Return by name what grew since the last call. Cheap if nothing did."""
        now, before = vars(self._counts), self._last
        if now == before:
            return {}
        self._last = dict(now)
        return {self._prefix + name: value - before[name] for name, value in now.items() if value != before[name]}
