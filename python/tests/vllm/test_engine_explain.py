"""`kvagent explain` names why a real engine's prompts missed."""

from __future__ import annotations

import datetime
import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import BINARY, AgentProcess, eventually
from tests.vllm import engine as real

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine
BLOCKS = 5


def kvagent(node: AgentProcess, *command: str) -> Any:
    """Return what a command prints, read as JSON."""
    done = subprocess.run([BINARY, *command, "--socket-dir", node.folder], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_planted_misses_are_named(opt: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    node = AgentProcess(folder, "--pool", "1MiB")
    llm = real.make_engine(opt, str(node.folder))

    names: dict[int, str] = {}  # of look-ups, by prompt

    def ask(seed: int) -> dict[str, Any]:
        """Ask for a prompt that the engine itself does not have, and explain its look-up."""
        prompt = [(seed * 31 + i) % 400 + 5 for i in range(BLOCKS * real.BLOCK + 1)]

        def asked() -> bool:
            llm.reset_prefix_cache()
            begin = datetime.datetime.now(tz=datetime.timezone.utc).isoformat()
            real.generate(llm, [prompt])  # it asks nothing while it learns of a reset
            real.settle(llm)  # which asks for shorter ones
            for one in kvagent(node, "explain", "--json", "--last", "100")["lookups"]:
                if one["hashes"] == BLOCKS and one["at"] > begin and one["id"] == names.get(seed, one["id"]):
                    names[seed] = one["id"]
                    return True
            return False

        eventually(asked, "the look-up")
        found: dict[str, Any] = kvagent(node, "explain", "--json", "--request", names[seed])
        return found

    try:
        cold = ask(1)
        assert (cold["reason"], cold["blocks"][0]["to"]) == ("not_stored", BLOCKS - 1)
        eventually(lambda: node.status()["blocks_stored"] == BLOCKS, "the prompt is stored")
        assert ask(1)["reason"] == "complete"
        for seed in range(2, 10):  # more than the pool holds
            assert ask(seed)["reason"] == "not_stored"
        evicted = ask(1)
        assert evicted["reason"] == "evicted", evicted
        subprocess.run(
            [BINARY, "cache", "rm", "--model", evicted["model"], "--socket-dir", node.folder],
            check=True, capture_output=True,
        )  # fmt: skip
        eventually(lambda: node.status()["blocks_stored"] == 0, "nothing is stored")
        reset = ask(9)
        assert (reset["reason"], reset["blocks"][0].get("by")) == ("reset", "the operator"), reset
        causes = {one["reason"] for one in kvagent(node, "explain", "--json")["reasons"]}
        assert causes == {"not_stored", "evicted", "reset"}
    finally:
        llm.llm_engine.engine_core.shutdown()
        node.close()
