"""Loads by stages against the real agent: each stage counts when its bytes have arrived, and only
then.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from kvagent import messages as m
from kvagent.errors import SessionEnded
from kvagent.messages import BlockStatus
from kvagent.wire import packed, section
from tests.agent import BLOCK_BYTES, BLOCKS, LAYERS, Engine, chain, content, eventually
from tests.holding import HoldingAgent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HASHES = chain("staged", 3)
LAST_FIRST = struct.pack("<2H", 1, 0)  # the second layer is the first stage


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[HoldingAgent]:
    one = HoldingAgent(tmp_path / "staged")
    yield one
    one.close()


@pytest.fixture
def engine(agent: HoldingAgent) -> Iterator[Engine]:
    """An engine with stages, three blocks of which are stored."""
    one = Engine(agent, "staged", stages=2)
    one.compute([1, 2, 3], 7)
    job = one.worker.save(
        packed([section(0, b"", HASHES, [1, 2, 3])], 3), epoch=one.worker.epoch, step=one.step
    )  # fmt: skip
    assert one.done(job) == bytes(3)
    one.worker.send(m.Stages(one.words.stages_off, 2, LAST_FIRST))
    yield one
    one.close()


def load(engine: Engine, word: int = 0) -> int:
    """Load the stored blocks by stages, to blocks 11 to 13."""
    engine.words.landed[word] = 0
    return engine.worker.staged_load(
        packed([section(0, b"", HASHES, [11, 12, 13])], 3), epoch=engine.worker.epoch, step=engine.step,
        event=m.NO_INDEX, lease=0, word=word,
    )  # fmt: skip


def arrived(engine: Engine) -> list[bool]:
    """Return by layer whether all blocks of the load hold it."""

    def piece(block: int, layer: int) -> memoryview:
        start = (layer * BLOCKS + block) * BLOCK_BYTES
        return engine.cache.view[start : start + BLOCK_BYTES]

    return [all(piece(11 + i, layer) == content(7, i, layer, 0) for i in range(3)) for layer in range(LAYERS)]


def test_the_first_stage_is_there_before_the_last(agent: HoldingAgent, engine: Engine) -> None:
    agent.hold(1)
    job = load(engine, 1)
    agent.holds()
    eventually(lambda: engine.words.landed[1] == 1, "the first stage")
    assert arrived(engine) == [False, True]
    assert engine.worker.poll() == []
    agent.release()
    assert engine.done(job) == bytes(3)
    assert list(engine.words.landed) == [0, 2]
    assert arrived(engine) == [True, True]


def between_two_stages(agent: HoldingAgent, engine: Engine) -> int:
    """Begin a load, of which the first stage arrives and the last does not."""
    agent.hold(1)
    job = load(engine)
    agent.holds()
    eventually(lambda: engine.words.landed[0] == 1, "the first stage")
    return job


def test_an_agent_killed_between_two_stages(agent: HoldingAgent, engine: Engine) -> None:
    job = between_two_stages(agent, engine)
    agent.kill()
    with pytest.raises(SessionEnded) as ended:
        engine.done(job)
    assert ended.value.jobs == (job,)
    assert engine.words.landed[0] == 1
    assert arrived(engine) == [False, True]
    agent.start()


def test_an_agent_frozen_between_two_stages(agent: HoldingAgent, engine: Engine) -> None:
    job = between_two_stages(agent, engine)
    agent.freeze()
    engine.worker.cancel(job)
    assert engine.words.landed[0] == 1
    agent.thaw()
    agent.release()
    assert set(engine.done(job)) <= {BlockStatus.CANCELLED, BlockStatus.OK}


def test_a_load_without_stages_is_invalid(agent: HoldingAgent) -> None:
    one = Engine(agent, "staged", stages=1)
    assert one.done(load(one)) == bytes([BlockStatus.INVALID]) * 3
    one.close()


def test_a_word_that_was_not_declared_is_invalid(engine: Engine) -> None:
    job = engine.worker.staged_load(
        packed([section(0, b"", HASHES, [11, 12, 13])], 3), epoch=engine.worker.epoch, step=engine.step,
        event=m.NO_INDEX, lease=0, word=2,
    )  # fmt: skip
    assert engine.done(job) == bytes([BlockStatus.INVALID]) * 3


WRONG = {
    "STAGES.*stages.*1 more than segments": (0, struct.pack("<3H", 0, 1, 2)),
    "STAGES.*off.*multiple of 8": (4, LAST_FIRST),
}


@pytest.mark.parametrize("said", WRONG)
def test_stages_that_do_not_fit(agent: HoldingAgent, said: str) -> None:
    one = Engine(agent, "staged", stages=1)
    off, stages = WRONG[said]
    one.worker.send(m.Stages(off, 1, stages))
    with pytest.raises(SessionEnded, match=said):
        one.wait(m.Done)
    one.close()


def test_stages_are_declared_once(engine: Engine) -> None:
    engine.worker.send(m.Stages(engine.words.stages_off, 2, LAST_FIRST))
    with pytest.raises(SessionEnded, match=r"STAGES.*declared already"):
        engine.wait(m.Done)
