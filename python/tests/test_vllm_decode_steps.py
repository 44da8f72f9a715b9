"""Decode steps: which are reported, and that a real agent takes them."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

from kvagent.errors import Busy
from kvagent.vllm.plan import StepPlan
from kvagent.vllm.scheduler.side import _decoding
from kvagent.vllm.worker.side import REPORT_S, REPORT_STEPS, DecodeSteps, WorkerSide, make_clock
from tests.agent import AgentProcess, eventually
from tests.simulated import SimulatedEngine


def output(tokens: dict[str, int], new: bool = False, drafts: dict[str, list[int]] | None = None) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=["new"] * new, scheduled_spec_decode_tokens=drafts or {},
    )  # fmt: skip


def test_only_steps_in_which_every_request_decodes_count() -> None:
    assert _decoding(output({"a": 1, "b": 1})) == 2
    assert _decoding(output({"a": 3, "b": 2}, drafts={"a": [7, 8], "b": [9]})) == 2
    assert _decoding(output({"a": 1, "b": 512})) == 0
    assert _decoding(output({"a": 1}, new=True)) == 0  # the engine may have stood still before it
    assert _decoding(output({})) == 0


def read(steps: bytes) -> list[tuple[int, int, int]]:
    return list(struct.iter_unpack("<III", steps))


def test_steps_are_reported_together_with_their_age() -> None:
    steps = DecodeSteps()
    told = [steps.begin(3, number * 0.01) for number in range(REPORT_STEPS + 1)]
    assert told[:-1] == [b""] * REPORT_STEPS
    reported = read(told[-1])
    assert [age for age, _, _ in reported] == [(REPORT_STEPS - 1 - i) * 10_000 for i in range(REPORT_STEPS)]
    assert {(took, requests) for _, took, requests in reported} == {(10_000, 3)}


def test_a_step_before_which_the_engine_may_have_stood_still_is_not_reported() -> None:
    steps = DecodeSteps()
    for requests, now in ((2, 0.0), (0, 0.01), (2, 5.0), (2, 5.01), (0, 9.0)):
        assert steps.begin(requests, now) == b"" or now == 9.0
    assert read(steps.begin(0, 9.0 + REPORT_S)) == []  # reported with the step before
    steps = DecodeSteps()
    steps.begin(2, 0.0)
    steps.begin(2, 0.01)
    assert read(steps.begin(0, 0.01 + REPORT_S)) == [(250_000, 10_000, 2)]


def test_a_step_of_any_length_can_be_reported() -> None:
    steps = DecodeSteps()
    steps.begin(1, 0.0)
    steps.begin(1, 1e6)
    assert read(steps.begin(0, 2e6)) == [(2**32 - 1, 2**32 - 1, 1)]


def test_an_agent_that_cannot_take_steps_costs_nothing() -> None:
    """One whose socket is full loses the report."""
    told: list[bytes] = []

    def refuse(steps: bytes) -> None:
        told.append(steps)
        raise Busy("full")

    session = SimpleNamespace(send=refuse)
    link: Any = SimpleNamespace(current=lambda: session)
    sync = make_clock(None)
    worker = WorkerSide(link, sync, per_block=True)
    for _ in range(2 * REPORT_STEPS + 1):
        worker.begin(StepPlan(decoding=1))
        worker.end(StepPlan())
    assert len(told) == 2
    sync.close()


def test_an_agent_learns_of_decode_steps(agent: AgentProcess) -> None:
    engine = SimulatedEngine(agent, "one")
    try:
        for _ in range(4 * REPORT_STEPS + 1):
            plan = StepPlan(decoding=4)
            engine.worker.begin(plan)
            engine.worker.end(plan)
        eventually(lambda: agent.status()["paces"][0]["steps_alone"] == 4 * REPORT_STEPS, "all steps")
        assert agent.status()["paces"][0]["device"] == "cpu"
    finally:
        engine.close()
