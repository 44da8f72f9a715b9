"""The connector's state of each request, and the requests whose KV depends on old weights.

KV computed after a reset depends on old weights if earlier KV of the same request does. At the
reset, vLLM has hashes of full blocks only; a partly filled block, or one still being loaded, gets
its hash later, and then other requests find it in the engine's own cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.lookup import Ticket
    from kvagent.vllm.scheduler.blocks import Blocks, Tables

FAILED_S = 30.0  # how long a key whose load failed is not promised again to its request
ANSWER_S = 2.0  # how long a promise is reused


@dataclass(slots=True)
class Promise:
    """``tokens`` are promised to a request that has ``own`` itself, pinned by ``lease`` unless it
    is 0.
    """

    own: int
    tokens: int
    lease: int
    at: float


@dataclass(eq=False, slots=True)
class Tracked:
    """One request, from its arrival to its end."""

    request: Any
    bypass: bool
    """Whether it is neither saved nor loaded."""
    cursor: list[int]
    """By group, the first block that is not yet saved, being saved or loaded from the agent."""
    next_tokens: int
    """With fewer computed tokens there is nothing to save."""
    admitted: bool = False
    """Whether it has blocks and computes, or will in this step."""
    over: bool = False
    due_tick: int = 0
    """The tick at which it is checked again (save_plan)."""
    own: int = 0
    """Tokens that the engine had itself at the last look-up."""
    promised: Promise | None = None
    ticket: Ticket | None = None
    pending_since: float = 0.0
    """When the agent first answered that it still queries lower tiers; 0 if it did not."""
    load: int = 0
    """The job that loads its blocks while vLLM waits for it, else 0."""
    loaded: tuple[int, int] = (0, 0)
    """The range of tokens that came from the agent and are not saved again."""
    ever_loaded: bool = False
    """Whether a load has filled some of its blocks, or will. Unlike ``loaded`` it survives a
    restart of the agent.
    """
    stale: bool = False
    """Whether some of its KV depends on old weights, so that it is not saved."""
    no_load: bool = False
    failed: dict[bytes, float] = field(default_factory=dict)
    """Keys whose load failed, and until when they are not promised."""

    def restart_saves(self) -> None:
        """Consider all its blocks unsaved: it has new blocks, or the agent lost the old ones."""
        self.cursor = [0] * len(self.cursor)
        self.next_tokens = 0
        self.loaded = (0, 0)

    def fail(self, hashes: list[bytes], now: float) -> None:
        """Record keys whose load failed."""
        self.failed.update(dict.fromkeys(hashes, now + FAILED_S))

    def failing(self, key: bytes, now: float) -> bool:
        """Return whether a key must not be promised."""
        return self.failed.get(key, 0.0) > now


_ALL = 1 << 62  # blocks


class StaleRequests:
    """Requests whose blocks get marked as stale, before vLLM can share or free them."""

    def __init__(self, blocks: Blocks, tables: Tables, groups: int) -> None:
        self._blocks = blocks
        self._tables = tables
        self._groups = groups
        self._next: dict[Tracked, list[int]] = {}  # by group: the first block that is not marked

    def add(self, tracked: Tracked) -> None:
        """Add a request whose blocks are all stale, or will be."""
        tracked.stale = True
        self._next[tracked] = [0] * self._groups

    def admit(self, tracked: Tracked, tables: Sequence[Sequence[object]]) -> None:
        """Add an admitted request if it found stale blocks; it is stale from the first of them
        on.
        """
        self.mark_blocks()
        if not self._blocks.has_stale or tracked in self._next:
            return
        firsts = [next((i for i, one in enumerate(table) if self._blocks.is_stale(one)), -1) for table in tables]
        if any(first >= 0 for first in firsts):
            tracked.stale = True
            self._next[tracked] = [max(first, 0) for first in firsts]

    def mark_blocks(self) -> None:
        """Mark the blocks to which vLLM has given hashes by now."""
        for tracked, firsts in self._next.items():
            for group, first in enumerate(firsts):
                for block in self._tables.slice(tracked.request.request_id, group, first, _ALL):
                    if block.block_hash is not None:
                        self._blocks.mark_stale(block)
                    elif not block.is_null:
                        break
                    firsts[group] += 1

    def remove(self, tracked: Tracked) -> None:
        """Remove a request that loses its blocks."""
        self._next.pop(tracked, None)

    def clear(self) -> None:
        """Remove all requests."""
        self._next.clear()
