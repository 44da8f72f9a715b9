"""Lazy offload: a block is saved when its eviction from the engine's own cache comes near.

vLLM evicts a block when it takes it from the head of its queue of free blocks:

    head  ── saved or without content ──│── not looked at yet ──────────────  tail
          the watermark's blocks        └ cursor                    just freed

Each block that a request computes is noted with the key under which it would be saved: the request
is gone by the time that the eviction comes near. Each step looks at those blocks that came within
the watermark since the last one, and saves what is noted of them. A block that is being saved is
pinned; afterwards it goes back to the cursor, where it was. At the tail, where vLLM puts what is
freed, all blocks would be saved one after another without any need; at the head, those that are
older would never be evicted.

Saved at once, as without lazy offload, are blocks of offered requests, and of those whose blocks
are kept for a time or dropped after one; blocks that vLLM does not cache (their eviction is the end
of their request); and all blocks while fewer than the watermark are free: then those in use may be
evicted soon after their request ends.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kvagent.packing import section
from kvagent.vllm.options import LAZY
from kvagent.vllm.scheduler.save_plan import SaveBatch, SaveRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.vllm.counters import SaveCounts
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.options import Options
    from kvagent.vllm.scheduler.requests import Blocks, Tables, Tracked

LOOK = 128  # blocks that a step looks at, besides twice those that were taken since the last one


def watermark(options: Options, geometry: Geometry, step_tokens: int, blocks: int) -> int:
    """Return how many blocks before its eviction a block is saved, in an engine of so many blocks;
    0: at once.

    ``step_tokens``: the most tokens that a step computes. As many blocks as two steps may take
    count as near, unless they are more than half of all blocks.
    """
    if options.offload != LAZY:
        return 0
    two_steps = 2 * sum(-(-step_tokens // group.block_tokens) for group in geometry.groups)
    return max(int(blocks * options.watermark_percent / 100), min(two_steps, blocks // 2), 1)


class Unsaved(NamedTuple):
    """What a block holds, and is to be saved as."""

    block_hash: bytes
    """vLLM's, with its group. A block with another one has been reused."""
    group: int
    key: bytes
    parent: bytes
    """The key of the block before it, or empty."""


class LazyBatch(SaveBatch):
    """A batch to which blocks are added when their eviction comes near.

    ``watermark``: how many blocks from the head of the queue are near their eviction.
    """

    def __init__(self, geometry: Geometry, blocks: Blocks, tables: Tables, watermark: int, counts: SaveCounts) -> None:
        super().__init__(geometry, blocks, tables)
        self.unsaved: dict[int, Unsaved] = {}
        """By block, in the order in which they were noted."""
        self.pressing = False
        """Whether so few blocks are free that blocks are saved at once."""
        self._pool = blocks.pool
        self._watermark = watermark
        self._counts = counts
        self._covered: set[int] = set()  # free blocks up to the cursor: saved, or nothing to save
        self._cursor: Any = None  # the last block that was looked at; None: begin at the head
        self._taken = 0  # blocks that vLLM took since the last look
        self._watch(blocks.pool)

    def due(self) -> bool:
        """Return whether there may be blocks to look at. Called in every step, before blocks are
        added, so that a block that leaves the queue and comes back is not taken for the cursor.
        """
        self._check_cursor()
        self.pressing = self._pool.get_num_free_blocks() < self._watermark
        return len(self._covered) < self._watermark or (self.pressing and bool(self.unsaved))

    def begin(self, tracked: Tracked) -> None:
        """Begin with a request that is admitted. All of its blocks are noted, wherever they came
        from: the agent may have lost them by the time that they are evicted.
        """

    def add(self, tracked: Tracked, tokens: int) -> None:
        """Note what the first ``tokens`` of a request leave to be saved, or add it to the batch."""
        if self.pressing or tracked.offer is not None or tracked.pin_ms or tracked.ttl_ms:
            super().add(tracked, tokens)
            return
        self._note_all(tracked, tokens)
        tracked.next_tokens = min(
            (cursor + 1) * size for cursor, (_, size, *_) in zip(tracked.cursor, self._groups, strict=True)
        )

    def keep_rest(self, tracked: Tracked, tokens: int) -> None:
        """Note what was to be saved at once, and found no room, of a request that ends now."""
        if tracked.offer is None and not tracked.ttl_ms:
            self._note_all(tracked, tokens)

    def collect(self) -> None:
        """Add the blocks whose eviction came near to the batch, and pin them."""
        found = self._catch_up() if self.pressing else []
        found += self._look(self.room() - len(found))
        self._taken = 0
        for run in reversed(_runs(found, self.job_blocks)):  # they are released in the opposite order
            unsaved, blocks = zip(*run, strict=True)
            keys = [one.key for one in unsaved]
            data = section(unsaved[0].group, unsaved[0].parent, keys, [block.block_id for block in blocks])
            self.open.append(SaveRun(None, unsaved[0].group, 0, keys, blocks, data, unsaved=unsaved))
            self._unpinned += blocks
        self.pin()

    def restore(self, run: SaveRun, i: int) -> None:
        """Note the blocks of a run from the i-th on again: they were not saved, and still hold what
        they held.
        """
        for unsaved, block in zip(run.unsaved[i:], run.blocks[i:], strict=True):
            if block.block_id in self.unsaved:
                break  # so are those after it
            self.unsaved[block.block_id] = unsaved
        self._begin_again()

    def release(self, blocks: Sequence[Any]) -> None:
        """Unpin blocks that were near their eviction."""
        self._check_cursor()
        free = self._blocks.unpin_behind(blocks, self._cursor)
        if any(block.block_id in self.unsaved for block in free):
            self._begin_again()
        elif free:
            self._covered.update(block.block_id for block in free)
            self._cursor = free[-1]

    def clear_unsaved(self) -> None:
        """Save nothing of what was noted: it is no longer cached, or depends on old weights."""
        self.unsaved.clear()

    def _check_cursor(self) -> None:
        """Begin at the head if the block of the cursor has left the queue."""
        if self._cursor is not None and self._cursor.ref_cnt:
            self._cursor = None

    def _begin_again(self) -> None:
        """Look at the blocks from the head on: some there are not saved."""
        self._covered.clear()
        self._cursor = None

    def _note_all(self, tracked: Tracked, tokens: int) -> None:
        """Note what the first ``tokens`` of a request leave to be saved."""
        request = tracked.request
        hashes = request.block_hashes
        for group, size, scale, _ in self._groups:
            begin = tracked.cursor[group] = max(tracked.cursor[group], tracked.found // size)
            end = min(tokens // size, len(hashes) // scale)
            if begin < end:
                table = self._tables.slice(request.request_id, group, begin, end)
                tracked.cursor[group] = self._note(tracked, group, begin, table)
                if self.tokens is not None:  # the request is gone when they are saved
                    self.tokens.say(tracked, group, begin, tracked.cursor[group] - begin)

    def _note(self, tracked: Tracked, group: int, begin: int, table: Sequence[Any]) -> int:
        """Note the blocks of a request from its block ``begin`` on. Those that vLLM does not cache
        are added to the batch.

        Return the first block that must wait.
        """
        scale, hashes = self._groups[group][2], tracked.request.block_hashes
        at = begin
        while at < begin + len(table):
            block = table[at - begin]
            key = hashes[(at + 1) * scale - 1]
            if block.block_hash is None:
                if not block.is_null and self._pick(tracked, group, at, [key], [block]) == at:
                    break  # no room
            elif not self._blocks.is_stale(block):
                parent = hashes[at * scale - 1] if at else b""
                self.unsaved[block.block_id] = Unsaved(block.block_hash, group, key, parent)
                self._covered.discard(block.block_id)
            at += 1
        return at

    def _look(self, room: int) -> list[tuple[Unsaved, Any]]:
        """Return what is noted of the blocks that are within the watermark, at most ``room``."""
        found: list[tuple[Unsaved, Any]] = []
        queue = self._pool.free_block_queue
        block = (self._cursor or queue.fake_free_list_head).next_free_block
        for _ in range(LOOK + 2 * self._taken):
            if block is queue.fake_free_list_tail or len(self._covered) + len(found) >= self._watermark:
                break
            unsaved = self._current(block)
            if unsaved is None:
                self._covered.add(block.block_id)
                self._cursor = block
            elif len(found) >= room:
                break
            else:
                found.append((self.unsaved.pop(block.block_id), block))
            block = block.next_free_block
        return found

    def _catch_up(self) -> list[tuple[Unsaved, Any]]:
        """Return what is noted of blocks that requests use, the oldest notes first."""
        found: list[tuple[Unsaved, Any]] = []
        for number in list(islice(self.unsaved, LOOK)):
            block = self._pool.blocks[number]
            if block.ref_cnt and self._current(block) is not None and len(found) < self.room():
                found.append((self.unsaved.pop(number), block))
        found.reverse()  # the order of the queue
        return found

    def _current(self, block: Any) -> Unsaved | None:
        """Return what is noted of a block, if it holds that and may be saved. Else nothing is noted
        of it afterwards.
        """
        unsaved = self.unsaved.get(block.block_id)
        if unsaved is None:
            return None
        if unsaved.block_hash == block.block_hash and not self._blocks.is_stale(block):
            return unsaved
        del self.unsaved[block.block_id]
        return None

    def _watch(self, pool: Any) -> None:
        """Learn which blocks vLLM takes from the queue, which of them for what they hold, and when
        it empties its cache.
        """
        get_new_blocks, touch, reset_prefix_cache = pool.get_new_blocks, pool.touch, pool.reset_prefix_cache

        def taken(*args: Any, **kwargs: Any) -> Any:
            blocks = get_new_blocks(*args, **kwargs)
            self._take_out(blocks)
            return blocks

        def used(blocks: Sequence[Any]) -> None:
            touch(blocks)
            self._covered.difference_update(block.block_id for block in blocks)
            self._check_cursor()

        def reset() -> Any:
            done = reset_prefix_cache()
            if done:
                self.clear_unsaved()
            return done

        pool.get_new_blocks, pool.touch, pool.reset_prefix_cache = taken, used, reset

    def _take_out(self, blocks: Sequence[Any]) -> None:
        """Handle that vLLM took blocks: what they held is evicted."""
        self._taken += len(blocks)
        for block in blocks:
            if self.unsaved.pop(block.block_id, None) is not None:
                self._counts.missed += 1
            self._covered.discard(block.block_id)
        self._check_cursor()


def _runs(found: Sequence[tuple[Unsaved, Any]], most: int) -> list[list[tuple[Unsaved, Any]]]:
    """Return the blocks as chains of at most ``most`` blocks, each before those that follow it.

    vLLM frees a chain from its end, so each block usually follows its successor.
    """
    runs: list[list[tuple[Unsaved, Any]]] = []
    for one in found:
        last = runs[-1] if runs else []
        if last and len(last) < most and last[-1][0].group == one[0].group and last[-1][0].parent == one[0].key:
            last.append(one)
        else:
            runs.append([one])
    for run in runs:
        run.reverse()
    return runs
