"""The real engine with loads that its steps wait for: its output equals its output when it computes
everything, whatever happens to a block or to the agent between the promise and the load.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import AgentProcess
from tests.sides import waits as step_waits
from tests.vllm import agents, stages
from tests.vllm import engine as real
from tests.vllm.agents import figures
from tests.vllm.engine import PROMPTS, WHOLE_BLOCKS
from tests.vllm.test_engine import Alive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.engine
WAIT_MS = 10_000  # of a step: the most that is allowed
STOPPED_S = 0.3  # of a step, from when its agent is stopped


@pytest.fixture(scope="module")
def alive(opt: Path, reference: list[list[int]]) -> Iterator[Alive]:
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        path = Path(folder) / "run"
        path.mkdir(mode=0o700)
        agent = AgentProcess(path)
        options = {"weights_fixed": True, "load_mode": "sync", "sync_wait_ms": WAIT_MS, "lookup_wait_ms": 100}
        llm = real.make_engine(opt, str(agent.folder), options=options)
        yield Alive(llm, agent)
        llm.llm_engine.engine_core.shutdown()
        agent.close()


def before_load(alive: Alive, patch: pytest.MonkeyPatch, act: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Call ``act`` once, before a worker sends a load that its step waits for.

    Return how long the steps from then on wait, and how long those after the first one may still
    wait whenever they begin to.
    """
    loads, waits, again = step_waits(alive.worker), list[float](), list[float]()
    start, listen = loads.start, loads._listen

    def starts(plan: Any, of: Any) -> Any:
        if not any(load.sync for load in of):
            return start(plan, of)
        if not waits:
            act()
        begin = time.monotonic()
        left = start(plan, of)
        waits.append(time.monotonic() - begin)
        return left

    def listens() -> None:
        if waits:
            again.append(loads._left_s)
        listen()

    patch.setattr(loads, "start", starts)
    patch.setattr(loads, "_listen", listens)
    return waits, again


def test_cold_and_warm(alive: Alive, reference: list[list[int]]) -> None:
    alive.fill(reference)
    before, count = dict(vars(alive.side.counts)), alive.agent.status()["blocks_loaded"]
    assert alive.says() == reference
    after = dict(vars(alive.side.counts))
    assert after["loads_sync"] - before["loads_sync"] >= len(PROMPTS) - 1
    assert after["loads_sync"] - before["loads_sync"] == after["loads"] - before["loads"]
    assert after["loads_sync_failed"] == 0
    warm = alive.agent.status()["blocks_loaded"] - count
    assert warm * 2 >= WHOLE_BLOCKS
    print(f"warm: {warm} of {WHOLE_BLOCKS} whole blocks of prompts loaded; {figures(alive.agent)}")


@pytest.mark.parametrize("how", ["spoil", "freeze", "kill"])
def test_what_happens_between_promise_and_load(alive: Alive, reference: list[list[int]], how: str) -> None:
    patch = pytest.MonkeyPatch()  # which ends before the test does
    alive.fill(reference)
    before = alive.side.counts.loads_sync_failed

    def freeze() -> None:
        alive.agent.freeze()
        patch.setattr(step_waits(alive.worker), "_wait_s", STOPPED_S)

    acts = {"spoil": lambda: agents.spoil(alive.agent.process.pid), "freeze": freeze, "kill": alive.agent.kill}
    waits, again = before_load(alive, patch, acts[how])
    try:
        assert alive.says() == reference
        assert alive.side.counts.loads_sync_failed > before, "nothing happened"
        assert how != "freeze" or not again, "a silent agent was waited for more than once"
        assert (alive.side.blocks.loading > 0) == (how == "freeze"), "pins without a fence to come, or none"
        assert alive.says() == reference
    finally:
        patch.undo()
        if how != "spoil":
            alive.agent.start() if how == "kill" else alive.agent.thaw()
    alive.joined()
    assert alive.says() == reference
    alive.forget()
    loaded = alive.side.counts.tokens_loaded
    assert alive.says() == reference
    if how != "kill":
        assert alive.side.counts.tokens_loaded > loaded
    print(f"{how}: steps waited {[round(one * 1e3) for one in waits]} ms; {dict(vars(alive.side.counts))}")


def test_loads_that_fail_in_one_pipeline_stage_alone(
    opt: Path, agent: AgentProcess, reference: list[list[int]]
) -> None:
    """Two stages have two steps in flight; the other stage, which has all of a load, computes its
    request anew too.
    """
    told = real.told_elsewhere(stages.main, str(opt), str(agent.folder))
    assert told["said"] == [reference] * stages.TIMES
    assert told["in_flight"] == stages.STAGES
    assert told["pinned"] == 0
    counted = told["counted"]
    warm = (stages.TIMES - 1) * (len(PROMPTS) - 1)
    assert counted["loads_sync"] >= warm
    assert 2 <= counted["loads_sync_failed"] < counted["loads_sync"]
    print(f"two stages: {counted}")
