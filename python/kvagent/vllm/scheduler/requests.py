"""The connector's state of each request and of the engine's blocks: tables, pins, and which of them
depend on old weights.

A pinned block is not reused, whatever happens to its request. Pins are reference counts of vLLM's
block pool.

KV computed after a reset depends on old weights if earlier KV of the same request does. At the
reset, vLLM has hashes of full blocks only; a partly filled block, or one still being loaded, gets
its hash later, and then other requests find it in the engine's own cache.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.lookup import Ticket
    from kvagent.vllm.plan import Depends


ANSWER_S = 2.0  # how long a promise is reused
NO_LIMIT = 1 << 62  # tokens, or blocks


@dataclass(slots=True)
class Promise:
    """``tokens`` are promised to a request that has ``own`` itself, pinned by ``lease`` unless it
    is 0. ``ready``: all of it was in the agent's memory as it was saved. ``disk`` of the tokens the
    agent fetched from its disk, ``other`` from a shared store.
    """

    own: int
    tokens: int
    lease: int
    at: float
    ready: bool = False
    disk: int = 0
    other: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    """How a request is looked up: as any other, or as one that is to receive a ``transfer``, from
    ``peer``, host:port of an agent or empty for the own one. ``early``: its blocks may not be
    computed yet. It waits for ``wait_s`` in all, and while the agent says that more may come, for
    ``pending_s``.
    """

    transfer: bytes = b""
    peer: str = ""
    early: bool = False
    wait_s: float = 0.0
    pending_s: float = 0.0
    groups: bytes = b""
    """The KV cache groups that count, a byte each; all if empty."""


USUAL = Terms()


@dataclass(eq=False, slots=True)
class Pending:
    """A look-up that is asked until its answer is of use (Lookups.advance)."""

    ticket: Ticket | None = None
    at: float = 0.0
    """When the question in flight was sent, or could not be yet; 0 without one."""
    pending_since: float = 0.0
    """When the agent first answered that more may come; 0 if it did not."""
    after: float = 0.0
    """When it is to be asked again after that."""


@dataclass(eq=False, slots=True)
class Asking(Pending):
    """What a request knows of its look-ups."""

    terms: Terms = USUAL
    most: int = NO_LIMIT
    """The most tokens that it loads: none after a load that failed."""
    promised: Promise | None = None

    def ends(self) -> None:
        """The look-up in flight is over."""
        self.ticket = None
        self.pending_since = self.at = 0.0


class Hurry(enum.IntEnum):
    """When the blocks of a request are saved."""

    USUAL = 0
    AT_ONCE = 1
    """Once they are computed, also with lazy offload."""
    AWAITED = 2
    """Likewise, and whoever else needs their memory: another engine waits for them. What it found
    in the engine's own cache is saved too, at once.
    """


@dataclass(slots=True)
class Saving:
    """What is left of a request to be saved (saves)."""

    cursor: list[int]
    """By group, the first block that is not yet saved, being saved or loaded from the agent."""
    next_tokens: int
    """With fewer computed tokens there is nothing to save."""
    again: list[tuple[int, int, int]] = field(default_factory=list)
    """Blocks that are offered when it ends: group, first block, and the one after the last."""
    most: int = NO_LIMIT
    """How many of its tokens are saved."""
    hurry: Hurry = Hurry.USUAL
    job: int = 0
    """The last job that has blocks of it."""
    confirm_until: float = 0.0
    """How long awaited blocks are offered again that another engine is saving, by the clock of the
    saves; 0 if there were none.
    """


class Phase(enum.IntEnum):
    """What a request has of blocks."""

    NONE = 0
    LOADED = 1
    """A load fills some of them, or has."""
    RUNNING = 2
    """It computes, or will in this step."""


@dataclass(eq=False, slots=True)
class Tracked:
    """One request, from its arrival to its end."""

    request: Any
    """vLLM's, or one with other keys of its blocks."""
    saving: Saving
    barred: set[str] = field(default_factory=set)
    """Why it is neither saved nor loaded; empty if it is."""
    asking: Asking = field(default_factory=Asking)
    own: int = 0
    """Tokens that the engine had itself at the last look-up."""
    looked_up: bool = False
    """Whether that was after its last admission."""
    phase: Phase = Phase.NONE
    load: int = 0
    """The job that loads its blocks, else 0. Until the outcome is known, the request waits in vLLM,
    or computes if its step waits for the load.
    """
    waits: bool = False
    """Whether the step that admits it is to wait for its load."""
    loaded: tuple[int, int] = (0, 0)
    """The range of tokens that came from the agent and are not saved again."""
    stale: bool = False
    """Whether some of its KV depends on old weights, so that it is not saved."""
    depends: Depends = ()
    """What workers must still have for its jobs to be right."""

    @property
    def awaited(self) -> bool:
        """Whether another engine waits for its blocks."""
        return self.saving.hurry == Hurry.AWAITED

    @property
    def saved(self) -> bool:
        """Whether its blocks may be saved."""
        return not (self.barred or self.stale) and self.saving.most > 0

    def restart_saves(self) -> None:
        """Consider all its blocks unsaved: it has new blocks, or the agent lost the old ones."""
        self.saving.cursor = [0] * len(self.saving.cursor)
        self.saving.next_tokens, self.saving.again = 0, []
        self.loaded = (0, 0)


def arrived(request: Any, groups: int, next_tokens: int) -> Tracked:
    """Return the record of a request that has arrived."""
    return Tracked(request, Saving([0] * groups, next_tokens))


class StaleRequests:
    """Requests whose blocks get marked as stale, before vLLM can share or free them."""

    def __init__(self, blocks: Blocks, groups: int) -> None:
        self._blocks = blocks
        self._groups = groups
        self._next: dict[Tracked, list[int]] = {}  # by group: the first block that may not be marked
        self._unmarked: dict[Tracked, dict[int, Any]] = {}  # blocks that were seen without a hash, by number

    def add(self, tracked: Tracked) -> None:
        """Add a request whose blocks are all stale, or will be."""
        tracked.stale = True
        self._next[tracked] = [0] * self._groups

    def admit(self, tracked: Tracked, tables: Sequence[Sequence[object]]) -> None:
        """Add an admitted request if it found stale blocks: it is stale from the first of them."""
        self.mark_blocks()
        if not self._blocks.has_stale or tracked in self._next:
            return
        firsts = [next((i for i, one in enumerate(table) if self._blocks.is_stale(one)), -1) for table in tables]
        if any(first >= 0 for first in firsts):
            tracked.stale = True
            self._next[tracked] = [max(first, 0) for first in firsts]

    def mark_blocks(self) -> None:
        """Mark the blocks to which vLLM has given hashes by now, although requests may have lost
        them since they were seen.

        A block that another request took meanwhile is marked too, if it has a hash already: it is
        not saved, which is harmless.
        """
        for tracked, firsts in self._next.items():
            seen = self._unmarked.pop(tracked, {})
            for group, first in enumerate(firsts):
                table = self._blocks.table(tracked.request.request_id, group, first, NO_LIMIT)
                # vLLM gives no hash to blocks that no hit needs (windows, states).
                firsts[group] += next((i for i, block in enumerate(table) if _unhashed(block)), len(table))
                seen |= {block.block_id: block for block in table}
            for block in seen.values():
                if block.block_hash is not None:
                    self._blocks.mark_stale(block)
            if left := {number: block for number, block in seen.items() if _unhashed(block)}:
                self._unmarked[tracked] = left

    def remove(self, tracked: Tracked) -> None:
        """Remove a request that loses its blocks."""
        self._next.pop(tracked, None)
        self._unmarked.pop(tracked, None)


def _unhashed(block: Any) -> bool:
    return block.block_hash is None and not block.is_null


class Blocks:
    """The block pool of vLLM's KV cache manager, its tables, and this connector's pins."""

    def __init__(self, manager: Any, pin_fraction: float) -> None:
        self._manager = manager
        self.pool = pool = manager.block_pool
        self.saving = 0
        """Pins of saves, but for those that another engine awaits: they are not limited."""
        self.awaited = 0
        """Pins of those."""
        self.loading = 0
        """Pins of loads."""
        self.max_saving = max(int(pool.num_gpu_blocks * pin_fraction), 1 if pin_fraction else 0)
        """At least one, so that an engine with few blocks saves them one by one."""
        self._stale_hashes: dict[int, Any] = {}
        self.has_stale = False
        """Whether old weights may have computed some of the blocks."""

    def table(self, request: str, group: int, begin: int, end: int) -> Sequence[Any]:
        """Return a request's blocks from begin to end of a group; fewer if it has fewer."""
        blocks: Sequence[Any] = self._manager.get_blocks(request).blocks[group][begin:end]
        return blocks

    def room(self) -> int:
        """Return how many more blocks saves may pin."""
        return self.max_saving - self.saving

    def scarce(self) -> bool:
        """Return whether the engine is short of blocks, so that saves should not pin any."""
        return bool(self.pool.get_num_free_blocks() < self.max_saving)

    def withheld(self) -> bool:
        """Return whether fewer blocks are free than saves would withhold if all requests ended."""
        return bool(self.pool.get_num_free_blocks() < self.saving)

    def cached(self, hashes: Sequence[bytes], group: int) -> int:
        """Return how many of a prompt's first blocks are in the engine's own cache."""
        return next((i for i, key in enumerate(hashes) if not self.pool.get_cached_block(key, [group])), len(hashes))

    def pin(self, blocks: Sequence[Any], *, load: bool = False, awaited: bool = False) -> None:
        """Take a reference to each block."""
        self.pool.touch(blocks)
        self._count(len(blocks), load=load, awaited=awaited)

    def unpin(self, blocks: Sequence[Any], *, load: bool = False, awaited: bool = False) -> None:
        """Release the references, last block first, in vLLM's order."""
        self._count(-len(blocks), load=load, awaited=awaited)
        self.pool.free_blocks(reversed(blocks))

    def _count(self, pins: int, *, load: bool, awaited: bool) -> None:
        if load:
            self.loading += pins
        elif awaited:
            self.awaited += pins
        else:
            self.saving += pins

    def new_weights(self) -> None:
        """Mark all blocks in the prefix cache as stale: none is saved under its present hash."""
        self._stale_hashes = {b.block_id: b.block_hash for b in self.pool.blocks if b.block_hash is not None}
        self.has_stale = bool(self._stale_hashes)

    def mark_stale(self, block: Any) -> None:
        """Mark a block that depends on old weights though it was filled later."""
        self._stale_hashes[block.block_id] = block.block_hash
        self.has_stale = True

    def is_stale(self, block: Any) -> bool:
        """Return whether a block was marked as stale under its present hash."""
        return self.has_stale and self._stale_hashes.get(block.block_id, _NONE) == block.block_hash


_NONE = object()
