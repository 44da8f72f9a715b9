"""Lazy offload: a block is saved when its eviction from the engine's own cache comes near.

vLLM evicts a block when it takes it from the head of its queue of free blocks. Each block that a
request computes is noted with the key under which it would be saved: the request is gone by the
time that the eviction comes near. While vLLM takes blocks, steps look at those within the watermark
of the head. What is noted of them is saved with a reference to the block. When that is released,
the block goes behind those at the head that are not noted, where it was. At the tail, where vLLM
queues what is freed, the queue would turn until all of its blocks are saved, without any eviction;
at the head, those that are older would never be evicted.

Saved at once, as without lazy offload, are blocks of requests that are in a hurry; blocks that vLLM
does not cache (their eviction is the end of their request); and all blocks while fewer than the
watermark are free: then those in use may be evicted soon after their request ends.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kvagent.vllm import internals
from kvagent.vllm.scheduler.requests import Hurry, Phase
from kvagent.vllm.scheduler.saves import SaveRun, Saves
from kvagent.wire import section

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.vllm.counters import Counts
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import Depends
    from kvagent.vllm.scheduler.requests import Blocks, Tracked

LOOKS = 8  # looks while vLLM takes as many blocks as the watermark has
IN_USE = 128  # noted blocks in use that a step looks at while few are free


def saves_of(options: Options, step_tokens: int) -> Callable[..., LazySaves]:
    """Return the constructor of the saves of an engine, as that of Saves.

    ``step_tokens``: the most tokens that a step computes. As many blocks as two steps may take
    count as near their eviction, unless they are more than half of all blocks.
    """

    def made(geometry: Geometry, blocks: Blocks, counts: Counts) -> LazySaves:
        two_steps = 2 * sum(-(-step_tokens // group.block_tokens) for group in geometry.groups)
        total = blocks.pool.num_gpu_blocks
        watermark = max(int(total * options.watermark_percent / 100), min(two_steps, total // 2), 1)
        return LazySaves(geometry, blocks, counts, watermark)

    return made


class Unsaved(NamedTuple):
    """What a block holds, and is to be saved as."""

    block_hash: bytes
    """vLLM's, with its group. A block with another one has been reused."""
    group: int
    key: bytes
    parent: bytes
    """The key of the block before it, or empty."""
    depends: Depends = ()


class LazySaves(Saves):
    """Saves to which blocks are added when their eviction comes near.

    ``watermark``: how many blocks from the head of the queue are near their eviction.
    """

    def __init__(self, geometry: Geometry, blocks: Blocks, counts: Counts, watermark: int) -> None:
        super().__init__(geometry, blocks, counts)
        self.unsaved: dict[int, Unsaved] = {}
        """By block, in the order in which they were noted."""
        self.pressing = False
        """Whether so few blocks are free that blocks are saved at once."""
        self._pool = blocks.pool
        self._watermark = watermark
        self._stride = max(watermark // LOOKS, 1)
        self._taken = self._stride  # blocks that left the queue since the last look; so many: look again
        internals.around(blocks.pool, "get_new_blocks", self._take)

    def due(self) -> bool:
        """Return whether there may be blocks to save. Called in every step, before blocks are
        added.
        """
        self.pressing = self._pool.get_num_free_blocks() < self._watermark
        return bool(self.unsaved) and (self.pressing or self._taken >= self._stride)

    def admit(self, tracked: Tracked) -> None:
        """Begin with a request that is admitted. All of its blocks are noted, wherever they came
        from: the agent may have lost them by the time that they are evicted.
        """
        tracked.phase = Phase.RUNNING
        self.schedule.add(tracked)
        self._taken += sum(tracked.own // size for _, size, _, _ in self._groups)

    def add(self, tracked: Tracked, tokens: int) -> None:
        """Note what the first ``tokens`` of a request leave to be saved, or add it."""
        saving = tracked.saving
        if self.pressing or saving.hurry != Hurry.USUAL:
            super().add(tracked, tokens)
            return
        self._note_all(tracked, tokens)
        saving.next_tokens = min(
            (cursor + 1) * size for cursor, (_, size, *_) in zip(saving.cursor, self._groups, strict=True)
        )

    def end(self, tracked: Tracked, tokens: int) -> None:
        """Add or note what the first ``tokens`` of a request that ends now leave to be saved; what
        was to be saved at once, and finds no room, is noted.
        """
        self.add(tracked, tokens)
        self.add_again(tracked, tokens)
        if tokens >= tracked.saving.next_tokens and not tracked.awaited:
            self._note_all(tracked, tokens)

    def collect(self) -> None:
        """Add the blocks whose eviction came near."""
        found = self._in_use() if self.pressing else []
        found += self._near(self.room() - len(found))
        for run in reversed(_runs(found, self.job_blocks)):  # they are released in the opposite order
            unsaved, blocks = zip(*run, strict=True)
            keys, first = [one.key for one in unsaved], unsaved[0]
            data = section(first.group, first.parent, keys, [block.block_id for block in blocks])
            self._open.append(SaveRun(None, first.group, 0, keys, blocks, data, first.depends, unsaved))
            self._blocks.pin(blocks)

    def restore(self, run: SaveRun, i: int) -> None:
        """Note the blocks of a run from the i-th on again: they were not saved, and still hold what
        they held.
        """
        for unsaved, block in zip(run.notes[i:], run.blocks[i:], strict=True):
            if block.block_id in self.unsaved:
                break  # so are those after it
            self.unsaved[block.block_id] = unsaved

    def release(self, blocks: Sequence[Any]) -> None:
        """Release the references to blocks that were near their eviction."""
        self._blocks.unpin(blocks)
        free = [block for block in reversed(blocks) if block.ref_cnt == 0]
        internals.put_back(self._pool, free, self._watermark, lambda block: block.block_id not in self.unsaved)

    def clear(self) -> None:
        """Save nothing of what was noted: it is no longer cached, or depends on old weights."""
        self.unsaved.clear()

    def _note_all(self, tracked: Tracked, tokens: int) -> None:
        """Note what the first ``tokens`` of a request leave to be saved."""
        request = tracked.request
        hashes = request.block_hashes
        for group, size, scale, _ in self._groups:
            begin = tracked.saving.cursor[group]
            end = min(tokens // size, len(hashes) // scale)
            if begin < end:
                table = self._blocks.table(request.request_id, group, begin, end)
                cursor = tracked.saving.cursor[group] = self._note(tracked, group, begin, table)
                for named in self.named:  # the request is gone when they are saved
                    named(tracked, group, begin, cursor - begin)

    def _note(self, tracked: Tracked, group: int, begin: int, table: Sequence[Any]) -> int:
        """Note the blocks of a request from its block ``begin`` on. Those that vLLM does not cache
        are added to the next job.

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
                self.unsaved[block.block_id] = Unsaved(block.block_hash, group, key, parent, tracked.depends)
            at += 1
        return at

    def _near(self, room: int) -> list[tuple[Unsaved, Any]]:
        """Return what is noted of the free blocks near the head of the queue, at most ``room``, and
        note it no more.
        """
        found: list[tuple[Unsaved, Any]] = []
        for block in internals.next_free(self._pool, self._watermark):
            if self._current(block) is not None:
                if len(found) >= room:
                    return found  # the next step looks again
                found.append((self.unsaved.pop(block.block_id), block))
        self._taken = 0
        return found

    def _in_use(self) -> list[tuple[Unsaved, Any]]:
        """Return what is noted of blocks that requests use, the oldest notes first."""
        found: list[tuple[Unsaved, Any]] = []
        for number in list(islice(self.unsaved, IN_USE)):
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

    def _take(self, blocks: Sequence[Any]) -> None:
        """Handle that vLLM has taken blocks from the queue."""
        self._taken += len(blocks)
        if self.unsaved:
            for block in blocks:
                self._counts.saves_missed += self.unsaved.pop(block.block_id, None) is not None


def _runs(found: Sequence[tuple[Unsaved, Any]], most: int) -> list[list[tuple[Unsaved, Any]]]:
    """Return the blocks as chains of at most ``most`` blocks, each before those that follow it.

    vLLM frees a chain from its end, so each block usually follows its successor.
    """
    runs: list[list[tuple[Unsaved, Any]]] = []
    for one in found:
        last = runs[-1] if runs else []
        after = last[-1][0] if last and len(last) < most else None
        if after and (after.group, after.parent, after.depends) == (one[0].group, one[0].key, one[0].depends):
            last.append(one)
        else:
            runs.append([one])
    for run in runs:
        run.reverse()
    return runs
