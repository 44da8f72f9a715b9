"""Which blocks a step saves: plans jobs, keeps their pins and words until every worker has reported them.

A save goes out in the step that computes its last block, or later; the agent waits for that step. Its blocks are pinned
until the workers report it, so the request may end meanwhile. A save can be revoked: the agent reads the word after it
has copied and before it stores, so the pins can go at once.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvagent.messages import BlockStatus, Section
from kvagent.vllm.plan import Outcome, SaveJob
from kvagent.wire import MAX_JOB_BLOCKS, MAX_SECTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.vllm.blocks import Blocks, Tables
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.tracked import Tracked

REVOKES = 256  # words, so that many saves under way
RECENT_S = 10.0  # for that long a block that the agent said it has is not offered again
MAX_RECENT = 65536  # blocks remembered so
RETRY_STEPS = 16  # before what found the agent busy is offered again

_STORED = (BlockStatus.OK, BlockStatus.EXISTS, BlockStatus.IN_PROGRESS)
_LATER = (BlockStatus.BUSY, BlockStatus.REVOKED, BlockStatus.FAILED, BlockStatus.TIMED_OUT, BlockStatus.OFF)


@dataclass(slots=True)
class _Piece:
    """One section of a job."""

    tracked: Tracked
    group: int
    first: int
    """Number of its first block in the request."""
    hashes: list[bytes]
    blocks: list[Any]
    parent: bytes


@dataclass(eq=False, slots=True)
class _Save:
    job: int
    revoke: int
    pieces: list[_Piece]
    outcome: Outcome | None = None
    pinned: bool = True

    def blocks(self) -> list[Any]:
        return [block for piece in self.pieces for block in piece.blocks]


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
    revoke_now: Callable[[int], None] | None = None
    revocable: bool = True
    """Whether the agent knows revocation words."""
    counts: SaveCounts = field(default_factory=SaveCounts)

    def __post_init__(self) -> None:
        self._under_way: OrderedDict[int, _Save] = OrderedDict()
        self._offered: set[tuple[int, bytes]] = set()
        self._recent: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        self._words = list(range(REVOKES))
        self._open: list[_Piece] = []
        self._step = 0
        self._not_before = 0

    def busy(self) -> bool:
        """Whether something is under way, or waits to be handed out."""
        return bool(self._under_way or self._open)

    def begin(self) -> None:
        """Begins a step."""
        self._step += 1

    def ready(self) -> bool:
        """Whether saves can be planned now."""
        return bool(self._words) and self.blocks.room() > 0 and self._step >= self._not_before

    def add(self, tracked: Tracked, tokens: int, now: float) -> None:
        """Takes in what the first ``tokens`` of a request leave to be saved, as far as there is room; else later."""
        hashes = tracked.request.block_hashes
        least = 1 << 62
        for group, spec in enumerate(self.geometry.groups):
            scale = self.geometry.scale(group)
            ready = min(tokens // spec.block_tokens, len(hashes) // scale)
            if tracked.cursor[group] < ready:
                tracked.cursor[group] = self._add_group(tracked, group, scale, ready, now)
            least = min(least, (tracked.cursor[group] + 1) * spec.block_tokens)
        tracked.next_tokens = least

    def finish(self, jobs: Callable[[], int], boot: bytes, epoch: int) -> list[SaveJob]:
        """The jobs of what was added."""
        planned = []
        while self._open and self._words:
            pieces: list[_Piece] = []
            blocks = 0
            while self._open and len(pieces) < MAX_SECTIONS and blocks + len(self._open[0].blocks) <= MAX_JOB_BLOCKS:
                pieces.append(self._open.pop(0))
                blocks += len(pieces[-1].blocks)
            save = _Save(jobs(), self._words.pop(), pieces)
            self._under_way[save.job] = save
            self.counts.planned += blocks
            sections = tuple(
                Section.of(p.group, p.hashes, [b.block_id for b in p.blocks], p.parent) for p in save.pieces
            )
            planned.append(SaveJob(save.job, boot, epoch, save.revoke, sections))
        self.drop()  # no word was left
        return planned

    def drop(self) -> None:
        """Gives up what was added and not handed out."""
        for piece in self._open:
            self._withdraw_offer(piece)
            for i in range(len(piece.hashes)):
                self._again(piece, i)
            self.blocks.unpin(piece.blocks)
        self._open = []

    def report(self, job: int, outcome: Outcome, now: float) -> bool:
        """Takes a report of one or more workers. Whether the job is a save."""
        save = self._under_way.get(job)
        if save is None:
            return False
        save.outcome = outcome if save.outcome is None else save.outcome.join(outcome)
        if save.outcome.ranks >= self.world:
            del self._under_way[job]
            self._over(save, save.outcome.statuses, now)
        return True

    def revoke(self, enough: Callable[[], bool] = lambda: False) -> list[int]:
        """Revokes saves, oldest first, until ``enough``. Gives their jobs; their blocks are free from the next step."""
        revoked: list[int] = []
        if not self.revocable:
            return revoked
        for save in self._under_way.values():
            if enough():
                break
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
        self._recent.clear()

    def _add_group(self, tracked: Tracked, group: int, scale: int, ready: int, now: float) -> int:
        """Gives the new cursor: the first block that has to wait."""
        begin = tracked.cursor[group]
        size = self.geometry.groups[group].block_tokens
        came = range(tracked.loaded[0] // size, tracked.loaded[1] // size)
        hashes = tracked.request.block_hashes
        room = self.blocks.room()
        run: _Piece | None = None
        taken: list[Any] = []
        table = self.tables.slice(tracked.request.request_id, group, begin, ready)
        ready = begin + len(table)
        for i, block in enumerate(table, begin):
            key = hashes[(i + 1) * scale - 1]
            if block.is_null or i in came or self._known((group, key), now) or self.blocks.old(block):
                run = None
                continue
            if room <= 0:
                ready = i
                break
            room -= 1
            self._offered.add((group, key))
            taken.append(block)
            if run is None or len(run.blocks) >= MAX_JOB_BLOCKS:
                run = _Piece(tracked, group, i, [], [], hashes[i * scale - 1] if i else b"")
                self._open.append(run)
            run.hashes.append(key)
            run.blocks.append(block)
        self.blocks.pin(taken)
        return ready

    def _known(self, key: tuple[int, bytes], now: float) -> bool:
        return key in self._offered or self._recent.get(key, 0.0) > now

    def _over(self, save: _Save, statuses: bytes, now: float) -> None:
        self._words.append(save.revoke)
        if save.pinned:
            self.blocks.unpin(save.blocks())
        left = iter(statuses)
        for piece in save.pieces:
            self._withdraw_offer(piece)
            for i, key in enumerate(piece.hashes):
                status = next(left, BlockStatus.FAILED)
                self._count(status)
                if status in _STORED:
                    self._remember((piece.group, key), now)
                elif status in _LATER:
                    self._again(piece, i)
        if BlockStatus.BUSY in statuses or BlockStatus.OFF in statuses or BlockStatus.FAILED in statuses:
            self._not_before = self._step + RETRY_STEPS

    def _let_go(self, save: _Save) -> None:
        if self.revoke_now is not None:
            self.revoke_now(save.revoke)
        save.pinned = False
        self.counts.revoked += sum(len(piece.blocks) for piece in save.pieces)
        self.blocks.unpin(save.blocks())

    def _again(self, piece: _Piece, i: int) -> None:
        cursor = piece.tracked.cursor
        cursor[piece.group] = min(cursor[piece.group], piece.first + i)
        piece.tracked.next_tokens = 0

    def _withdraw_offer(self, piece: _Piece) -> None:
        self._offered.difference_update((piece.group, key) for key in piece.hashes)

    def _remember(self, key: tuple[int, bytes], now: float) -> None:
        self._recent[key] = now + RECENT_S
        self._recent.move_to_end(key)
        if len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)

    def _count(self, status: int) -> None:
        if status == BlockStatus.OK:
            self.counts.stored += 1
        elif status in _STORED:
            self.counts.existed += 1
        elif status != BlockStatus.REVOKED:
            self.counts.refused += 1
