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

        def disk(count: str) -> int:
            return int(agent.status()["tiers"]["list"][0][count])

        eventually(lambda: disk("puts_stored") >= LOADED // BLOCK, "the prompt is on the disk")
        eventually(lambda: agent.status()["hints"]["sessions"] == 1, "the agent knows the session")
        read = {}
        for how in ("without", "with"):
            eventually(lambda: agent.status()["leases"] == 0, "an agent that has heard that no block is in use")
            (dropped,) = hint(agent, "kv.drop", "--session", "chat")
            assert (dropped["state"], dropped["blocks"]) == ("accepted", LOADED // BLOCK)
            if how == "with":
                (begun,) = hint(agent, "kv.prefetch", "--session", "chat", "--id", "pause")
                assert begun["state"] == "deferred"
                eventually(lambda: hint(agent)[0]["state"] == "accepted", "all of it is in memory")
                assert (hint(agent)[0]["id"], hint(agent)[0]["blocks"]) == ("pause", LOADED // BLOCK)
            before = disk("hits")
            assert sum(hits(worlds(extra={"socket_dir": str(folder)})).values()) == LOADED
            read[how] = disk("hits") - before
        assert read == {"without": LOADED // BLOCK, "with": 0}
        agent.close()
