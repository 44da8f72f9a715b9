"""The engine's blocks: tables of requests, pins, and which blocks old weights computed.

A pinned block is not reused, whatever happens to its request. Pins are reference counts of vLLM's
block pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Blocks:
    """vLLM's block pool, and this connector's pins in it."""

    def __init__(self, pool: Any, pin_fraction: float) -> None:
        self._pool = pool
        self.saving = 0
        """Pins of saves."""
        self.loading = 0
        """Pins of loads."""
        self.max_saving = max(int(pool.num_gpu_blocks * pin_fraction), 1 if pin_fraction else 0)
        """At least one, so that an engine with few blocks saves them one by one."""
        self._stale_hashes: dict[int, Any] = {}
        self.has_stale = False
        """Whether old weights may have computed some of the blocks."""

    def room(self) -> int:
        """Return how many more blocks saves may pin."""
        return self.max_saving - self.saving

    def scarce(self) -> bool:
        """Return whether the engine is short of blocks, so that saves should not pin any."""
        return bool(self._pool.get_num_free_blocks() < self.max_saving)

    def pin(self, blocks: Sequence[Any], *, load: bool = False) -> None:
        """Take a reference to each block."""
        self._pool.touch(blocks)
        if load:
            self.loading += len(blocks)
        else:
            self.saving += len(blocks)

    def unpin(self, blocks: Sequence[Any], *, load: bool = False) -> None:
        """Release the references, last block first, in vLLM's order."""
        if load:
            self.loading -= len(blocks)
        else:
            self.saving -= len(blocks)
        self._pool.free_blocks(reversed(blocks))

    def new_weights(self) -> None:
        """Mark all blocks in the prefix cache as stale: they are not saved under their present
        hash.
        """
        self._stale_hashes = {b.block_id: b.block_hash for b in self._pool.blocks if b.block_hash is not None}
        self.has_stale = bool(self._stale_hashes)

    def mark_stale(self, block: Any) -> None:
        """Mark a block that depends on old weights though it was filled later."""
        self._stale_hashes[block.block_id] = block.block_hash
        self.has_stale = True

    def is_stale(self, block: Any) -> bool:
        """Return whether a block was marked as stale under its present hash."""
        return self.has_stale and self._stale_hashes.get(block.block_id, _NONE) == block.block_hash

    def before_reset(self, call: Callable[[], None]) -> None:
        """Call ``call`` before each reset of the prefix cache, which fails while blocks are
        referenced.
        """
        reset = self._pool.reset_prefix_cache

        def reset_prefix_cache() -> Any:
            call()
            return reset()

        self._pool.reset_prefix_cache = reset_prefix_cache


class Tables:
    """Block tables of requests, from the KV cache manager if the scheduler provides it (0.30 and
    later).
    """

    def __init__(self) -> None:
        self._manager: Any = None
        self._pool: Any = None
        self._rows: list[Any] = []  # by group: the manager's own tables of requests, if it has them
        self._seen: dict[str, tuple[Sequence[int], ...]] = {}

    def bind(self, pool: Any, manager: Any = None) -> None:
        """Set the sources."""
        self._pool, self._manager = pool, manager
        self._rows = _rows(manager)

    def take(self, block_state: Any) -> None:
        """Take the tables in a step's output if there is no manager (0.29)."""
        if self._manager is None and block_state is not None:
            self._seen.update(block_state.block_ids)

    def block(self, request: str, i: int) -> Any:
        """Return block ``i`` of the first group; None if the table is shorter."""
        if self._rows:
            table = self._rows[0].get(request, ())
            return table[i] if i < len(table) else None
        blocks = self.slice(request, 0, i, i + 1)
        return blocks[0] if blocks else None

    def slice(self, request: str, group: int, begin: int, end: int) -> Sequence[Any]:
        """Return the blocks from begin to end of a group; fewer if the table is shorter."""
        if self._manager is not None:
            blocks: Sequence[Any] = self._manager.get_blocks(request).blocks[group][begin:end]
            return blocks
        table = self._seen.get(request)
        return [] if table is None else [self._pool.blocks[i] for i in table[group][begin:end]]

    def forget(self, request: str) -> None:
        """Drop the table of a request that has ended or lost its blocks."""
        self._seen.pop(request, None)


def _rows(manager: Any) -> list[Any]:
    """Return the tables that ``get_blocks`` of vLLM's manager reads.

    That is called for each block, and makes objects each time.
    """
    managers = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    rows = [getattr(one, "req_to_blocks", None) for one in managers]
    return rows if all(hasattr(row, "get") for row in rows) else []


_NONE = object()
