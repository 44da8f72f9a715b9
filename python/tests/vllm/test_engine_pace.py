"""The real engine beside copies that give way: its decode steps reach the agent, and saves that
wait for their budget change no token.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import AgentProcess
from tests.vllm import engine as real
from tests.vllm.engine import PROMPTS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.engine
TOKENS = 64  # of an answer: whole blocks of them are saved beside decode steps


@pytest.fixture
def slow() -> Iterator[AgentProcess]:
    """An agent whose saves have the lowest rate, which is less than the engine makes."""
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        path = Path(folder) / "run"
        path.mkdir(mode=0o700)
        process = AgentProcess(path, "--pace", "1MiB/s")
        yield process
        process.close()


def pace(agent: AgentProcess) -> dict[str, Any]:
    (cpu,) = agent.status()["paces"]
    return dict(cpu)


def test_saves_that_wait_for_their_pace(opt: Path, slow: AgentProcess) -> None:
    llm = real.make_engine(opt, None)
    reference = real.generate(llm, PROMPTS, TOKENS)
    llm.llm_engine.engine_core.shutdown()
    llm = real.make_engine(opt, str(slow.folder))
    try:
        assert pace(slow)["setting"] == "fixed"
        for _ in range(2):
            assert real.generate(llm, PROMPTS, TOKENS) == reference
            real.settle(llm)
            llm.reset_prefix_cache()
        told = pace(slow)
        assert told["save_waits"] > 0
        steps = told["steps_alone"] + told["steps_beside"] + told["steps_other"]
        assert TOKENS - 16 <= steps <= 2 * TOKENS  # all but the first and last of each answer, and the latest reports
        status = slow.status()
        assert status["blocks_saved"] > 0
        assert status["blocks_loaded"] > 0
        print(f"{steps} decode steps; {told}")
    finally:
        llm.llm_engine.engine_core.shutdown()
