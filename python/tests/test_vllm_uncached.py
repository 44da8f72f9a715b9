"""Engines that cannot be served: what is told to the agent, and the retirement of the scheduler's
side when a worker finds the reason.
"""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.doctor import engines as engine_findings
from kvagent.doctor import sharing
from kvagent.vllm.boundary import MAX_REASON, RetiredScheduler, notice
from kvagent.vllm.link import Link
from kvagent.vllm.options import OptionError, parse
from kvagent.vllm.plan import Report, StepPlan
from tests.agent import AgentProcess, eventually
from tests.simulated import SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def engines(agent: AgentProcess) -> Iterator[Callable[..., SimulatedEngine]]:
    made: list[SimulatedEngine] = []

    def make(name: str = "one", **more: Any) -> SimulatedEngine:
        made.append(SimulatedEngine(agent, name, **more))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


IDENTITY = {"model": "m", "dtype": "float16", "tenant": ""}
REASON = "KV cache group 0 is of OtherSpec"


def listed(agent: AgentProcess) -> dict[str, Any]:
    return {one["instance"]: one for one in agent.status()["engine_list"]}


def test_the_agent_lists_an_uncached_engine_with_the_reason_until_it_ends(agent: AgentProcess) -> None:
    told = notice(str(agent.folder), "lonely", IDENTITY, REASON)
    try:
        engine = eventually(lambda: listed(agent).get("lonely"), "the engine in the agent's list")
        assert engine["identity"]["uncached"] == REASON
        assert not engine["complete"]
        status = agent.status()
        found = [finding for finding in engine_findings(status) if "lonely" in finding.text]
        assert [REASON in one.text and "on_unsupported" in one.hint for one in found] == [True]
        assert not [one for one in sharing(status) if "lonely" in one.text]
    finally:
        told.close()
    eventually(lambda: "lonely" not in listed(agent), "the end of the engine")


def test_an_agent_that_starts_later_or_again_is_told_too(agent: AgentProcess) -> None:
    told = notice(str(agent.folder), "lonely", IDENTITY, REASON)

    def step() -> bool:
        told.poll()
        return "lonely" in listed(agent)

    try:
        eventually(step, "the engine in the agent's list")
        agent.kill()
        agent.start()
        eventually(step, "the engine in the new agent's list")
    finally:
        told.close()


def test_a_long_reason_is_cut_and_has_one_line(agent: AgentProcess) -> None:
    session = notice(str(agent.folder), "e" * 200, IDENTITY, "a\nb " * MAX_REASON)
    told = eventually(lambda: listed(agent).get("e" * 128), "the engine")["identity"]["uncached"]
    session.close()
    assert len(told) == MAX_REASON
    assert told.startswith("a b a b")


def test_an_uncached_engine_waits_for_nothing() -> None:
    side = RetiredScheduler(None)
    assert side.plan(None) == StepPlan(uncached=True)
    assert not side.pending()


def test_reports_of_ranks_keep_the_reason() -> None:
    for joined in (Report().join(Report(unsupported="why")), Report(unsupported="why").join(Report())):
        assert pickle.loads(pickle.dumps(joined)).unsupported == "why"  # noqa: S301


def test_a_rank_that_is_refused_retires_the_engine_with_saves_in_flight(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """A rank that the agent serves may still read the blocks, so its saves are revoked, and nothing
    is freed for good before it has reported them.
    """
    engine = engines()
    agent.freeze()
    request = engine.request("a", "p", 4)
    engine.admit(request)
    engine.step((request, request.num_tokens))
    engine.scheduler.finished(request, normally=True)
    engine.step()
    assert engine.worker.busy(), "nothing is in flight"
    blocks = engine.scheduler.blocks
    saving = blocks.saving
    side = engine.scheduler
    engine.scheduler = retired = RetiredScheduler(side)  # type: ignore[assignment]
    assert blocks.saving == saving > 0, "the step that revokes may reuse them, and vLLM zeroes first"
    assert retired.pending()
    engine.step()
    assert blocks.saving == 0
    assert retired.pending()
    agent.thaw()
    eventually(lambda: (engine.step(), not retired.pending())[1], "the report of the saves")
    assert {block.ref_cnt for block in engine.pool.blocks} == {1}
    assert retired.plan(None).uncached
    engine.scheduler = side  # which closes


@pytest.mark.parametrize("fails", ["before the next step", "in it"])
def test_saves_that_a_failed_side_revoked_are_revoked(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    engine = engines()
    agent.freeze()
    request = engine.request("a", "p", 4)
    engine.admit(request)
    engine.step((request, request.num_tokens))
    engine.scheduler.finished(request, normally=True)
    assert engine.pool.reset_prefix_cache()
    side = engine.scheduler
    if fails == "in it":
        monkeypatch.setattr(side.agent, "tell", lambda _: pytest.fail("an error at the end of a plan"))
        with pytest.raises(pytest.fail.Exception):
            engine.step()
    engine.scheduler = retired = RetiredScheduler(side)  # type: ignore[assignment]
    engine.step()
    assert any(engine.sync.words.revocations), "the agent would store blocks that are reused"
    assert engine.pool.reset_prefix_cache()
    assert {block.ref_cnt for block in engine.pool.blocks} == {1}
    agent.thaw()
    eventually(lambda: (engine.step(), not retired.pending())[1], "the report of the saves")
    assert agent.status()["blocks_stored"] == 0
    engine.scheduler = side  # which closes


def test_an_engine_that_leaves_its_agent_does_not_report_it_gone(
    engines: Callable[..., SimulatedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines()
    request = engine.request("a", "p", 4)
    assert engine.matched(request) == 0  # so that there is a session
    with caplog.at_level(logging.INFO, "vllm.kvagent"):
        RetiredScheduler(engine.scheduler)
    assert not engine.link.busy
    assert [one.getMessage() for one in caplog.records] == []


def test_a_worker_without_a_link_fails_its_jobs_at_once(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    engine = engines()
    assert engine.worker.leave()
    engine.worker.rejoin(Link("", "a test", None))
    engine.worker.refuse("why")
    request = engine.request("a", "p", 4)
    engine.admit(request)
    engine.step((request, request.num_tokens))
    engine.scheduler.finished(request, normally=True)
    engine.quiet()
    assert not engine.worker.busy()
    assert {block.ref_cnt for block in engine.pool.blocks} == {1}
    assert agent.status()["blocks_stored"] == 0


def test_on_unsupported_has_two_values() -> None:
    assert parse({}).on_unsupported == "uncached"
    assert parse({"on_unsupported": "fail"}).on_unsupported == "fail"
    with pytest.raises(OptionError, match=r"^on_unsupported: 'ignore', allowed is one of uncached, fail$"):
        parse({"on_unsupported": "ignore"})
