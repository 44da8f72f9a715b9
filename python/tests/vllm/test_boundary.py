"""Errors of the connector's own: none leaves a call of vLLM's, and each request runs to its end."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm import guests, scheduler, worker
from kvagent.vllm.boundary import MAX_ERRORS
from kvagent.vllm.worker.side import WorkerSide
from tests.vllm.setting import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvagent.vllm.link import Link
    from tests.agent import AgentProcess
    from tests.vllm.world import World

PROMPT = [(i * 7) % 90 + 3 for i in range(8 * BLOCK + 3)]
OTHER = [(i * 11) % 90 + 3 for i in range(8 * BLOCK + 3)]
STEPS = 400
START_S = 20.0  # for a session


def functions() -> Iterator[tuple[str, type, str]]:
    """Yield the functions of both sides' classes."""
    for package in (scheduler, worker, guests):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            module = importlib.import_module(found.name)
            for name, cls in vars(module).items():
                if inspect.isclass(cls) and cls.__module__ == found.name and not name.endswith("Calls"):
                    for function, value in vars(cls).items():
                        if inspect.isfunction(value) and not function.startswith("__"):
                            yield f"{name}.{function}", cls, function


FUNCTIONS = {name: (cls, function) for name, cls, function in functions()}
BEHIND_A_CALL = [
    "SchedulerSide.on_new_request", "SchedulerSide.matched", "SchedulerSide.allocated", "SchedulerSide.plan",
    "SchedulerSide.report", "SchedulerSide.finished", "SchedulerSide.reset", "SchedulerSide.pending",
    "Publication.take", "SchedulerSide._before_reset", "Loads.promise", "Loads.plan",
    "WorkerSide.begin", "WorkerSide.start", "WorkerSide.end", "WorkerSide.results", "WorkerSide.report",
    "WorkerSide.revoke_saves", "WorkerSide.submit", "WorkerSide.poll", "WorkerSide._finish",
    "WorkerSide.leave",
]  # fmt: skip


def run(world: World, *names: str) -> None:
    """Step until these requests have ended."""
    for _ in range(STEPS):
        if all(name in world.reasons for name in names):
            return
        world.step()
    pytest.fail(f"after {STEPS} steps these requests have not ended: {set(names) - set(world.reasons)}")


def errors_in(world: World, monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> list[str]:
    """Let a function raise an error as often as that. Return the errors so far."""
    cls, function = FUNCTIONS[name]
    real, raised = getattr(cls, function), list[str]()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if len(raised) < times:
            raised.append(name)
            raise RuntimeError("planted")
        return real(*args, **kwargs)

    monkeypatch.setattr(cls, function, failing)
    return raised


def planted(worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> World:
    """Run requests that save, and load, and begin anew, while a function fails."""
    other, world = worlds(), worlds()
    other.add("stored", PROMPT, 10)
    other.run()
    world.add("own", OTHER, 10)
    run(world, "own")
    errors_in(world, monkeypatch, name, times)
    for i in range(3):
        world.add(f"hit {i}", PROMPT, 10)
        world.add(f"new {i}", [i + 3, *OTHER], 10)
        world.add(f"gone {i}", PROMPT, 10)
        world.step()
        world.abort(f"gone {i}")
        run(world, f"hit {i}", f"new {i}")
        assert world.outputs[f"hit {i}"] == other.outputs["stored"]
        world.scheduler.reset_prefix_cache()
    return world


@pytest.mark.parametrize("name", BEHIND_A_CALL)
@pytest.mark.parametrize("times", [1, 10**9])
def test_an_error_behind_a_call(
    worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, name: str, times: int
) -> None:
    planted(worlds, agent, monkeypatch, name, times)


def test_loads_that_failed_with_their_step_are_not_sent_by_the_next_session(
    worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejoin = WorkerSide.rejoin

    def rejoined(self: WorkerSide, link: Link) -> None:
        rejoin(self, link)
        assert link.wait(START_S)

    monkeypatch.setattr(WorkerSide, "rejoin", rejoined)
    planted(worlds, agent, monkeypatch, "WorkerSide.begin", MAX_ERRORS)


def test_saves_of_a_step_that_an_error_kept_from_its_end_are_ended(
    worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    raised = errors_in(world, monkeypatch, "WorkerSide.end", 1)
    for name, prompt in (("one", PROMPT), ("other", OTHER)):
        world.add(name, prompt, 2)
        run(world, name)
    world.run(STEPS)
    assert raised
    assert world.side.blocks.saving == 0, "blocks are pinned for good"


def test_one_error_is_forgiven_and_many_are_not(
    worlds: Any, agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = planted(worlds, agent, monkeypatch, "Loads.promise", 1)
    assert world.side.counts.tokens_loaded
    assert world.scheduler.connector.errors.counts.errors == 1
    monkeypatch.undo()
    errors_in(world, monkeypatch, "Loads.promise", 10**9)
    for i in range(2 * MAX_ERRORS):
        world.add(f"again {i}", PROMPT, 2)
        run(world, f"again {i}")
        world.scheduler.reset_prefix_cache()  # so that the next one asks for a promise too
    assert "served UNCACHED" in caplog.text
    logged = [one for one in caplog.records if "get_num_new_matched_tokens: planted. The request" in one.message]
    assert len(logged) == 1
