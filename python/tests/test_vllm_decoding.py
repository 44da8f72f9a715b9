"""Requests that decode: their blocks are saved in turn, and the rest at their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.scheduler.saves import HOLD_S, RUN_STEPS, SEND_STEPS
from tests.agent import AgentProcess, eventually
from tests.simulated import BLOCK, Clock, SimulatedEngine, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT_BLOCKS = 2
REQUESTS = 12


class Decoding:
    """An engine with requests that have computed prompts of different lengths, each its own."""

    def __init__(self, agent: AgentProcess) -> None:
        self.engine = SimulatedEngine(agent, "decoding", blocks=1024, pin_percent=20.0)
        self.engine.save("saved", "stored", 4, 7)
        self.stored = agent.status()["blocks_stored"]
        self.requests = [self._start(i) for i in range(REQUESTS)]
        eventually(self._answered, "the agent's answers to all that was asked")
        self.steps: list[Step] = []

    def _start(self, i: int) -> Any:
        name = f"decodes {i}"
        request = self.engine.request(name, name, PROMPT_BLOCKS + 60)
        hashes = request.block_hashes
        request.num_tokens = request.num_prompt_tokens = PROMPT_BLOCKS * BLOCK + 1 + i
        self.engine.tables[name] = [self.engine.pool.blocks[16 + i * 64 + j] for j in range(64)]
        request.all_hashes, request.block_hashes = hashes, hashes[:PROMPT_BLOCKS]
        assert not self.engine.matched(request)
        self.engine.admit(request)
        self.engine.step((request, request.num_tokens))
        return request

    def _answered(self) -> bool:
        self.engine.quiet()
        agent = self.engine.scheduler.agent
        lookups = agent.lookups
        assert lookups is not None
        return not (agent.awaited() or lookups._probes or lookups.awaits_leases())

    def step(self) -> Step:
        """Run a step that computes the last sampled token of each request."""
        for request in self.requests:
            request.num_tokens += 1
            request.block_hashes = request.all_hashes[: request.num_tokens // BLOCK]
        self.steps.append(self.engine.step(*((request, 1) for request in self.requests)))
        return self.steps[-1]

    def until_saving(self) -> list[Any]:
        """Run steps until one saves blocks. Return its jobs."""
        for _ in range(RUN_STEPS):
            if saves := self.step().plan.saves:
                return list(saves)
        pytest.fail("no block is saved")

    def filled(self) -> int:
        """Return how many blocks are full, without the token that was sampled last."""
        return sum((request.num_tokens - 1) // BLOCK for request in self.requests)

    def saved_at_the_end(self) -> int:
        """Return how many blocks are saved if all requests end now: those that are filled, and
        those that the last step filled and checked.
        """
        tracked = self.engine.scheduler.requests
        return sum(
            max(tracked[one.request_id].saving.cursor[0], (one.num_tokens - 1) // BLOCK) for one in self.requests
        )


@pytest.fixture
def decoding(agent: AgentProcess) -> Iterator[Decoding]:
    made = Decoding(agent)
    yield made
    agent.thaw()
    made.engine.close()


def test_most_steps_plan_nothing_and_every_block_is_saved(decoding: Decoding, agent: AgentProcess) -> None:
    steps = 2 * RUN_STEPS
    for _ in range(steps):
        decoding.step()
    assert sum(bool(step.plan.saves) for step in decoding.steps) <= steps // SEND_STEPS
    filled = decoding.filled()
    stored = agent.status()["blocks_stored"] - decoding.stored
    assert filled - REQUESTS * (RUN_STEPS // BLOCK + 1) <= stored <= filled
    expected = decoding.saved_at_the_end()
    for request in decoding.requests:
        decoding.engine.scheduler.finished(request, normally=True)
    decoding.engine.quiet()
    assert agent.status()["blocks_stored"] - decoding.stored == expected
    assert {block.ref_cnt for block in decoding.engine.pool.blocks} == {1}


def test_scarce_blocks_are_not_kept_pinned(
    decoding: Decoding, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoding.engine
    agent.freeze()
    decoding.until_saving()
    assert engine.scheduler.blocks.saving
    monkeypatch.setattr(engine.pool, "get_num_free_blocks", lambda: 0)
    decoding.step()
    assert engine.scheduler.blocks.saving == 0, "pins stay though blocks are scarce"


def test_nothing_of_before_a_reset_is_saved(decoding: Decoding, agent: AgentProcess) -> None:
    decoding.until_saving()
    decoding.engine.scheduler.reset()
    for _ in range(RUN_STEPS):
        decoding.step()
    decoding.engine.quiet()
    assert agent.status()["blocks_stored"] == 0, "blocks of before the reset are saved"


def test_what_was_revoked_is_offered_again_at_the_end(decoding: Decoding, agent: AgentProcess) -> None:
    scheduler = decoding.engine.scheduler
    agent.freeze()
    decoding.until_saving()
    scheduler._revokes += scheduler.saves.revoke()
    decoding.step()  # tells the worker
    agent.thaw()
    decoding.engine.quiet()
    assert agent.status()["blocks_stored"] - decoding.stored < decoding.filled()
    expected = decoding.saved_at_the_end()
    for request in decoding.requests:
        scheduler.finished(request, normally=True)
    decoding.engine.quiet()
    assert agent.status()["blocks_stored"] - decoding.stored == expected


def test_saves_in_flight_are_revoked_in_time_without_the_schedulers_session(
    decoding: Decoding, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's session may stay, and its pins with it."""
    engine, clock = decoding.engine, Clock(monkeypatch)
    agent.freeze()
    job = decoding.until_saving()[0].job
    session = engine.link.renew(hold=True)
    assert session is not None
    session.close()
    eventually(lambda: (decoding.step(), engine.scheduler.agent.session is None)[1], "the end of the session")
    revokes = []
    for _ in range(4):
        clock.now += HOLD_S / 2
        revokes += decoding.step().plan.revokes
    assert job in revokes, "its pins outlive HOLD_S"
