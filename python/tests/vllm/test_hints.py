"""Hints between two turns: real schedulers and drivers, with an agent that has a disk."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.agent import BINARY, AgentProcess, eventually
from tests.vllm.setting import BLOCK
from tests.vllm.test_hit_sources import LOADED, PROMPT, hits


def hint(agent: AgentProcess, *arguments: str) -> list[dict[str, Any]]:
    command = [str(BINARY), "hint", *arguments, "--json", "--socket-dir", str(agent.folder)]
    run = subprocess.run(command, check=True, capture_output=True, timeout=60)
    receipts: list[dict[str, Any]] = json.loads(run.stdout)["receipts"]
    return receipts


def test_a_prefetch_between_turns_has_the_prompt_in_memory(worlds: Any) -> None:
    """Of the same prompt in the same pool, everything comes from the disk without it."""
    pytest.importorskip("vllm.v1.metrics.cache_hit_source")
    with tempfile.TemporaryDirectory(prefix="kvagent-") as name:
        folder = Path(name) / "run"
        folder.mkdir(mode=0o700)
        agent = AgentProcess(folder, "--pool", "16MiB", "--tier", f"disk:{name}/disk?capacity=64MiB&write=save")
        cold = worlds(extra={"socket_dir": str(folder)})
        cold.add("cold", PROMPT, 4, params={"kvagent.session": "chat"})
        cold.run()
        disk = lambda: agent.status()["tiers"]["list"][0]["puts_stored"] >= LOADED // BLOCK  # noqa: E731
        eventually(disk, "the prompt is on the disk")
        eventually(lambda: agent.status()["hints"]["sessions"] == 1, "the agent knows the session")
        found = {}
        for how in ("without", "with"):
            (dropped,) = hint(agent, "kv.drop", "--session", "chat")
            assert (dropped["state"], dropped["blocks"]) == ("accepted", LOADED // BLOCK)
            if how == "with":
                (begun,) = hint(agent, "kv.prefetch", "--session", "chat", "--id", "pause")
                assert begun["state"] == "deferred"
                eventually(lambda: hint(agent)[0]["state"] == "accepted", "all of it is in memory")
                assert (hint(agent)[0]["id"], hint(agent)[0]["blocks"]) == ("pause", LOADED // BLOCK)
            found[how] = hits(worlds(extra={"socket_dir": str(folder)}))
        assert found == {"without": {"disk": LOADED}, "with": {"host": LOADED}}
        agent.close()
