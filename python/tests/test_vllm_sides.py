"""The connector's two sides with the real agent, in cases that an engine's tests do not reach."""

from __future__ import annotations

import itertools
import logging
import math
import resource
import socket
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent import messages as m
from kvagent.lookup import Answer, LookupStatus
from kvagent.registration import Registration
from kvagent.session import FrameStream
from kvagent.vllm.counters import Counts
from kvagent.vllm.geometry import Geometry
from kvagent.vllm.link import LISTEN_STEPS, Link
from kvagent.vllm.options import Options
from kvagent.vllm.plan import Report
from kvagent.vllm.scheduler.loads import Loads, Lookups
from kvagent.vllm.scheduler.requests import Blocks
from tests.agent import IDENTITY, PATIENCE_S, AgentProcess, eventually
from tests.sides import running
from tests.simulated import BLOCK, NO_TOKENS, Pool, SimulatedEngine
from tests.test_session import Agent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvagent.vllm.scheduler.requests import Tracked

ANSWER_S = 5.0  # for calls that take microseconds; those that wait for a stopped agent wait longer


@pytest.fixture
def engines(agent: AgentProcess) -> Iterator[Callable[..., SimulatedEngine]]:
    made: list[SimulatedEngine] = []

    def make(name: str = "one", **more: Any) -> SimulatedEngine:
        made.append(SimulatedEngine(agent, name, **more))
        return made[-1]

    yield make
    agent.thaw()
    for engine in made:
        engine.close()


def load(engine: SimulatedEngine, name: str, prompt: str, blocks: int, salt: int) -> Any:
    """Run a request whose blocks all come from the agent."""
    request = engine.request(name, prompt, blocks)
    external = engine.matched(request)
    assert external == blocks * BLOCK
    engine.admit(request, external)
    results = engine.until_received(request)
    assert not results.failed
    assert not results.bad_blocks
    assert engine.holds(request, salt, blocks)
    return request


@pytest.mark.parametrize("peer", [False, True])
def test_what_one_engine_saves_another_loads(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, peer: bool
) -> None:
    first, second = engines("one", peer=peer), engines("two", peer=peer)
    first.save("a", "p", 5, 9)
    assert agent.status()["blocks_stored"] == 5
    load(second, "b", "p", 5, 9)
    assert second.scheduler.counts.tokens_loaded == 5 * BLOCK
    eventually(lambda: agent.status()["leases"] == 0, "an agent without leases")
    assert {block.ref_cnt for block in second.pool.blocks} == {1}


def test_a_prompt_of_more_blocks_than_a_job_takes(engines: Callable[..., SimulatedEngine], agent: AgentProcess) -> None:
    """Several jobs save it; one load of several parts loads it and is reported once."""
    engine = engines(blocks=512, pin_percent=50.0)
    for limited in (engine.scheduler.saves, engine.scheduler.loads):
        assert limited is not None
    engine.step()  # a new session sets the limits
    engine.scheduler.saves.job_blocks = engine.scheduler.loads.job_blocks = 30
    request = engine.request("a", "long", 100)
    engine.matched(request)
    engine.admit(request)
    engine.fill(request, 3)
    plan = engine.step((request, request.num_tokens)).plan
    assert [job.blocks for job in plan.saves] == [30, 30, 30, 10]
    engine.quiet()
    engine.scheduler.finished(request, normally=True)
    assert agent.status()["blocks_stored"] == 100
    again = engine.request("b", "long", 100)
    engine.admit(again, engine.matched(again))
    step = engine.step()
    (job,) = step.plan.loads
    assert [part.blocks for part in job.parts] == [30, 30, 30, 10]
    told = list(step.results.received)
    told += engine.until_received(again).received if not told else []
    engine.quiet()
    assert told == ["b"]
    assert engine.holds(again, 3, 100)
    eventually(lambda: agent.status()["leases"] == 0, "an agent without leases")


def test_a_load_that_is_not_taken_as_a_whole_fails_as_a_whole(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """The agent accepts the first parts, then the session is full: unsent blocks are bad, the
    others are awaited.
    """
    engine = engines(blocks=256)
    engine.save("a", "p", 60, 3)
    engine.scheduler.loads.job_blocks = 20
    request = engine.request("b", "p", 60)
    engine.admit(request, engine.matched(request))
    session = engine.worker_link.current()
    assert session is not None
    session.limits = m.Welcome(m.VERSION, session.boot, session.limits.session, max_queue=2)
    results = engine.step().results
    if not results.received:
        results = engine.until_received(request)
    table = engine.tables["b"]
    assert results.bad_blocks == {block.block_id for block in table[40:60]}
    engine.quiet()
    assert engine.holds(request, 3, 40)
    assert engine.scheduler.counts.loads_failed == 1
    assert engine.matched(request) == 0, "a request whose load failed is promised another one"


def test_a_load_that_ranks_give_up_one_after_the_other_is_late_once(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines()
    engine.save("a", "p", 3, 1)
    request = engine.request("b", "p", 3)
    engine.admit(request, engine.matched(request))
    job = engine.scheduler.requests["b"].load
    for _ in range(2):
        engine.scheduler.report(Report(late={job}))
    assert engine.scheduler.counts.loads_late == 1
    engine.until_received(request)
    engine.quiet()


def test_a_request_that_must_not_read_the_cache_is_saved(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines()
    engine.save("a", "p", 4, 1, skip_reading_prefix_cache=True)
    assert agent.status()["blocks_stored"] == 4
    assert engine.matched(engine.request("b", "p", 4, skip_reading_prefix_cache=True)) == 0
    assert engine.scheduler.counts.lookups == 0
    assert engine.matched(engine.request("c", "p", 4)) == 4 * BLOCK


def test_a_request_is_announced_on_arrival_without_waiting(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines()
    engine.save("a", "p", 4, 1)
    before = agent.status()
    request = engine.request("b", "p", 4)
    agent.freeze()
    begin = time.monotonic()
    engine.scheduler.on_new_request(request)
    assert time.monotonic() - begin < ANSWER_S
    agent.thaw()
    eventually(lambda: agent.status()["lookups"] == before["lookups"] + 1, "a probe")
    assert agent.status()["leases"] == before["leases"], "a probe reserves nothing"
    assert engine.scheduler.counts.lookups == 1, "that of the first request: probes are not counted"


def test_a_request_offers_each_of_its_blocks_once(engines: Callable[..., SimulatedEngine], agent: AgentProcess) -> None:
    engine = engines()
    twins = [engine.request(name, "p", 4) for name in ("a", "b")]
    for twin in twins:
        engine.matched(twin)
        engine.admit(twin)
        engine.fill(twin, 1)
        plan = engine.step((twin, twin.num_tokens)).plan
        assert sum(job.blocks for job in plan.saves) == 4
        engine.quiet()
    for twin in twins:
        engine.scheduler.finished(twin, normally=True)
    assert engine.step().plan.saves == []
    assert agent.status()["blocks_stored"] == 4
    assert engine.scheduler.counts.saves_existed == 4


def test_each_turn_of_a_session_is_saved(engines: Callable[..., SimulatedEngine]) -> None:
    """vLLM admits a further turn with what it has computed, without asking what is stored."""
    engine = engines()
    request = engine.request("a", "p", 4)
    engine.matched(request)
    engine.admit(request)
    engine.fill(request, 1)
    assert [job.blocks for job in engine.step((request, request.num_tokens)).plan.saves] == [4]
    engine.quiet()
    engine.scheduler.allocated(request, engine.get_blocks("a"), 0)
    assert [job.blocks for job in engine.step((request, 1)).plan.saves] == [4]
    engine.quiet()


def test_what_the_engine_had_itself_is_offered_at_the_end(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """The agent may have lost it since it was computed. It is offered after what is new."""
    engine = engines()
    request = engine.request("a", "p", 4)
    engine.matched(request, own=2 * BLOCK)
    engine.admit(request)
    engine.fill(request, 1)
    plan = engine.step((request, request.num_tokens)).plan
    assert [job.blocks for job in plan.saves] == [2]
    engine.quiet()
    engine.scheduler.finished(request, normally=True)
    assert [job.blocks for job in engine.step().plan.saves] == [2]
    engine.quiet()
    assert agent.status()["blocks_stored"] == 4


def test_an_agent_without_jobs_is_listened_to_in_one_of_some_steps(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system call is the most expensive part of a step in which nothing happens."""
    engine = engines()
    request = engine.request("a", "p", 4)
    engine.matched(request)
    engine.admit(request)
    engine.step((request, request.num_tokens))
    engine.quiet()
    asked: list[int] = []
    quiet = FrameStream.quiet

    def count(stream: FrameStream) -> bool:
        asked.append(stream.fileno())
        return quiet(stream)

    monkeypatch.setattr(FrameStream, "quiet", count)
    calm = 0  # rounds in a row in which nothing was expected of the agent, such as the answer to a ping
    for _ in range(1000):
        asked.clear()
        for _ in range(LISTEN_STEPS):
            engine.step((request, 0))
        calm = calm + 1 if len(asked) == 2 else 0  # by two sides
        if calm == 10:
            break
    assert calm == 10
    agent.kill()
    for _ in range(LISTEN_STEPS):
        engine.step((request, 0))
    assert (engine.link.current(), engine.worker_link.current()) == (None, None)
    agent.start()


def test_what_was_revoked_is_offered_again_at_the_end(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines()
    request = engine.request("a", "p", 4)
    engine.matched(request)
    engine.admit(request)
    engine.fill(request, 5)
    agent.freeze()
    engine.step((request, request.num_tokens))
    engine.scheduler._revokes += engine.scheduler.saves.revoke()
    assert engine.scheduler.blocks.saving == 0
    engine.step()  # tells the worker
    agent.thaw()
    engine.quiet()
    assert agent.status()["blocks_stored"] == 0
    engine.scheduler.finished(request, normally=True)
    engine.quiet()
    assert agent.status()["blocks_stored"] == 4
    assert {block.ref_cnt for block in engine.pool.blocks} == {1}


def test_a_request_that_restarts_after_a_reset_is_saved_from_its_first_block_on(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """reset_prefix_cache preempts running requests between two steps, and no step reports it."""
    engine = engines()
    request = engine.request("a", "p", 4)
    engine.matched(request)
    engine.admit(request)
    engine.step((request, request.num_tokens))
    engine.quiet()
    assert agent.status()["blocks_stored"] == 4
    engine.scheduler.reset()
    eventually(lambda: agent.status()["blocks_stored"] == 0, "an empty pool")
    engine.admit(request)
    engine.step((request, request.num_tokens))
    engine.quiet()
    assert agent.status()["blocks_stored"] == 4


@pytest.mark.stops
def test_blocks_that_a_reset_releases_are_not_free_in_the_step_that_revokes(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM zeroes a step's new blocks before the workers are told of revocations."""
    seen: list[set[int]] = []

    def used() -> set[int]:
        return {block.block_id for block in engine.pool.blocks if block.ref_cnt > 1}

    def reset(_: Pool) -> bool:
        seen.append(used())
        return True

    monkeypatch.setattr(Pool, "reset_prefix_cache", reset)
    engine = engines()
    request = engine.request("a", "p", 4)
    engine.matched(request)
    saved = {block.block_id for block in engine.admit(request)[:4]}
    agent.freeze()
    engine.step((request, request.num_tokens))
    for _ in range(2):
        assert engine.pool.reset_prefix_cache()
        assert used() == saved, "the next step would reuse blocks whose saves are not revoked"
    assert seen == [set(), set()], "vLLM does not reset its cache while blocks are used"
    assert engine.scheduler.blocks.saving == 0
    engine.step()
    assert [*engine.sync.words.revocations].count(1) == 1
    assert used() == set()
    agent.thaw()
    engine.quiet()
    assert agent.status()["blocks_stored"] == 0


@pytest.mark.stops
@pytest.mark.parametrize("hold_s", [0.1, 60.0])
def test_a_frozen_agent_does_not_hold_blocks_for_good(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, hold_s: float
) -> None:
    """It holds a save for longer than allowed, or it does not answer."""
    monkeypatch.setattr("kvagent.vllm.scheduler.saves.HOLD_S", hold_s)
    if hold_s < 1:
        monkeypatch.setattr("kvagent.vllm.scheduler.agent_session.ASK_S", math.inf)
    engine = engines()
    blocks = engine.scheduler.blocks
    request = engine.request("a", "p", 4)
    engine.matched(request)
    engine.admit(request)
    engine.fill(request, 5)
    agent.freeze()
    engine.step((request, request.num_tokens))
    assert blocks.saving == 4
    eventually(lambda: (engine.step(), blocks.saving == 0)[1], "blocks without pins")
    monkeypatch.setattr("kvagent.vllm.scheduler.saves.HOLD_S", 60)
    agent.thaw()
    eventually(lambda: (engine.step(), not engine.scheduler.agent.silent)[1], "an agent that answers")
    engine.quiet()
    assert agent.status()["blocks_stored"] == 0
    engine.scheduler.finished(request, normally=True)
    engine.quiet()
    assert agent.status()["blocks_stored"] == 4


@pytest.mark.stops
def test_nothing_is_expected_of_a_stopped_agent_until_it_goes_on(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """A load is given up long before its deadline, but its blocks stay pinned; nothing is looked up
    or saved.
    """
    engine = engines(load_deadline_ms=600_000.0)
    engine.save("a", "p", 4, 7)
    loaded, computed = engine.request("b", "p", 4), engine.request("c", "q", 4)
    found = engine.matched(loaded)
    engine.matched(computed)  # may take steps; the load begins after them
    engine.admit(loaded, found)
    engine.admit(computed)
    engine.fill(computed, 9)
    agent.freeze()
    assert engine.until_received(loaded).failed == {"b"}
    assert [block.ref_cnt for block in engine.tables["b"][:4]] == [2] * 4, "a stopped agent may still write"
    assert engine.step((computed, computed.num_tokens)).plan.saves == []
    asked = engine.scheduler.counts.lookups
    assert engine.matched(engine.request("d", "p", 4)) == 0
    assert engine.scheduler.counts.lookups == asked
    agent.thaw()
    engine.quiet()
    engine.step((computed, 1))
    engine.quiet()
    assert agent.status()["blocks_stored"] == 8
    load(engine, "e", "q", 4, 9)


def test_an_agent_that_takes_long_is_not_taken_for_a_stopped_one(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers while a save waits for its step, which does not end."""
    monkeypatch.setattr("kvagent.vllm.scheduler.agent_session.ASK_S", 0.02)
    engine = engines()
    request = engine.request("a", "p", 4)
    engine.matched(request)
    engine.admit(request)
    running: list[int] = []
    with monkeypatch.context() as held:
        held.setattr(engine.sync, "end", running.append)
        engine.step((request, request.num_tokens))
        session = engine.scheduler.agent.session
        assert session is not None
        pings: list[float] = []
        start_ping = session.start_ping

        def counted() -> None:
            pings.append(time.monotonic())
            start_ping()

        held.setattr(session, "start_ping", counted)
        eventually(lambda: (engine.step(), len(pings) > 3)[1], "answers, each before the next question")
        assert engine.scheduler.blocks.saving == 4
    for step in running:
        engine.sync.end(step)
    engine.step()
    engine.quiet()
    assert agent.status()["blocks_stored"] == 4


def test_a_save_is_not_revoked_before_the_agent_had_it_for_a_step(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is planned before its step, which may take longer than the hold; earlier steps do not
    count.
    """
    monkeypatch.setattr("kvagent.vllm.scheduler.agent_session.ASK_S", math.inf)
    now = [1000.0]
    monkeypatch.setattr("kvagent.vllm.scheduler.side.time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = engines()
    blocks = engine.scheduler.blocks
    engine.step()
    now[0] += 3600
    request = engine.request("a", "p", 4)
    engine.matched(request)
    engine.admit(request)
    agent.freeze()
    engine.step((request, request.num_tokens))
    for _ in range(5):
        now[0] += 0.01
        engine.step()
        assert blocks.saving == 4
    now[0] += 30
    engine.step()
    assert blocks.saving == 4
    now[0] += 30
    engine.step()
    assert blocks.saving == 0
    agent.thaw()
    engine.quiet()


def test_what_old_weights_began_is_not_saved(engines: Callable[..., SimulatedEngine], agent: AgentProcess) -> None:
    """A request keeps its blocks: its next ones depend on those that old weights computed."""
    engine = engines()
    running, loading = engine.request("a", "p", 6), engine.request("b", "q", 6)
    engine.save("c", "q", 3, 7)
    for request in (running, loading):
        engine.admit(request, engine.matched(request))
    engine.step((running, 3 * BLOCK))
    engine.quiet()
    engine.scheduler.reset()
    assert agent.status()["blocks_stored"] == 0
    engine.admit(loading)
    loading.num_computed_tokens = 3 * BLOCK
    engine.step((running, 3 * BLOCK), (loading, 3 * BLOCK))
    fresh = engine.request("d", "r", 2)
    engine.admit(fresh)
    engine.step((fresh, fresh.num_tokens))
    engine.quiet()
    for request in (running, loading):
        engine.scheduler.finished(request, normally=True)
    engine.quiet()
    assert agent.status()["blocks_stored"] == 2, "what old weights began, or not even what new ones did"


def test_a_reset_that_another_engine_did_before_ones_own_is_not_taken_for_a_later_one(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine, other = engines("one"), engines("two")
    request = engine.request("a", "p", 4)
    engine.matched(request)
    other.step()  # it takes its session up
    other.scheduler.reset()
    engine.scheduler.reset()
    engine.admit(request)
    engine.step((request, request.num_tokens))
    engine.quiet()
    assert agent.status()["blocks_stored"] == 4


def test_a_local_hit_on_blocks_of_old_weights_is_not_gone_on_from(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines()
    request = engine.request("a", "p", 4)
    for block, key in zip(engine.admit(request), request.block_hashes, strict=False):
        block.block_hash = key
    engine.scheduler.finished(request, normally=False)
    engine.scheduler.reset()  # vLLM's own cache keeps referenced blocks
    again = engine.request("b", "p", 6)
    engine.tables["b"] = engine.tables["a"][:4] + engine.pool.blocks[20:23]
    engine.admit(again)
    engine.step((again, again.num_tokens))
    engine.quiet()
    assert agent.status()["blocks_stored"] == 0


def test_what_waits_to_be_handed_out_when_another_engine_resets_is_given_up(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """A request ended between two steps; the next one reads the reset first, and would save under
    its epoch.
    """
    engine, other = engines("one"), engines("two")
    other.step()
    request = engine.request("a", "p", 4)
    engine.matched(request)
    engine.admit(request)
    request.num_computed_tokens = request.num_tokens
    engine.scheduler.finished(request, normally=True)
    blocks = engine.scheduler.blocks
    assert blocks.saving == 4
    epoch = engine.scheduler.agent._epoch
    other.scheduler.reset()

    def heard() -> bool:
        engine.scheduler._poll_agent()  # as for a request that comes
        return engine.scheduler.agent._epoch > epoch

    eventually(heard, "the reset")
    assert blocks.saving == 0
    assert engine.step().plan.saves == []
    engine.quiet()
    assert agent.status()["blocks_stored"] == 0


@pytest.mark.parametrize("over", [False, True])
def test_a_block_that_was_partly_filled_at_a_reset_is_old_once_it_is_full(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, over: bool
) -> None:
    """vLLM hashes it only then; blocks computed from it must not be saved either."""
    engine = engines()
    request = engine.request("a", "p", 1)
    table = engine.admit(request)
    engine.step((request, BLOCK // 2))
    engine.scheduler.reset()
    if over:
        engine.step((request, BLOCK // 2))
        table[0].block_hash = request.block_hashes[0]
        engine.scheduler.finished(request, normally=True)
    else:
        table[0].block_hash = request.block_hashes[0]  # as the step is scheduled that fills it
    again = engine.request("b", "p", 3)
    engine.tables["b"] = table[:1] + engine.pool.blocks[20:23]
    engine.admit(again)
    engine.step((again, again.num_tokens))
    engine.quiet()
    assert agent.status()["blocks_stored"] == 0
    engine.save("c", "q", 2, 7)
    assert agent.status()["blocks_stored"] == 2


def test_a_reset_that_the_agent_does_not_hear_is_no_failure_and_is_done_before_anything_else(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvagent.vllm.scheduler.agent_session.RESET_S", 0.05)
    engine = engines()
    engine.save("a", "p", 4, 7)
    agent.freeze()
    engine.scheduler.reset()
    agent.thaw()
    monkeypatch.setattr("kvagent.vllm.scheduler.agent_session.RESET_S", 20)
    eventually(lambda: (engine.step(), engine.scheduler.agent.session)[1], "the next session")
    assert engine.matched(engine.request("b", "p", 4)) == 0
    assert agent.status()["blocks_stored"] == 0
    engine.save("c", "p", 4, 7)
    assert agent.status()["blocks_stored"] == 4


def test_saves_hold_no_more_than_their_share(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 blocks 10 % are 6: a prompt of 20 blocks is saved in several steps, and never more are
    pinned.
    """
    engine = engines(pin_percent=10.0)
    scheduler = engine.scheduler
    plan, held = scheduler.plan, []

    def planned(output: Any) -> Any:
        made = plan(output)
        held.append(scheduler.blocks.saving)
        return made

    monkeypatch.setattr(scheduler, "plan", planned)
    request = engine.request("a", "p", 20)
    engine.matched(request)
    engine.admit(request)
    engine.fill(request, 5)
    engine.step((request, request.num_tokens))

    def stored() -> bool:
        engine.step((request, 1))
        return bool(agent.status()["blocks_stored"] == 20)

    eventually(stored, "all blocks of the prompt")
    assert max(held) == 6


def test_only_prompts_are_saved_if_so_asked(engines: Callable[..., SimulatedEngine], agent: AgentProcess) -> None:
    engine = engines(save_decode=False)
    request = engine.request("a", "p", 3)
    request.num_prompt_tokens = 2 * BLOCK
    engine.matched(request)
    engine.admit(request)
    engine.step((request, 2 * BLOCK))
    for _ in range(BLOCK + 1):
        engine.step((request, 1))
    engine.quiet()
    engine.scheduler.finished(request, normally=True)
    engine.quiet()
    assert agent.status()["blocks_stored"] == 2
    other = engine.request("b", "q", 3)  # its answers are computed anew with its prompt, as after a preemption
    other.num_prompt_tokens = 2 * BLOCK
    engine.matched(other)
    engine.admit(other)
    engine.step((other, other.num_tokens))
    engine.quiet()
    assert agent.status()["blocks_stored"] == 4


def test_a_load_waits_for_the_step_in_flight(engines: Callable[..., SimulatedEngine], agent: AgentProcess) -> None:
    """vLLM may reuse a producer's blocks: the load names the step that may still write to them."""
    engine = engines()
    engine.save("a", "p", 4, 7)
    request = engine.request("b", "p", 4)
    engine.admit(request, engine.matched(request))
    before = agent.status()["blocks_loaded"]
    plan = engine.scheduler.plan(NO_TOKENS)
    engine.worker.begin(plan)
    engine.worker.start(plan)
    with pytest.raises(AssertionError, match="did not come"):
        eventually(lambda: agent.status()["blocks_loaded"] > before, "a load before the step's end", patience_s=0.3)
    engine.worker.end(plan)
    engine.until_received(request)
    assert engine.holds(request, 7, 4)


def assert_waits(engine: SimulatedEngine, *, pending: bool) -> None:
    """Check that each step waits, and gives its processor up meanwhile, however fast the machine
    is.
    """
    steps = 40
    begin, slept = time.monotonic(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for _ in range(steps):
        assert engine.scheduler.pending() or not pending
        engine.step()
    assert time.monotonic() - begin > steps * 0.005
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - slept >= steps


def test_an_idle_engine_does_not_spin_while_a_frozen_agent_holds_a_load(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines(load_deadline_ms=50.0)
    engine.save("a", "p", 4, 7)
    request = engine.request("b", "p", 4)
    engine.admit(request, engine.matched(request))
    agent.freeze()
    results = engine.until_received(request)
    assert results.failed == {"b"}
    engine.scheduler.finished(request, normally=False)
    pinned = [block.ref_cnt for block in engine.tables["b"][:4]]
    assert pinned == [2] * 4
    for _ in range(15):
        engine.step()
    assert_waits(engine, pending=True)
    agent.thaw()
    engine.quiet()
    assert [block.ref_cnt for block in engine.tables["b"][:4]] == [1] * 4


def test_an_idle_engine_does_not_spin_either_where_its_workers_have_no_job(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """vLLM may keep stepping to release a lease: each of these steps waits."""
    engine = engines()
    for _ in range(15):
        engine.step()
    assert_waits(engine, pending=False)


def test_an_engine_that_sleeps_takes_its_memory_back_and_registers_it_again(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines()
    engine.save("a", "p", 4, 7)
    before = agent.status()["regions"]
    assert engine.worker.leave()
    assert agent.status()["regions"] == 0
    request = engine.request("b", "p", 4)
    assert engine.matched(request) == 0  # not all of its ranks are there
    engine.scheduler.finished(request, normally=False)
    engine.worker_link = engine.new_worker_link()
    engine.worker.rejoin(engine.worker_link)
    assert engine.worker_link.wait(20) is not None
    assert agent.status()["regions"] == before
    load(engine, "c", "p", 4, 7)


def test_jobs_of_a_worker_that_leaves_are_reported_as_failed(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines()
    request = engine.request("a", "p", 4)
    engine.matched(request)
    engine.admit(request)
    agent.freeze()
    engine.step((request, request.num_tokens))
    assert engine.worker.busy()
    agent.thaw()
    assert engine.worker.leave()
    engine.step()
    assert not engine.scheduler.pending()
    assert {block.ref_cnt for block in engine.pool.blocks} == {1}


@pytest.mark.parametrize("again", [False, True])
def test_what_a_frozen_agent_has_stays_pinned_also_when_the_worker_leaves(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """An engine sleeps, and may wake, before the agent continues, which may still write."""
    monkeypatch.setattr("kvagent.vllm.worker.side.DRAIN_S", 0.05)
    engine = engines(load_deadline_ms=50.0)
    engine.save("a", "p", 4, 7)
    request = engine.request("b", "p", 4)
    engine.admit(request, engine.matched(request))
    agent.freeze()
    assert engine.until_received(request).failed == {"b"}
    assert not engine.worker.leave()
    if again:
        engine.worker_link = engine.new_worker_link()
        engine.worker.rejoin(engine.worker_link)
    for _ in range(20):
        engine.step()
    assert [block.ref_cnt for block in engine.tables["b"][:4]] == [2] * 4
    assert engine.scheduler.pending()
    agent.thaw()
    engine.quiet()
    assert {block.ref_cnt for block in engine.pool.blocks} == {1}, "no fence ever came"
    if again:
        assert engine.worker_link.wait(20) is not None
        engine.scheduler.loads._deadline_s = PATIENCE_S
        load(engine, "c", "p", 4, 7)


def test_a_lease_that_comes_too_late_is_given_back(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines(lookup_wait_ms=1.0, lookup_age_ms=50.0)
    writer = engines("two")
    writer.save("a", "p", 4, 7)
    agent.freeze()
    request = engine.request("b", "p", 4)
    assert engine.matched(request) == 0
    assert engine.scheduler.counts.lookups_unanswered == 1
    agent.thaw()
    given = eventually(lambda: agent.status()["leases_given"], "the late answer")
    assert given == 1
    eventually(lambda: (engine.step(), agent.status()["leases"] == 0)[1], "an agent without leases")


def test_an_idle_engine_goes_on_until_a_late_lease_is_given_back(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """Without requests, vLLM steps only as long as the connector asks for it."""
    engine = engines(lookup_wait_ms=1.0, lookup_age_ms=50.0)
    engine.save("a", "p", 4, 7)
    agent.freeze()
    request = engine.request("b", "p", 4)
    assert engine.matched(request) == 0
    engine.scheduler.finished(request, normally=False)
    for _ in range(15):
        engine.step()
    assert_waits(engine, pending=True)
    agent.thaw()
    while engine.scheduler.pending():
        engine.step()
    eventually(lambda: agent.status()["leases_given"] == 1, "the late answer")
    eventually(lambda: agent.status()["leases"] == 0, "an agent without leases")


def test_what_never_comes_is_not_waited_for_for_ever(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvagent.lookup.LATE_S", 0.2)
    engine = engines(lookup_wait_ms=1.0, lookup_age_ms=50.0)
    engine.step()
    agent.freeze()
    request = engine.request("b", "p", 4)
    assert engine.matched(request) == 0
    engine.scheduler.finished(request, normally=False)
    assert engine.scheduler.pending()
    engine.quiet()


def test_an_agent_that_speaks_only_newer_versions_is_refused_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Connecting is retried, since it may be replaced; the log reports it once."""
    asked = threading.Semaphore(0)
    listener = socket.create_server(str(tmp_path / "session.sock"), family=socket.AF_UNIX)

    def agents() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # it was shut down
            with sock:
                agent = Agent(sock)
                hello = agent.hear()
                assert isinstance(hello, m.Hello)
                text = f"version: {hello.min_version} to {hello.max_version}, allowed: 3 to 4"
                agent.say(m.Error(m.ErrorCode.VERSION, text))
            asked.release()

    caplog.set_level(logging.INFO, "vllm.kvagent")
    thread = threading.Thread(target=agents)
    thread.start()
    link = Link(str(tmp_path), "scheduler", lambda: pytest.fail("there is nothing to register at"))
    for _ in range(3):
        assert asked.acquire(timeout=10)
    assert link.wait(0) is None
    link.close()
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    listener.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1, warnings
    assert "allowed: 3 to 4" in warnings[0]


def test_an_agent_that_refuses_is_asked_less_and_less_often(
    agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("PAUSE_FIRST_S", 0.01), ("PAUSE_LAST_S", 0.01), ("PAUSE_REFUSED_S", 60)):
        monkeypatch.setattr(f"kvagent.vllm.link.{name}", value)
    tries: list[float] = []

    def registration() -> Registration:
        tries.append(time.monotonic())
        return Registration(instance="x", role=0, identity=IDENTITY, groups=(m.Group(BLOCK, 64),), hash_tokens=7)

    link = Link(str(agent.folder), "scheduler", registration)
    eventually(lambda: len(tries) >= 6, "six tries")
    link.close()
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps[4] > 0.15
    assert len([r for r in caplog.records if "hash_tokens" in r.getMessage()]) == 1


def test_a_registration_that_cannot_be_made_is_tried_again(
    agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that nobody expects must not end the link's thread: the engine would be uncached for
    good, and nothing would say so.
    """
    monkeypatch.setattr("kvagent.vllm.link.PAUSE_FIRST_S", 0.01)
    tries: list[int] = []

    def registration() -> Registration:
        tries.append(len(tries))
        if len(tries) < 4:
            raise UnicodeEncodeError("utf-8", "model \udcff", 6, 7, "surrogates not allowed")
        return Registration(instance="x", role=0, identity=IDENTITY, groups=(m.Group(BLOCK, 64),), hash_tokens=BLOCK)

    link = Link(str(agent.folder), "scheduler", registration)
    attached = link.wait(PATIENCE_S)
    assert attached is not None
    assert link.close() is attached
    attached.close()
    assert len(tries) == 4
    assert len([r for r in caplog.records if "surrogates not allowed" in r.getMessage() and r.exc_info]) == 1


class _Lookups(Lookups):
    """Gives the prepared answers, and none after them."""

    def __init__(self, *answers: Answer | None) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.released: list[int] = []

    def ask(self, *_: Any, **__: Any) -> Any:
        self.asked += 1
        return self

    def answer(self, ticket: object, *, first: bool) -> Answer | None:
        return self.answers.pop(0) if self.answers else None

    def abandon(self, ticket: object) -> None:
        pass


def promises(lookups: _Lookups, **options: Any) -> tuple[Loads, Tracked, Counts, list[int]]:
    agent: Any = SimpleNamespace(
        lookups=lookups, release=lookups.released.append, switches=m.Switches(1, 1), silent=False
    )  # fmt: skip
    counts, blocks = Counts(), Blocks(SimpleNamespace(block_pool=Pool(64)), 0.5)
    request = SimpleNamespace(
        num_tokens=4 * BLOCK + 1, block_hashes=[bytes([i]) * 32 for i in range(4)], skip_reading_prefix_cache=False
    )  # fmt: skip
    geometry, chosen = Geometry((m.Group(BLOCK, 64),), BLOCK), Options(min_load_tokens=16, **options)
    made = Loads(agent, geometry, chosen, blocks, counts, lambda *_: False)
    return made, running(request), counts, lookups.released


def answer(status: int, tokens: int = 0, lease: int = 0) -> Answer:
    return Answer(3, status, tokens, lease, bytes(16))


def test_lower_tiers_are_waited_for_a_bounded_time() -> None:
    pending = answer(LookupStatus.PENDING)
    lookups = _Lookups(pending, None, pending, answer(LookupStatus.HIT, 64, 5))
    made, tracked, counts, released = promises(lookups, tier_wait_ms=200.0)
    assert [made.promise(tracked, 0, now) for now in (10.0, 10.1, 10.15, 10.18)] == [None, None, None, 64]
    assert (lookups.asked, counts.lookups, counts.lookups_pending, released) == (3, 1, 0, [])
    made.forget(tracked)
    assert released == [5]

    lookups = _Lookups(pending, pending)
    made, tracked, counts, _ = promises(lookups, tier_wait_ms=200.0)
    assert [made.promise(tracked, 0, now) for now in (10.0, 10.3, 10.4)] == [None, 0, 0]
    assert (lookups.asked, counts.lookups_pending) == (2, 1)


def test_an_answer_is_kept_for_a_while_and_then_asked_again() -> None:
    answers = (answer(LookupStatus.HIT, tokens, lease) for tokens, lease in ((64, 5), (48, 6), (64, 7)))
    lookups = _Lookups(*answers)
    made, tracked, _, released = promises(lookups)
    assert [made.promise(tracked, 0, 10.0 + i / 100) for i in range(45)] == [64] * 45
    assert lookups.asked == 1
    assert made.promise(tracked, 0, 13.0) == 48
    assert released == [5]
    assert made.promise(tracked, 16, 13.1) == 32  # the engine has more than it had
    assert lookups.asked == 2
    assert made.promise(tracked, 0, 15.2) == 64
    assert released == [5, 6]


def test_a_question_that_is_given_up_is_abandoned_and_a_lost_one_is_a_miss() -> None:
    lookups = _Lookups()
    made, tracked, counts, _ = promises(lookups, lookup_age_ms=100.0)
    assert made.promise(tracked, 0, 1.0) is None
    assert made.promise(tracked, 0, 1.1) == 0
    assert counts.lookups_unanswered == 1
    made.forget(tracked)
    assert tracked.asking.ticket is None
