"""A worker's budget, with the real agent."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from kvagent import messages as m
from kvagent.errors import SessionEnded
from kvagent.registration import Registration
from kvagent.shm import SharedMemory, SyncWords
from kvagent.vllm.link import Link
from kvagent.wire import packed, section
from tests.agent import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, IDENTITY, LAYERS, Engine, chain, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent import AgentProcess

WHOLE = LAYERS * BLOCK_BYTES


@pytest.fixture
def engine(agent: AgentProcess) -> Iterator[Engine]:
    one = Engine(agent, "capped")
    yield one
    one.close()


def save(engine: Engine, name: str, count: int) -> bytes:
    blocks = list(range(1, count + 1))
    engine.compute(blocks, 7)
    sections = packed([section(0, b"", chain(name, count), blocks)], count)
    return engine.done(engine.worker.save(sections, epoch=engine.worker.epoch, step=engine.step))


def test_a_budget_limits_what_is_stored(agent: AgentProcess, engine: Engine) -> None:
    engine.worker.send(m.Budget(4 * WHOLE))
    for name in ("first", "second"):
        assert save(engine, name, 3) == bytes(3)
    (owner,) = agent.status()["pool"]["owners"]["list"]
    assert (owner["name"], owner["bytes"], owner["budget_bytes"]) == ("capped", 4 * WHOLE, 4 * WHOLE)
    assert owner["evicted"] == 2


def test_a_budget_that_cannot_be_kept_ends_the_session(engine: Engine) -> None:
    engine.worker.send(m.Budget(WHOLE - 1))
    with pytest.raises(SessionEnded, match=f"budget: {WHOLE - 1} bytes, allowed: 0, or at least {WHOLE}"):
        engine.worker.ping(10.0)


@pytest.fixture
def memory() -> Iterator[tuple[SharedMemory, SyncWords]]:
    cache, words = SharedMemory(LAYERS * BLOCKS * BLOCK_BYTES), SyncWords(4)
    yield cache, words
    words.close()
    cache.close()


def linked(agent: AgentProcess, memory: tuple[SharedMemory, SyncWords], budget: int) -> Link:
    cache, words = memory

    def registration() -> Registration:
        return Registration(
            instance="linked", identity=IDENTITY, groups=(m.Group(BLOCK_TOKENS, BLOCKS),), hash_tokens=BLOCK_TOKENS,
            world=1, shards=1, role=m.Role.WORKER, rank=0, sync=words.sync(0),
            regions=[(words.memory.region(0), words.memory.fd), (cache.region(1), cache.fd)],
            held={0: {0: [m.Segment(1, i * BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES) for i in range(LAYERS)]}},
        )  # fmt: skip

    return Link(str(agent.folder), "rank 0", registration, budget)


def close(link: Link) -> None:
    if (last := link.close()) is not None:
        last.close()


def test_a_worker_tells_its_budget_before_its_session_is_used(agent: AgentProcess, memory: Any) -> None:
    link = linked(agent, memory, 8 * WHOLE)
    assert link.wait(20.0) is not None
    (owner,) = agent.status()["pool"]["owners"]["list"]
    assert (owner["name"], owner["budget_bytes"]) == ("linked", 8 * WHOLE)
    close(link)


def test_without_its_budget_a_worker_has_no_session(
    agent: AgentProcess, memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.kvagent"):
        link = linked(agent, memory, WHOLE - 1)
        eventually(lambda: "bytes, allowed: 0, or at least" in caplog.text, "the reason in the log")
    assert link.current() is None
    close(link)
    eventually(lambda: agent.status()["pool"]["owners"]["list"] == [], "an agent without owners")
