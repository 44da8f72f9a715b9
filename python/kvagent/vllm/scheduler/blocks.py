"""The engine's blocks as the scheduler's side needs them: tables of requests, and pins.

A pinned block is not given to anybody, whatever happens to the request that it belonged to. It uses the reference
counts of vLLM's own block pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Blocks:
    """vLLM's block pool, and what of it this connector holds."""

    def __init__(self, pool: Any, pin_fraction: float) -> None:
        self._pool = pool
        self.saving = 0
        """Pins of saves."""
        self.loading = 0
        """Pins of loads."""
        self.max_saving = max(int(pool.num_gpu_blocks * pin_fraction), 1 if pin_fraction else 0)
        """At least one: an engine of few blocks saves them one after the other."""
        self._stale_hashes: dict[int, Any] = {}
        self.has_stale = False
        """Whether there may be blocks that old weights computed."""

    def room(self) -> int:
        """How many more blocks saves may pin."""
        return self.max_saving - self.saving

    def scarce(self) -> bool:
        """Whether the engine runs short of blocks: saves should not hold any then."""
        return bool(self._pool.get_num_free_blocks() < self.max_saving)

    def pin(self, blocks: Sequence[Any], *, load: bool = False) -> None:
        """Takes a reference to each."""
        self._pool.touch(blocks)
        if load:
            self.loading += len(blocks)
        else:
            self.saving += len(blocks)

    def unpin(self, blocks: Sequence[Any], *, load: bool = False) -> None:
        """Gives the references back, last block first, as vLLM frees."""
        if load:
            self.loading -= len(blocks)
        else:
            self.saving -= len(blocks)
        self._pool.free_blocks(reversed(blocks))

    def new_weights(self) -> None:
        """What is in the prefix cache now was computed before: it is not saved any more under the hash it has."""
        self._stale_hashes = {b.block_id: b.block_hash for b in self._pool.blocks if b.block_hash is not None}
        self.has_stale = bool(self._stale_hashes)

    def mark_stale(self, block: Any) -> None:
        """What is in a block depends on old weights, though it was filled later."""
        self._stale_hashes[block.block_id] = block.block_hash
        self.has_stale = True

    def is_stale(self, block: Any) -> bool:
        """Whether a block still has what it had before the last new_weights."""
        return self.has_stale and self._stale_hashes.get(block.block_id, _NONE) == block.block_hash

    def before_reset(self, call: Callable[[], None]) -> None:
        """Has ``call`` called whenever the prefix cache is about to be reset, which works only if nothing is held."""
        reset = self._pool.reset_prefix_cache

        def reset_prefix_cache() -> Any:
            call()
            return reset()

        self._pool.reset_prefix_cache = reset_prefix_cache


class Tables:
    """Block tables of requests: the KV cache manager's own where the scheduler gives it (from 0.30 on)."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._pool: Any = None
        self._rows: list[Any] = []  # by group: the manager's own tables of requests, where it has them
        self._seen: dict[str, tuple[Sequence[int], ...]] = {}

    def bind(self, pool: Any, manager: Any = None) -> None:
        """Says where to look."""
        self._pool, self._manager = pool, manager
        self._rows = _rows(manager)

    def take(self, block_state: Any) -> None:
        """Takes the tables of a step's output, where there is no manager to ask (0.29)."""
        if self._manager is None and block_state is not None:
            self._seen.update(block_state.block_ids)

    def block(self, request: str, i: int) -> Any:
        """The i-th block of the first group; None if the table is shorter."""
        if self._rows:
            table = self._rows[0].get(request, ())
            return table[i] if i < len(table) else None
        blocks = self.slice(request, 0, i, i + 1)
        return blocks[0] if blocks else None

    def slice(self, request: str, group: int, begin: int, end: int) -> Sequence[Any]:
        """The blocks from begin to end of a group; fewer if the table is shorter."""
        if self._manager is not None:
            blocks: Sequence[Any] = self._manager.get_blocks(request).blocks[group][begin:end]
            return blocks
        table = self._seen.get(request)
        return [] if table is None else [self._pool.blocks[i] for i in table[group][begin:end]]

    def forget(self, request: str) -> None:
        """The request is gone, or lost its blocks."""
        self._seen.pop(request, None)


def _rows(manager: Any) -> list[Any]:
    """What ``get_blocks`` of vLLM's manager reads; it makes objects for each call, and it is called for each block."""
    managers = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    rows = [getattr(one, "req_to_blocks", None) for one in managers]
    return rows if all(hasattr(row, "get") for row in rows) else []


_NONE = object()
