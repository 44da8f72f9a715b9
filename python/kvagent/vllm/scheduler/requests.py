"""What the scheduler's side knows of a request.

Requests of which old weights computed some KV: what they fill after a reset is old as well, whatever hash it gets.

At the reset vLLM has hashes of full blocks only; a block that was partly filled, or that a load had yet to bring, gets
its hash later, and then other requests find it in the engine's own cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.lookup import Ticket
    from kvagent.vllm.scheduler.blocks import Blocks, Tables

FAILED_S = 30.0  # for that long a key that could not be loaded is not promised again to its request
ANSWER_S = 2.0  # an older answer is asked again


@dataclass(slots=True)
class Promise:
    """An answer: ``tokens`` are promised to a request that has ``own`` itself, pinned by ``lease`` if it is not 0."""

    own: int
    tokens: int
    lease: int
    at: float


@dataclass(eq=False, slots=True)
class Tracked:
    """One request, from its arrival to its end."""

    request: Any
    bypass: bool
    """Neither saved nor loaded."""
    cursor: list[int]
    """By group: blocks below are saved, or being saved, or came from the agent."""
    next_tokens: int
    """With fewer computed tokens there is nothing to save."""
    admitted: bool = False
    """It has blocks and computes, or will in this step."""
    over: bool = False
    due_tick: int = 0
    """The tick at which it is looked at again (due)."""
    own: int = 0
    """Tokens that the engine had itself when it asked last."""
    promised: Promise | None = None
    ticket: Ticket | None = None
    pending_since: float = 0.0
    """When the agent first said that lower tiers are still asked; 0: it did not."""
    load: int = 0
    """The job that brings its blocks, as long as it is waited for."""
    loaded: tuple[int, int] = (0, 0)
    """Tokens, from and to, that came from the agent: not saved again."""
    ever_loaded: bool = False
    """A load has brought some of its blocks, or is to, since it has blocks: unlike ``loaded`` it outlives the agent."""
    stale: bool = False
    """Some of its KV was computed by old weights, and so depends on them what it computes now: it is not saved."""
    no_load: bool = False
    failed: dict[bytes, float] = field(default_factory=dict)
    """Keys that could not be loaded, and until when."""

    def restart_saves(self) -> None:
        """All of it is to be saved: it has blocks anew, or the agent forgot them."""
        self.cursor = [0] * len(self.cursor)
        self.next_tokens = 0
        self.loaded = (0, 0)

    def fail(self, hashes: list[bytes], now: float) -> None:
        """Remembers keys that could not be loaded."""
        self.failed.update(dict.fromkeys(hashes, now + FAILED_S))

    def failing(self, key: bytes, now: float) -> bool:
        """Whether a key is not to be promised."""
        return self.failed.get(key, 0.0) > now


_ALL = 1 << 62  # blocks


class StaleRequests:
    """See the module. Blocks are entered before somebody can be let in on them, and before they are freed."""

    def __init__(self, blocks: Blocks, tables: Tables, groups: int) -> None:
        self._blocks = blocks
        self._tables = tables
        self._groups = groups
        self._next: dict[Tracked, list[int]] = {}  # by group: the first block that is not entered

    def add(self, tracked: Tracked) -> None:
        """All its blocks are old, or will be."""
        tracked.stale = True
        self._next[tracked] = [0] * self._groups

    def admit(self, tracked: Tracked, tables: Sequence[Sequence[object]]) -> None:
        """Whether a request that is let in with those blocks found old ones: it is old from the first of them on."""
        self.mark_blocks()
        if not self._blocks.has_stale or tracked in self._next:
            return
        firsts = [next((i for i, one in enumerate(table) if self._blocks.is_stale(one)), -1) for table in tables]
        if any(first >= 0 for first in firsts):
            tracked.stale = True
            self._next[tracked] = [max(first, 0) for first in firsts]

    def mark_blocks(self) -> None:
        """Takes what vLLM has given a hash by now for old."""
        for tracked, firsts in self._next.items():
            for group, first in enumerate(firsts):
                for block in self._tables.slice(tracked.request.request_id, group, first, _ALL):
                    if block.block_hash is not None:
                        self._blocks.mark_stale(block)
                    elif not block.is_null:
                        break
                    firsts[group] += 1

    def remove(self, tracked: Tracked) -> None:
        """Its blocks are taken from it."""
        self._next.pop(tracked, None)

    def clear(self) -> None:
        """Forgets all of them."""
        self._next.clear()
