"""Lazy offload: which blocks are saved, and when, by vLLM's queue of free blocks as it behaves."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.messages import BlockStatus, Group
from kvagent.vllm.counters import Counts
from kvagent.vllm.geometry import Geometry
from kvagent.vllm.guests import lazy
from kvagent.vllm.guests.lazy import LazySaves
from kvagent.vllm.options import OptionError, Options, parse
from kvagent.vllm.scheduler.requests import Blocks, Hurry, Tracked
from kvagent.vllm.scheduler.saves import HOLD_S
from tests.sides import running

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

BLOCK = 16
WATERMARK = 8  # blocks


class Block:
    """Like vLLM's KVCacheBlock."""

    def __init__(self, number: int) -> None:
        self.block_id = number
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.is_null = False
        self.prev_free_block: Block | None = None
        self.next_free_block: Block | None = None
        self.holds: Any = None
        """What a step computed into it last."""


class Queue:
    """Like vLLM's FreeKVCacheBlockQueue."""

    def __init__(self) -> None:
        self.fake_free_list_head, self.fake_free_list_tail = Block(-1), Block(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.num_free_blocks = 0

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        self._insert(self.fake_free_list_head, blocks)

    def append_n(self, blocks: Sequence[Block]) -> None:
        assert self.fake_free_list_tail.prev_free_block is not None
        self._insert(self.fake_free_list_tail.prev_free_block, blocks)

    def remove(self, block: Block) -> None:
        before, after = block.prev_free_block, block.next_free_block
        assert before is not None
        assert after is not None, "a block that is not in the queue"
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def all(self) -> list[Block]:
        block, found = self.fake_free_list_head.next_free_block, []
        while block is not None and block is not self.fake_free_list_tail:
            found.append(block)
            block = block.next_free_block
        return found

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        assert cursor is None
        return iter(self.all())

    def _insert(self, before: Block, blocks: Sequence[Block]) -> None:
        for block in blocks:
            after = before.next_free_block
            assert after is not None
            before.next_free_block = after.prev_free_block = block
            block.prev_free_block, block.next_free_block = before, after
            before = block
        self.num_free_blocks += len(blocks)


class Pool:
    """Like vLLM's BlockPool, and the block tables of its requests."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks
        self.blocks = [Block(i) for i in range(blocks)]
        self.free_block_queue = Queue()
        self.free_block_queue.append_n(self.blocks)
        self.tables: dict[str, list[Block]] = {}

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_new_blocks(self, count: int) -> list[Block]:
        taken = self.free_block_queue.all()[:count]
        assert len(taken) == count
        for block in taken:
            self.free_block_queue.remove(block)
            block.block_hash = None
            block.ref_cnt += 1
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        first: list[Block] = []
        last: list[Block] = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (last if block.block_hash else first).append(block)
        self.free_block_queue.prepend_n(first)
        self.free_block_queue.append_n(last)

    def reset_prefix_cache(self) -> bool:
        if any(block.ref_cnt for block in self.blocks):
            return False
        for block in self.blocks:
            block.block_hash = None
        return True

    def block(self, request: str, i: int) -> Block | None:
        table = self.tables[request]
        return table[i] if i < len(table) else None


class Engine:
    """A scheduler's saves with lazy offload, and the agent that answers them."""

    def __init__(self, blocks: int = 64, pins: float = 0.5, watermark: int = WATERMARK) -> None:
        self.pool = Pool(blocks)
        table = lambda name: SimpleNamespace(blocks=(self.pool.tables[name],))  # noqa: E731
        self.blocks = Blocks(SimpleNamespace(block_pool=self.pool, get_blocks=table), pins)
        geometry = Geometry((Group(BLOCK, 64),), BLOCK)
        self.counts = Counts()
        self.saves = self.lazy = LazySaves(geometry, self.blocks, self.counts, watermark)
        session = SimpleNamespace(boot=b"", epoch=1)
        self.agent: Any = SimpleNamespace(session=session, space=b"", targets=lambda: ())
        self.now = 0.0
        self.steps = 0
        self.weights = 0
        self.jobs = 0
        self.stored: list[bytes] = []
        """The keys that were saved, in order."""
        self.inflight: dict[int, list[tuple[bytes, Block]]] = {}

    def key(self, prompt: str, i: int) -> bytes:
        return f"{prompt}{i:03}".encode().ljust(32, b".")

    def request(self, name: str, prompt: str, blocks: int, *, offer: Any = None) -> Tracked:
        request = SimpleNamespace(
            request_id=name, block_hashes=[self.key(prompt, i) for i in range(blocks)], num_tokens=blocks * BLOCK,
        )  # fmt: skip
        tracked = running(request, tokens=BLOCK)
        tracked.saving.hurry = Hurry.AWAITED if offer else Hurry.USUAL
        return tracked

    def compute(self, name: str, prompt: str, blocks: int, *, hits: Sequence[Block] = (), **more: Any) -> Tracked:
        """Admit a request that finds its first blocks cached; compute and cache the others."""
        self.pool.touch(hits)
        tracked = self.request(name, prompt, blocks, **more)
        tracked.own = len(hits) * BLOCK
        self.lazy.admit(tracked)
        table = [*hits, *self.pool.get_new_blocks(blocks - len(hits))]
        self.pool.tables[name] = table
        for block, key in zip(table, tracked.request.block_hashes, strict=True):
            if block.block_hash is None:
                block.block_hash, block.holds = key + b"\0\0\0\0", (key, self.weights)
        return tracked

    def note(self, tracked: Tracked) -> None:
        if tracked.request.num_tokens >= tracked.saving.next_tokens:
            self.lazy.add(tracked, tracked.request.num_tokens)

    def free(self, name: str) -> None:
        self.pool.free_blocks(reversed(self.pool.tables.pop(name)))

    def serve(self, name: str, prompt: str, blocks: int, **more: Any) -> list[Block]:
        """Run a request from its admission to its end. Return its blocks."""
        tracked = self.compute(name, prompt, blocks, **more)
        self.note(tracked)
        table = self.pool.tables[name]
        self.free(name)
        return table

    def begin(self) -> None:
        """Begin a step."""
        self.steps += 1
        self.saves.begin(self.now)

    def plan(self) -> list[int]:
        """Plan the saves of a step. Return their jobs."""
        self.now += 0.001
        self.begin()
        if self.lazy.due() and self.saves.ready():
            self.lazy.collect()
        jobs = self.saves.finish(self.next_job, self.agent)
        for job in jobs:
            save = self.saves._inflight[job.job]
            keys = [key for run in save.runs for key in run.hashes]
            assert all(block.ref_cnt for block in save.blocks), "a block that is not pinned"
            assert job.sections.blocks == len(keys) == len(save.blocks)
            self.inflight[job.job] = list(zip(keys, save.blocks, strict=True))
        return [job.job for job in jobs]

    def next_job(self) -> int:
        self.jobs += 1
        return self.jobs

    def answer(self, job: int, status: int = BlockStatus.OK) -> None:
        """Copy the blocks of a job, and report it."""
        saved = self.inflight.pop(job)
        if status == BlockStatus.OK:
            for key, block in saved:
                assert block.holds == (key, self.weights), f"{key!r} is stored with the content {block.holds}"
            self.stored += [key for key, _ in saved]
        self.saves.report(job, bytes([status] * len(saved)))

    def step(self) -> None:
        for job in self.plan():
            self.answer(job)


def ids(blocks: Iterable[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_a_block_is_saved_when_its_eviction_comes_near_and_once() -> None:
    engine = Engine(64)
    engine.serve("a", "a", 20)
    for i in range(3):  # the 44 other blocks are taken first
        engine.step()
        engine.serve(f"b{i}", f"b{i}", 12)
    assert engine.stored == [], "saved though others are evicted before"
    engine.step()
    assert engine.stored == []
    engine.serve("c", "c", 4)  # leaves 4 without content; after them come those of a, from its end
    engine.step()
    assert engine.stored == [engine.key("a", i) for i in range(16, 20)]
    engine.step()
    assert len(engine.stored) == 4, "saved again"
    assert engine.counts.saves_missed == 0


def test_the_order_of_eviction_is_that_without_saves() -> None:
    """At the tail of the queue, all blocks would come near their eviction; at the head, older ones
    would never be evicted.
    """
    engine = Engine(32)
    engine.serve("a", "a", 14)
    engine.serve("b", "b", 16)
    before = ids(engine.pool.free_block_queue.all())[2:]
    engine.pool.get_new_blocks(2)
    for _ in range(9):
        engine.step()
    assert len(engine.stored) == WATERMARK, "without any eviction more is saved"
    evicted = []
    for _ in range(10):
        evicted += ids(engine.pool.get_new_blocks(3))
        engine.step()
    assert evicted == before
    assert (len(engine.stored), engine.counts.saves_missed) == (30, 0)


def test_a_section_has_its_parent_and_begins_at_the_root() -> None:
    engine = Engine(32)
    engine.serve("a", "a", 30)
    engine.pool.get_new_blocks(2)
    engine.lazy.due()
    engine.lazy.collect()
    (run,) = engine.lazy._open
    assert list(run.hashes) == [engine.key("a", i) for i in range(22, 30)]
    assert run.notes[0].parent == engine.key("a", 21)
    assert run.section.count(engine.key("a", 21)) == 1, "the section does not name its parent"


def test_a_block_that_was_reused_is_not_saved_under_its_old_key() -> None:
    """It may have got the same hash again, by a request that must not be saved."""
    engine = Engine(16, watermark=4)
    engine.serve("a", "a", 16)
    engine.plan()  # pins 4; the others are not near yet
    noted = dict(engine.lazy.unsaved)
    engine.compute("b", "b", 12)  # in the other 12, with the same hashes as before, and not noted
    for block in engine.pool.tables["b"]:
        block.block_hash, block.holds = noted[block.block_id].block_hash, "of other content"
    engine.free("b")
    for _ in range(3):
        engine.step()
    assert all(engine.lazy.unsaved.get(block.block_id) is None for block in engine.pool.blocks)
    assert engine.counts.saves_missed == 12


def test_a_block_that_lost_its_hash_is_not_saved() -> None:
    """A load that failed loses the blocks computed on it, for example."""
    engine = Engine(16, watermark=4)
    for block in engine.serve("a", "a", 16):
        block.block_hash = None
    engine.step()
    assert engine.stored == []


def test_old_weights_are_not_saved() -> None:
    engine = Engine(16, watermark=4)
    engine.serve("a", "a", 16)
    (job,) = engine.plan()
    engine.weights += 1
    engine.blocks.new_weights()
    engine.answer(job, BlockStatus.BUSY)  # it is noted again
    for i in range(8):
        engine.serve(f"b{i}", f"b{i}", 1)  # takes a block, and so brings others nearer
        engine.step()
    assert not [key for key in engine.stored if key.startswith(b"a")]


def test_nothing_is_noted_after_a_reset() -> None:
    engine = Engine(16, watermark=4)
    engine.serve("a", "a", 16)
    assert len(engine.lazy.unsaved) == 16
    assert engine.pool.reset_prefix_cache()
    engine.lazy.clear()
    engine.serve("b", "b", 16)
    assert engine.counts.saves_missed == 0


@pytest.mark.parametrize("status", [BlockStatus.BUSY, BlockStatus.FAILED, BlockStatus.TIMED_OUT])
def test_what_the_agent_refused_is_offered_again(status: BlockStatus) -> None:
    """Not in each step, but when vLLM takes blocks."""
    engine = Engine(16, watermark=4)
    engine.serve("a", "a", 16)
    (job,) = engine.plan()
    engine.answer(job, status)
    for _ in range(20):
        assert engine.plan() == []
    engine.pool.get_new_blocks(1)
    engine.step()
    assert sorted(engine.stored) == [engine.key("a", i) for i in range(11, 15)]
    assert engine.counts.saves_missed == 1


def test_what_was_revoked_is_noted_at_once_and_only_while_it_is_there() -> None:
    engine = Engine(16, watermark=4)
    engine.serve("a", "a", 16)
    (job,) = engine.plan()
    assert engine.saves.revoke() == [job]
    assert engine.blocks.saving == 0
    engine.compute("b", "b", 2)  # takes two of them, which get the same hashes with other content
    for i, block in zip((15, 14), engine.pool.tables["b"], strict=True):
        block.block_hash, block.holds = engine.key("a", i) + b"\0\0\0\0", "of other content"
    engine.answer(job, BlockStatus.REVOKED)
    assert engine.counts.saves_missed == 2
    for _ in range(3):
        engine.step()
    engine.free("b")
    for _ in range(3):
        engine.step()
    assert sorted(engine.stored) == [engine.key("a", i) for i in range(10, 14)]
    engine.pool.get_new_blocks(12)  # now the other content is near its eviction
    engine.step()
    assert engine.stored[4:] == [engine.key("a", 0), engine.key("a", 1)]


def test_a_save_that_takes_too_long_is_revoked_and_repeated() -> None:
    engine = Engine(16, watermark=4)
    engine.serve("a", "a", 16)
    (job,) = engine.plan()
    for _ in range(3):
        engine.now += HOLD_S
        engine.begin()
    assert engine.saves.revoke_overdue() == [job]
    engine.answer(job, BlockStatus.REVOKED)
    engine.pool.get_new_blocks(1)
    engine.step()
    assert sorted(engine.stored) == [engine.key("a", i) for i in range(11, 15)]


def test_a_block_in_use_again_is_not_saved_before_it_is_free() -> None:
    engine = Engine(32)
    table = engine.serve("a", "a", 16)
    engine.serve("pad", "pad", 16)
    again = engine.compute("b", "a", 16, hits=table)
    engine.note(again)
    for _ in range(3):
        engine.step()
    assert all(key.startswith(b"pad") for key in engine.stored)
    assert len(engine.stored) == WATERMARK


def test_blocks_that_requests_use_bring_others_nearer() -> None:
    engine = Engine(64, watermark=32)
    engine.serve("a", "a", 32)
    engine.serve("b", "b", 32)
    engine.step()
    head = engine.pool.free_block_queue.all()[:32]
    assert len(engine.stored) == 32
    engine.compute("again", "a", 32, hits=head[::-1])
    engine.step()
    assert len(engine.stored) == 64, "others are as near as those were, and not saved"


def test_blocks_that_vllm_does_not_cache_are_saved_at_once() -> None:
    engine = Engine(64)
    tracked = engine.compute("a", "a", 6)
    for block in engine.pool.tables["a"][2:4]:
        block.block_hash = None
    engine.note(tracked)
    engine.step()
    assert engine.stored == [engine.key("a", 2), engine.key("a", 3)]
    assert tracked.saving.cursor == [6]


def test_blocks_that_are_filled_one_by_one_are_noted_like_others() -> None:
    whole, single = Engine(64), Engine(64)
    whole.note(whole.compute("a", "a", 20))
    tracked = single.compute("a", "a", 20)
    tracked.request.block_hashes, hashes = [], tracked.request.block_hashes
    for tokens in range(1, 20 * BLOCK + 1):
        tracked.request.block_hashes = hashes[: tokens // BLOCK]
        if tokens >= tracked.saving.next_tokens:
            single.lazy.add(tracked, tokens)
        assert tracked.saving.cursor == [tokens // BLOCK]
        assert tracked.saving.next_tokens == (tokens // BLOCK + 1) * BLOCK
    assert single.lazy.unsaved == whole.lazy.unsaved
    assert len(whole.lazy.unsaved) == 20


def test_offered_requests_are_saved_at_once() -> None:
    engine = Engine(64)
    engine.note(engine.compute("a", "a", 6, offer=SimpleNamespace(confirm_until=0.0)))
    engine.step()
    assert engine.stored == [engine.key("a", i) for i in range(6)]


def test_what_is_in_use_is_saved_when_few_blocks_are_free() -> None:
    engine = Engine(64)
    long = engine.compute("a", "a", 50)
    engine.lazy.due()
    engine.note(long)
    engine.step()
    assert engine.stored == []
    more = engine.compute("b", "b", 8)  # 6 are free now
    engine.lazy.due()
    assert engine.lazy.pressing
    engine.note(more)
    for _ in range(9):
        engine.step()
    assert sorted(engine.stored) == sorted(
        [engine.key("a", i) for i in range(50)] + [engine.key("b", i) for i in range(8)]
    )
    assert engine.blocks.saving == 0


def test_few_steps_look_at_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(400, watermark=100)
    engine.serve("a", "a", 400)
    looks = 0
    queue = engine.pool.free_block_queue
    blocks_after = queue.iter_blocks_after

    def counted(cursor: Block | None) -> Iterator[Block]:
        nonlocal looks
        looks += 1
        return blocks_after(cursor)

    monkeypatch.setattr(queue, "iter_blocks_after", counted)
    for _ in range(3):
        engine.step()
    assert (looks, len(engine.stored)) == (2, 100), "one to find them, one to put them back"
    for i in range(100):
        engine.serve(f"b{i}", f"b{i}", 1)
        engine.step()
    assert looks <= 2 + 2 * lazy.LOOKS
    assert engine.counts.saves_missed == 0


def test_pins_bound_what_is_saved_at_once() -> None:
    engine = Engine(64, pins=0.05)
    engine.serve("a", "a", 64)
    jobs = engine.plan()
    assert engine.blocks.saving == engine.blocks.max_saving == 3
    assert engine.plan() == []
    for job in jobs:
        engine.answer(job)
    for _ in range(3):
        engine.step()
    assert len(engine.stored) == WATERMARK


@pytest.mark.parametrize("times", range(8))
def test_random_runs_save_what_they_evict(times: int) -> None:
    """Every block that is evicted was saved before, none holds anything else than its key says, and
    the queue is whole.
    """
    seed = random.randrange(1 << 30) + times
    dice = random.Random(seed)
    engine = Engine(96, watermark=24)
    live: list[str] = []
    prompts = [(f"p{i}-", dice.randint(1, 12)) for i in range(30)]
    for i in range(300):
        prompt, blocks = dice.choice(prompts)
        cached = {block.block_hash: block for block in engine.pool.blocks}
        hits = []
        for j in range(blocks - 1):
            block = cached.get(engine.key(prompt, j) + b"\0\0\0\0")
            if block is None:
                break
            hits.append(block)
        if engine.pool.get_num_free_blocks() >= blocks + 8:
            name = f"r{i}"
            engine.note(engine.compute(name, prompt, blocks, hits=hits))
            live.append(name)
        while live and (dice.random() < 0.5 or engine.pool.get_num_free_blocks() < 48):
            engine.free(live.pop(dice.randrange(len(live))))
        jobs = engine.plan()
        for job in [*engine.inflight] if dice.random() < 0.8 else jobs[:1]:
            engine.answer(job, BlockStatus.OK if dice.random() < 0.95 else BlockStatus.TIMED_OUT)
        free = engine.pool.free_block_queue.all()
        assert len(set(ids(free))) == len(free) == engine.pool.get_num_free_blocks(), f"seed {seed}"
        assert all(block.ref_cnt == 0 for block in free), f"seed {seed}"
    for job in [*engine.inflight]:
        engine.answer(job)
    for name in live:
        engine.free(name)
    engine.pool.free_blocks(engine.pool.get_new_blocks(24 // lazy.LOOKS))  # so many that all is looked at again
    engine.step()
    for job in [*engine.inflight]:
        engine.answer(job)
    assert engine.blocks.saving == 0, f"seed {seed}"
    assert engine.pool.get_num_free_blocks() == 96, f"seed {seed}"
    assert engine.stored, f"seed {seed}"
    near = ids(engine.pool.free_block_queue.all()[: 24 - 24 // lazy.LOOKS])
    left = [one for one in near if one in engine.lazy.unsaved]
    assert not left, f"{left} near their eviction are not saved, seed {seed}"


def test_the_watermark_is_at_least_what_two_steps_take() -> None:
    geometry = Geometry((Group(16, 64), Group(32, 64)), 16)
    options = Options(offload="lazy", watermark_percent=10)

    def watermark(step_tokens: int, blocks: int) -> int:
        made = lazy.saves_of(options, step_tokens)
        return made(geometry, Blocks(SimpleNamespace(block_pool=Pool(blocks)), 0.05), Counts())._watermark

    assert watermark(0, 1000) == 100
    assert watermark(1024, 1000) == 2 * (64 + 32)
    assert watermark(8192, 1000) == 500
    assert watermark(0, 5) == 1


def test_options() -> None:
    assert parse({}).offload == "eager"
    assert parse({"offload": "lazy"}).offload == "lazy"
    with pytest.raises(OptionError, match="offload: 'late', allowed is one of eager, lazy"):
        parse({"offload": "late"})
