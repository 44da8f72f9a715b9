"""Blocks of ended requests that found no room in the last saves: they keep their turn.

Saves may pin few of the engine's blocks (pin_percent), so a long prompt is saved over several
steps, and its request may end before. What is left is noted, by block, with the key under which it
is to be saved. It is not pinned: the blocks go back to vLLM, which evicts them last, and no request
waits for them. Each step saves what there is room for, the oldest notes first and before blocks of
running requests, which cannot be evicted. A block that vLLM has taken for another request meanwhile
is missed, whatever it holds then: an equal hash does not always mean equal content (media).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from kvagent.packing import section
from kvagent.vllm.scheduler.lazy import Unsaved, renewed
from kvagent.vllm.scheduler.save_plan import SaveBatch, SaveRun

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvagent.vllm.counters import SaveCounts
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.scheduler.requests import Blocks, Tables, Tracked

LOOK = 512  # notes that a step looks at
MAX_TRIES = 3  # times that a noted block is offered, so that an idle engine comes to rest


class EagerBatch(SaveBatch):
    """A batch that notes what is left of ended requests."""

    def __init__(self, geometry: Geometry, blocks: Blocks, tables: Tables, counts: SaveCounts) -> None:
        super().__init__(geometry, blocks, tables)
        self.left: dict[int, Unsaved] = {}
        """The notes by block, in the order of their turns."""
        self._counts = counts
        self._watch(blocks.pool)

    def keep_rest(self, tracked: Tracked, tokens: int) -> None:
        """Note what was not added of the first ``tokens`` of a request that ends now."""
        if not _keeps_turn(tracked):
            return
        hashes = tracked.request.block_hashes
        for group, size, scale, _, recent in self._positional:
            begin, end = tracked.cursor[group], min(tokens // size, len(hashes) // scale)
            loaded = range(tracked.loaded[0] // size, tracked.loaded[1] // size)
            table = self._tables.slice(tracked.request.request_id, group, begin, end) if begin < end else ()
            if self.tokens is not None:
                self.tokens.say(tracked, group, begin, len(table))
            for at, block in enumerate(table, begin):
                key = hashes[(at + 1) * scale - 1]
                if not (block.is_null or at in loaded or key in recent):
                    self._note(block, group, key, hashes[at * scale - 1] if at else b"", tracked.keep_until)

    def keep_run(self, run: SaveRun, i: int) -> None:
        """Note the blocks from the i-th on of a run whose request has ended. They hold what they
        held when they were pinned.
        """
        if run.tracked is None or not _keeps_turn(run.tracked):
            return
        hashes, scale = run.tracked.request.block_hashes, self._groups[run.group][2]
        for at in range(i, len(run.hashes)):
            if self._noted(run.blocks[at], run.hashes[at]):
                break  # so are those after it
            place = run.first + at
            self.recent[run.group].discard((run.hashes[at],))
            parent = hashes[place * scale - 1] if place else b""
            self._note(run.blocks[at], run.group, run.hashes[at], parent, run.tracked.keep_until)

    def restore(self, run: SaveRun, i: int) -> None:
        """Note the blocks of a run of noted ones from the i-th on again: they were not saved."""
        for unsaved, block in zip(run.unsaved[i:], run.blocks[i:], strict=True):
            if self._noted(block, unsaved.key):
                break  # so are those after it
            self.recent[unsaved.group].discard((unsaved.key,))
            if unsaved.tries + 1 < MAX_TRIES:
                self._add(block, unsaved._replace(tries=unsaved.tries + 1))
            else:
                self._counts.missed += 1

    def collect(self) -> None:
        """Add noted blocks to the batch as far as there is room, and pin them."""
        found: list[tuple[Unsaved, Any]] = []
        room = self.room()
        for number in list(islice(self.left, LOOK)):
            if len(found) >= room:
                break
            unsaved, block = self.left.pop(number), self._blocks.pool.blocks[number]
            if unsaved.block_hash != block.block_hash or self._blocks.is_stale(block):
                self._counts.missed += 1
                continue
            self.late_keeps.append(unsaved)
            if unsaved.key not in self.recent[unsaved.group]:
                found.append((unsaved, block))
        for run in _chains(found, self.job_blocks):
            some, blocks = zip(*run, strict=True)
            keys = [one.key for one in some]
            data = section(some[0].group, some[0].parent, keys, [block.block_id for block in blocks])
            self.recent[some[0].group].young.update(keys)
            self.open.append(SaveRun(None, some[0].group, 0, keys, blocks, data, unsaved=some))
            self._unpinned += blocks
        self.pin()

    def _watch(self, pool: Any) -> None:
        """Drop the notes of blocks that vLLM takes, and all when it empties its cache."""
        get_new_blocks, reset_prefix_cache = pool.get_new_blocks, pool.reset_prefix_cache

        def taken(*args: Any, **kwargs: Any) -> Any:
            blocks = get_new_blocks(*args, **kwargs)
            if self.left:
                for block in blocks:
                    self._counts.missed += self.left.pop(block.block_id, None) is not None
            return blocks

        def reset() -> Any:
            done = reset_prefix_cache()
            if done:
                self._counts.missed += len(self.left)
                self.left.clear()
            return done

        pool.get_new_blocks, pool.reset_prefix_cache = taken, reset

    def _note(self, block: Any, group: int, key: bytes, parent: bytes, keep_until: float) -> None:
        """Note a block; one that vLLM does not cache is gone when its request is."""
        if block.block_hash is None or self._blocks.is_stale(block):
            self._counts.missed += 1
        else:
            self._add(block, Unsaved(block.block_hash, group, key, parent, keep_until=keep_until))

    def _add(self, block: Any, unsaved: Unsaved) -> None:
        """Add a note in the last place. What the block held before is evicted."""
        before = self.left.pop(block.block_id, None)
        self._counts.missed += before is not None and before.key != unsaved.key
        self.left[block.block_id] = renewed(unsaved, before)

    def _noted(self, block: Any, key: bytes) -> bool:
        """Return whether a block is noted with what it holds now."""
        noted = self.left.get(block.block_id)
        return noted is not None and noted.key == key


def _keeps_turn(tracked: Tracked) -> bool:
    """Return whether a request's blocks are ordinary ones: not offered to a decode engine, which
    has pins of its own, not to be dropped after a time, and not of old weights.
    """
    return tracked.offer is None and not (
        tracked.ttl_ms or tracked.stale or tracked.bypass or tracked.unkeyed or tracked.no_save
    )


def _chains(found: Iterable[tuple[Unsaved, Any]], most: int) -> list[list[tuple[Unsaved, Any]]]:
    """Return the blocks in runs of at most ``most``, each block after the one that it follows."""
    runs: list[list[tuple[Unsaved, Any]]] = []
    for one in found:
        last = runs[-1] if runs else []
        if last and len(last) < most and last[-1][0].group == one[0].group and last[-1][0].key == one[0].parent:
            last.append(one)
        else:
            runs.append([one])
    return runs
