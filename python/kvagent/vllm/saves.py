"""Which blocks a step saves: plans jobs, keeps their pins and words until every worker has reported them.

A save goes out in the step that computes its last block, or later; the agent waits for that step. Its blocks are pinned
until the workers report it, so the request may end meanwhile. A save can be revoked: the agent reads the word after it
has copied and before it stores, so the pins can go at once.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvagent.limits import MAX_JOB_BLOCKS, MAX_SECTIONS
from kvagent.messages import BlockStatus
from kvagent.packing import packed, section, short_section
from kvagent.vllm.known import Known
from kvagent.vllm.plan import Outcome, SaveJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.vllm.blocks import Blocks, Tables
    from kvagent.vllm.due import Due
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.tracked import Tracked

REVOKES = 256  # words, so that many saves under way
RETRY_STEPS = 16  # before what found the agent busy is offered again

_STORED = bytes((BlockStatus.OK, BlockStatus.EXISTS, BlockStatus.IN_PROGRESS))
_LATER = (BlockStatus.BUSY, BlockStatus.REVOKED, BlockStatus.FAILED, BlockStatus.TIMED_OUT, BlockStatus.OFF)
_PAUSE = (BlockStatus.BUSY, BlockStatus.OFF, BlockStatus.FAILED)
_NEVER = 1 << 62  # tokens


class _Piece(NamedTuple):
    """One section of a job: blocks of one group of a request, the first of which is its ``first``."""

    tracked: Tracked
    group: int
    first: int
    hashes: Sequence[bytes]
    blocks: Sequence[Any]
    section: bytes


@dataclass(eq=False, slots=True)
class _Save:
    job: int
    revoke: int
    pieces: list[_Piece]
    blocks: list[Any]
    outcome: Outcome | None = None
    pinned: bool = True


@dataclass(slots=True)
class SaveCounts:
    """What became of saves, in blocks."""

    planned: int = 0
    stored: int = 0
    existed: int = 0
    refused: int = 0
    revoked: int = 0


@dataclass(eq=False)
class Saves:
    """The saves under way. ``revoke_now`` sets a word in all workers at once; it may be None."""

    geometry: Geometry
    world: int
    blocks: Blocks
    tables: Tables
    due: Due
    """Requests of which a block has to be offered again are put there."""
    revoke_now: Callable[[int], None] | None = None
    revocable: bool = True
    """Whether the agent knows revocation words."""
    job_blocks: int = MAX_JOB_BLOCKS
    """Most blocks that the agent takes in one job."""
    counts: SaveCounts = field(default_factory=SaveCounts)

    def __post_init__(self) -> None:
        self._groups = [
            (group, spec.block_tokens, self.geometry.scale(group), bool(spec.window), Known())
            for group, spec in enumerate(self.geometry.groups)
        ]
        _, self._block_tokens, scale, window, self._first_known = self._groups[0]
        self._simple = len(self._groups) == 1 and scale == 1 and not window
        self._under_way: OrderedDict[int, _Save] = OrderedDict()
        self._words = list(range(REVOKES))
        self._open: list[_Piece] = []
        self._unpinned: list[Any] = []  # blocks of what was added since the last pin
        self._step = 0
        self._not_before = 0

    def busy(self) -> bool:
        """Whether something is under way, or waits to be handed out."""
        return bool(self._under_way or self._open)

    def begin(self, now: float) -> None:
        """Begins a step."""
        self._step += 1
        for *_, known in self._groups:
            known.age(now)

    def ready(self) -> bool:
        """Whether saves can be planned now."""
        return bool(self._words) and self.blocks.room() > len(self._unpinned) and self._step >= self._not_before

    def add(self, tracked: Tracked, tokens: int) -> None:
        """Takes in what the first ``tokens`` of a request leave to be saved, as far as there is room; else later.

        Behind one or more calls, ``pin``.
        """
        if self._simple and self._add_one(tracked, tokens):
            return
        request = tracked.request
        hashes, cursor = request.block_hashes, tracked.cursor
        least = _NEVER
        for group, size, scale, window, known in self._groups:
            begin, end = cursor[group], min(tokens // size, len(hashes) // scale)
            if begin < end:
                table = self.tables.slice(request.request_id, group, begin, end)
                keys = hashes[(begin + 1) * scale - 1 : (begin + len(table)) * scale : scale]
                came = tracked.loaded[1] > begin * size or self.blocks.aged
                if came or window or len(keys) > self._room() or not known.none(keys):
                    begin = self._pick(tracked, group, begin, keys, table)
                elif keys:
                    self._take(tracked, group, begin, keys, table)
                    begin += len(keys)
                cursor[group] = begin
            least = min(least, (begin + 1) * size)
        tracked.next_tokens = least

    def pin(self) -> None:
        """Takes the pins of what was added."""
        if self._unpinned:
            self.blocks.pin(self._unpinned)
            self._unpinned = []

    def finish(self, jobs: Callable[[], int], boot: bytes, epoch: int) -> list[SaveJob]:
        """The jobs of what was added and pinned."""
        planned = []
        while self._open and self._words:
            pieces, blocks = self._one_job()
            sections = packed([piece.section for piece in pieces], len(blocks))
            save = _Save(jobs(), self._words.pop(), pieces, blocks)
            self._under_way[save.job] = save
            self.counts.planned += len(blocks)
            planned.append(SaveJob(save.job, boot, epoch, save.revoke, sections))
        if self._open:
            self.drop()  # no word was left
        return planned

    def drop(self) -> None:
        """Gives up what was added and not handed out."""
        self.pin()
        for piece in self._open:
            self._groups[piece.group][-1].withdraw(piece.hashes)
            self._again(piece, 0)
            self.blocks.unpin(piece.blocks)
        self._open = []

    def report(self, job: int, outcome: Outcome) -> bool:
        """Takes a report of one or more workers. Whether the job is a save."""
        save = self._under_way.get(job)
        if save is None:
            return False
        save.outcome = outcome if save.outcome is None else save.outcome.join(outcome)
        if save.outcome.ranks >= self.world:
            del self._under_way[job]
            self._over(save, save.outcome.statuses)
        return True

    def revoke(self) -> list[int]:
        """Revokes all saves. Gives their jobs; their blocks are free from the next step on."""
        revoked: list[int] = []
        if not self.revocable:
            return revoked
        for save in self._under_way.values():
            if save.pinned:
                revoked.append(save.job)
                self._let_go(save)
        return revoked

    def revoke_at_once(self) -> list[int]:
        """Revokes all saves between two steps, where the words can be reached; else none."""
        self.drop()
        return [] if self.revoke_now is None else self.revoke()

    def forget(self) -> None:
        """The agent has nothing any more: everything is to be offered again."""
        for *_, known in self._groups:
            known.forget()

    def _room(self) -> int:
        """Blocks that may still be added."""
        return self.blocks.room() - len(self._unpinned)

    def _add_one(self, tracked: Tracked, tokens: int) -> bool:
        """The same where a request filled one block, as it does while it answers: most calls are of that kind.

        False: this is not such a case, and nothing was done.
        """
        i, size = tracked.cursor[0], self._block_tokens
        begin, request = i * size, tracked.request
        hashes = request.block_hashes
        if not size <= tokens - begin < 2 * size or i == 0 or len(hashes) <= i:
            return False
        if tracked.loaded[1] > begin or self.blocks.aged:
            return False
        key, known = hashes[i], self._first_known
        if key not in known:
            block = self.tables.block(request.request_id, i)
            if block is None or self._room() <= 0:
                return False
            known.young.add(key)
            self._unpinned.append(block)
            self._open.append(
                _Piece(tracked, 0, i, (key,), (block,), short_section(hashes[i - 1], key, block.block_id))
            )
        tracked.cursor[0] = i + 1
        tracked.next_tokens = begin + 2 * size
        return True

    def _take(self, tracked: Tracked, group: int, first: int, keys: list[bytes], blocks: Sequence[Any]) -> None:
        """Adds a run of blocks as it is."""
        _, _, scale, _, known = self._groups[group]
        hashes = tracked.request.block_hashes
        known.young.update(keys)
        self._unpinned += blocks
        for at in range(0, len(keys), self.job_blocks):
            i = first + at
            parent = hashes[i * scale - 1] if i else b""
            some, these = keys[at : at + self.job_blocks], blocks[at : at + self.job_blocks]
            data = section(group, parent, some, [block.block_id for block in these])
            self._open.append(_Piece(tracked, group, i, some, these, data))

    def _pick(self, tracked: Tracked, group: int, begin: int, keys: list[bytes], table: Sequence[Any]) -> int:
        """Adds of a run of blocks those that have to be saved. Gives the new cursor: the first that has to wait."""
        _, size, _, _, known = self._groups[group]
        came = range(tracked.loaded[0] // size, tracked.loaded[1] // size)
        room = self._room()
        first = 0  # of the run at hand
        for i, (key, block) in enumerate(zip(keys, table, strict=True)):
            if block.is_null or begin + i in came or key in known or self.blocks.old(block):
                if first < i:
                    self._take(tracked, group, begin + first, keys[first:i], table[first:i])
                first = i + 1
            elif room <= 0:
                keys = keys[:i]
                break
            else:
                room -= 1
        if first < len(keys):
            self._take(tracked, group, begin + first, keys[first:], table[first : len(keys)])
        return begin + len(keys)

    def _one_job(self) -> tuple[list[_Piece], list[Any]]:
        """As many pieces as one job holds, and their blocks."""
        blocks: list[Any] = []
        count = 0
        for piece in self._open[:MAX_SECTIONS]:
            if blocks and len(blocks) + len(piece.blocks) > self.job_blocks:
                break
            blocks += piece.blocks
            count += 1
        pieces, self._open = self._open[:count], self._open[count:]
        return pieces, blocks

    def _over(self, save: _Save, statuses: bytes) -> None:
        self._words.append(save.revoke)
        if save.pinned:
            self.blocks.unpin(save.blocks)
        if len(statuses) == len(save.blocks) and not statuses.translate(None, _STORED):  # nearly always
            stored = statuses.count(BlockStatus.OK)
            self.counts.stored += stored
            self.counts.existed += len(statuses) - stored
            return
        self._partly_over(save, statuses)

    def _partly_over(self, save: _Save, statuses: bytes) -> None:
        left = iter(statuses)
        for piece in save.pieces:
            known = self._groups[piece.group][-1]
            for i, key in enumerate(piece.hashes):
                status = next(left, BlockStatus.FAILED)
                self._count(status)
                if status not in _STORED:
                    known.withdraw((key,))
                if status in _LATER:
                    self._again(piece, i)
        if any(status in statuses for status in _PAUSE):
            self._not_before = self._step + RETRY_STEPS

    def _let_go(self, save: _Save) -> None:
        if self.revoke_now is not None:
            self.revoke_now(save.revoke)
        save.pinned = False
        self.counts.revoked += len(save.blocks)
        self.blocks.unpin(save.blocks)

    def _again(self, piece: _Piece, i: int) -> None:
        tracked = piece.tracked
        tracked.cursor[piece.group] = min(tracked.cursor[piece.group], piece.first + i)
        tracked.next_tokens = 0
        if tracked.admitted and not tracked.over:
            self.due.add(tracked)

    def _count(self, status: int) -> None:
        if status == BlockStatus.OK:
            self.counts.stored += 1
        elif status in _STORED:
            self.counts.existed += 1
        elif status != BlockStatus.REVOKED:
            self.counts.refused += 1
