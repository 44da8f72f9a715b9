"""Steps in which requests only decode: their blocks are gathered, and any other event ends that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.plan import calm_plan
from kvagent.vllm.scheduler.save_plan import GATHER_STEPS, RUN_TOKENS
from kvagent.vllm.scheduler.saves import HOLD_S
from tests.agent import AgentProcess, eventually
from tests.simulated import BLOCK, Clock, SimulatedEngine, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT_BLOCKS = 2
REQUESTS = 12


class Decoding:
    """An engine with requests that have computed prompts of different lengths, each its own."""

    def __init__(self, agent: AgentProcess, *, saves: bool = True) -> None:
        self.engine = SimulatedEngine(agent, "decoding", blocks=1024, pin_percent=20.0, saves=saves)
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
        agent = self.engine.scheduler._agent
        lookups = agent.lookups
        assert lookups is not None
        return not (agent.awaited() or lookups.probing() or lookups.awaits_leases())

    def step(self) -> Step:
        """Run a step that computes the last sampled token of each request."""
        for request in self.requests:
            request.num_tokens += 1
            request.block_hashes = request.all_hashes[: request.num_tokens // BLOCK]
        self.steps.append(self.engine.step(*((request, 1) for request in self.requests)))
        return self.steps[-1]

    def until_calm(self) -> None:
        """Run steps until nothing but decoding goes on, some blocks are gathered, and the next step
        would plan nothing either.
        """
        scheduler = self.engine.scheduler
        for _ in range(20 * GATHER_STEPS):
            self.engine.until_saved()
            calm = (
                self.step().plan is calm_plan(REQUESTS) and scheduler._calm and not scheduler._schedule.sends(after=1)
            )
            if calm and scheduler.saves is not None and not scheduler.saves.batch.empty():
                return
        pytest.fail("no step is calm")

    def filled(self) -> int:
        """Return how many blocks are full, without the token that was sampled last."""
        return sum((request.num_tokens - 1) // BLOCK for request in self.requests)

    def saved_at_the_end(self) -> int:
        """Return how many blocks are saved if all requests end now: those that are filled, and
        those that the last step filled and checked.
        """
        tracked = self.engine.scheduler._tracked
        return sum(max(tracked[one.request_id].cursor[0], (one.num_tokens - 1) // BLOCK) for one in self.requests)


@pytest.fixture
def decoding(agent: AgentProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoding]:
    monkeypatch.setattr("kvagent.vllm.scheduler.save_plan.CHECKS", 2)
    made = Decoding(agent)
    yield made
    agent.thaw()
    made.engine.close()


def test_most_steps_plan_nothing_and_every_block_is_saved(decoding: Decoding, agent: AgentProcess) -> None:
    for _ in range(8 * GATHER_STEPS):
        decoding.step()
        decoding.engine.until_saved()
    planned = [len(step.plan.saves) for step in decoding.steps]
    assert sum(step.plan is calm_plan(REQUESTS) for step in decoding.steps) >= 6 * GATHER_STEPS
    assert 2 <= sum(map(bool, planned)) <= 9, "one step in GATHER_STEPS sends"
    filled = decoding.filled()
    for _ in range(2 * GATHER_STEPS + RUN_TOKENS):
        decoding.step()
    eventually(lambda: agent.status()["blocks_stored"] - decoding.stored >= filled, "the blocks of all answers")
    expected = decoding.saved_at_the_end()
    for request in decoding.requests:
        decoding.engine.scheduler.finished(request, normally=True)
    decoding.engine.quiet()
    assert agent.status()["blocks_stored"] - decoding.stored == expected
    assert {block.ref_cnt for block in decoding.engine.pool.blocks} == {1}


def test_a_load_is_planned_in_the_next_step(decoding: Decoding) -> None:
    engine = decoding.engine
    decoding.until_calm()
    request = engine.request("loads", "stored", 4)
    engine.tables["loads"] = engine.pool.blocks[1000:1005]
    engine.admit(request, engine.matched(request))
    assert [load.request for load in decoding.step().plan.loads] == ["loads"]
    engine.until_received(request)
    assert engine.holds(request, 7, 4)


def test_what_is_gathered_is_sent_if_no_step_follows(decoding: Decoding, agent: AgentProcess) -> None:
    decoding.until_calm()
    assert decoding.engine.scheduler.pending()
    expected = decoding.saved_at_the_end()
    for request in decoding.requests:
        decoding.engine.scheduler.finished(request, normally=True)
    assert decoding.engine.step().plan.saves
    decoding.engine.quiet()
    assert agent.status()["blocks_stored"] - decoding.stored == expected


def test_scarce_blocks_are_not_kept_pinned(
    decoding: Decoding, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoding.engine
    decoding.until_calm()
    agent.freeze()
    assert engine.scheduler.blocks is not None
    assert engine.scheduler.blocks.saving
    monkeypatch.setattr(engine.pool, "get_num_free_blocks", lambda: 0)
    for _ in range(2):
        decoding.step()
    assert engine.scheduler.blocks.saving == 0, "pins stay though blocks are scarce"


def test_a_reset_ends_what_is_gathered(decoding: Decoding, agent: AgentProcess) -> None:
    decoding.until_calm()
    decoding.engine.scheduler.reset()
    for _ in range(2 * GATHER_STEPS):
        decoding.step()
    decoding.engine.quiet()
    assert agent.status()["blocks_stored"] == 0, "blocks of before the reset are saved"


def test_gathered_blocks_that_are_refused_are_offered_again(decoding: Decoding, agent: AgentProcess) -> None:
    scheduler = decoding.engine.scheduler
    decoding.until_calm()
    agent.freeze()
    eventually(lambda: decoding.step().plan.saves, "saves")
    assert scheduler.saves is not None
    assert scheduler.saves.revoke(), "saves in flight"
    scheduler._revokes += list(scheduler.saves._inflight)
    decoding.step()  # tells the worker
    agent.thaw()
    decoding.engine.quiet()
    before = agent.status()["blocks_stored"]
    filled = decoding.filled()
    assert before - decoding.stored < filled
    for _ in range(2 * GATHER_STEPS + RUN_TOKENS):
        decoding.step()
    eventually(lambda: agent.status()["blocks_stored"] - decoding.stored >= filled, "the refused blocks")


def test_saves_in_flight_are_revoked_in_time_without_the_schedulers_session(
    decoding: Decoding, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's session may stay, and its pins with it."""
    engine, clock = decoding.engine, Clock(monkeypatch)
    decoding.until_calm()
    agent.freeze()
    job = eventually(lambda: decoding.step().plan.saves, "saves")[0].job
    attachment = engine.link.renew(hold=True)
    assert attachment is not None
    attachment.session.close()
    eventually(lambda: (decoding.step(), engine.scheduler._agent.session is None)[1], "the end of the session")
    revokes = []
    for _ in range(4 * GATHER_STEPS):
        clock.now += HOLD_S / 2
        revokes += decoding.step().plan.revokes
    assert job in revokes, "its pins outlive HOLD_S"
    assert {step.plan is calm_plan(REQUESTS) for step in decoding.steps[-GATHER_STEPS:]} == {True, False}


def test_some_steps_are_planned_as_a_whole_where_nothing_is_saved(agent: AgentProcess) -> None:
    decoding = Decoding(agent, saves=False)
    try:
        calm = [decoding.step().plan is calm_plan(REQUESTS) for _ in range(4 * GATHER_STEPS)][-2 * GATHER_STEPS :]
        assert calm.count(False) == 2, "one step in GATHER_STEPS"
    finally:
        decoding.engine.close()
