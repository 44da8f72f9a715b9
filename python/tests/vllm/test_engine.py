"""The real engine: what it says with blocks from the agent is what it says when it computes everything itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import AgentProcess, eventually
from tests.vllm import engine as real

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine
PROMPTS = real.prompts()
WHOLE_BLOCKS = sum((len(p) - 1) // real.BLOCK for p in PROMPTS)


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return real.write_model(tmp_path_factory.mktemp("opt") / "model")


@pytest.fixture(scope="module")
def reference(opt: Path) -> list[list[int]]:
    """What the engine says without the connector."""
    engine = real.make_engine(opt, None)
    said = real.generate(engine, PROMPTS)
    assert len({tuple(s) for s in said}) == len(said), "outputs that do not depend on the prompt show nothing"
    return said


@pytest.fixture
def engines(opt: Path, agent: AgentProcess) -> Iterator[Any]:
    made = []

    def make(**more: Any) -> Any:
        made.append(real.make_engine(opt, str(agent.folder), **more))
        return made[-1]

    yield make
    for engine in made:
        engine.llm_engine.engine_core.shutdown()


def loaded(agent: AgentProcess) -> int:
    return int(agent.status()["blocks_loaded"])


def test_cold_warm_and_in_a_second_engine(
    engines: Any, agent: AgentProcess, opt: Path, reference: list[list[int]]
) -> None:
    engine = engines()
    assert real.generate(engine, PROMPTS) == reference
    stored = agent.status()["blocks_stored"]
    assert stored > 0
    before = loaded(agent)
    assert engine.reset_prefix_cache()
    assert real.generate(engine, PROMPTS) == reference
    warm = loaded(agent) - before
    assert warm * 2 >= WHOLE_BLOCKS
    before = loaded(agent)
    command = [sys.executable, "-m", "tests.vllm.engine", str(opt), str(agent.folder)]
    second = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert json.loads(second.stdout.splitlines()[-1]) == reference
    assert (loaded(agent) - before) * 2 >= WHOLE_BLOCKS
    print(
        f"blocks: saved {stored}, loaded warm {warm}, in the second engine {loaded(agent) - before}, "
        f"whole in prompts {WHOLE_BLOCKS}"
    )


def test_an_agent_killed_and_started_again(engines: Any, agent: AgentProcess, reference: list[list[int]]) -> None:
    engine = engines()
    assert real.generate(engine, PROMPTS) == reference
    agent.kill()
    engine.reset_prefix_cache()
    assert real.generate(engine, PROMPTS) == reference
    agent.start()
    eventually(lambda: agent.status()["regions"] >= 2, "the engine at the new agent")
    assert real.generate(engine, PROMPTS) == reference  # local hits: they are saved nevertheless
    assert agent.status()["blocks_stored"] > 0
    engine.reset_prefix_cache()
    assert real.generate(engine, PROMPTS) == reference
    assert loaded(agent) > 0


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_an_agent_that_goes_away_at_any_moment(
    engines: Any, agent: AgentProcess, reference: list[list[int]], how: str
) -> None:
    engine = engines(deadline_ms=200)
    assert real.generate(engine, PROMPTS) == reference
    for delay_ms in (0, 5, 30):
        assert engine.reset_prefix_cache() or True  # a load that was given up holds its blocks until its fence
        timer = threading.Timer(delay_ms / 1e3, getattr(agent, how))
        timer.start()
        begin = time.monotonic()
        assert real.generate(engine, PROMPTS) == reference
        assert time.monotonic() - begin < 60
        timer.join()
        agent.start() if how == "kill" else agent.thaw()
        assert real.generate(engine, PROMPTS) == reference


def test_too_few_blocks(engines: Any, agent: AgentProcess, reference: list[list[int]]) -> None:
    engine = engines(num_gpu_blocks_override=34)
    for _ in range(2):
        assert real.generate(engine, PROMPTS) == reference
        engine.reset_prefix_cache()


def test_an_engine_whose_core_is_a_process_of_its_own(
    engines: Any, agent: AgentProcess, opt: Path, reference: list[list[int]], tmp_path: Path
) -> None:
    """Scheduler and worker there, LLM here; it loads what an engine in one process saved."""
    assert real.generate(engines(), PROMPTS) == reference
    before = loaded(agent)
    # The stand-ins come to the other process as the connector does, by an entry point.
    plugin = tmp_path / "standins-0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: standins\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nstandins = tests.vllm.kernels:install\n")
    command = [sys.executable, "-m", "tests.vllm.engine", str(opt), str(agent.folder)]
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == reference
    assert (loaded(agent) - before) * 2 >= WHOLE_BLOCKS
