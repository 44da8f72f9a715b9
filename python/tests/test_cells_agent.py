"""Engines of all shapes share their blocks through a real agent, byte by byte."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from kvagent import messages as m
from kvagent.registration import Registration, identity_pairs
from kvagent.shm import SharedMemory, SyncWords
from kvagent.wire import packed, section
from tests.agent import eventually, run_of, wait
from tests.cells import BLOCKS, LAYOUTS, SHAPES, STATES, Engine

if TYPE_CHECKING:
    from kvagent.session import Event, Session
    from tests.agent import AgentProcess

SAVED = BLOCKS - 1  # the block that each engine saves


class Registered:
    """An engine whose workers are registered."""

    def __init__(self, agent: AgentProcess, ends: ExitStack, shape: tuple[int, int], heads: int, layout: str) -> None:
        caches: list[SharedMemory] = []

        def allocate(size: int) -> Any:
            caches.append(SharedMemory(size))
            ends.callback(caches[-1].close)
            return caches[-1].view

        self.name = f"{shape[0]}x{shape[1]}"
        self.engine = Engine(*shape, heads, layout, allocate)
        self.workers: list[Session] = []
        self.words: list[SyncWords] = []
        for rank, cache in enumerate(caches):
            words = SyncWords(1)
            ends.callback(words.close)
            session = agent.connect()
            ends.callback(session.close)
            self.epoch = session.register(
                Registration(
                    instance=self.name, role=m.Role.WORKER, rank=rank, world=len(caches), shards=self.engine.plan.count,
                    identity=identity_pairs({"model": f"{heads} {layout}", "dtype": "d", "tenant": ""}),
                    groups=(m.Group(STATES, BLOCKS),), hash_tokens=STATES, sync=words.sync(0),
                    regions=[(words.memory.region(0), words.memory.fd), (cache.region(1), cache.fd)],
                    held=self.engine.memory(rank).held,
                )
            ).epoch  # fmt: skip
            words.step = 1
            self.workers.append(session)

    def hash(self) -> bytes:
        """Return the hash of the block that this engine saves."""
        return self.name.encode().ljust(32, b".")

    def save(self) -> None:
        self.engine.fill()
        jobs = [one.save(run_of([self.hash()], [SAVED]), epoch=self.epoch, step=1) for one in self.workers]
        statuses = {one for worker, job in zip(self.workers, jobs, strict=True) for one in _done(worker, job)}
        assert statuses <= {m.BlockStatus.OK, m.BlockStatus.EXISTS, m.BlockStatus.IN_PROGRESS}

    def load(self, hashes: list[bytes]) -> None:
        sections = packed([section(0, b"", [one], [block]) for block, one in enumerate(hashes)], len(hashes))
        jobs = [one.load(sections, epoch=self.epoch, step=1) for one in self.workers]
        for worker, job in zip(self.workers, jobs, strict=True):
            assert set(_done(worker, job)) == {m.BlockStatus.OK}


def _done(session: Session, job: int) -> bytes:
    events: list[Event] = []
    done = wait(session, m.Done, events)
    assert done.job == job
    return done.statuses


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [8, 4, 2, 1])
def test_every_shape_loads_what_every_other_saved(agent: AgentProcess, layout: str, heads: int) -> None:
    with ExitStack() as ends:
        engines = [Registered(agent, ends, shape, heads, layout) for shape in SHAPES]
        for one in engines:
            one.save()
        for one in engines:
            one.load([other.hash() for other in engines])
            one.engine.check(dict.fromkeys(range(BLOCKS), SAVED))
        status = agent.status()
        assert (status["blocks_stored"], status["engines"]) == (len(SHAPES), len(SHAPES))


def test_a_block_is_missing_until_all_cells_are_stored(agent: AgentProcess) -> None:
    with ExitStack() as ends:
        saver = Registered(agent, ends, (2, 2), 8, "LBHNC")
        loader = Registered(agent, ends, (1, 1), 8, "LBHNC")
        sections = run_of([saver.hash()], [SAVED])
        for rank, worker in enumerate(saver.workers):
            job = loader.workers[0].load(sections, epoch=loader.epoch, step=1)
            assert _done(loader.workers[0], job) == bytes([m.BlockStatus.MISSING]), f"{rank} of 4 ranks saved"
            assert _done(worker, worker.save(sections, epoch=saver.epoch, step=1)) == bytes([m.BlockStatus.OK])
        job = loader.workers[0].load(sections, epoch=loader.epoch, step=1)
        assert _done(loader.workers[0], job) == bytes([m.BlockStatus.OK])
        again = loader.workers[0].save(sections, epoch=loader.epoch, step=1)
        assert _done(loader.workers[0], again) == bytes([m.BlockStatus.EXISTS])
        part = run_of([b"p" * 32], [0])
        assert _done(saver.workers[0], saver.workers[0].save(part, epoch=saver.epoch, step=1)) == b"\0"
        whole = loader.workers[0].save(part, epoch=loader.epoch, step=1)
        assert _done(loader.workers[0], whole) == b"\0", "some cells were stored, the others are now"
        eventually(lambda: agent.status()["blocks_stored"] == 2, "two blocks")
