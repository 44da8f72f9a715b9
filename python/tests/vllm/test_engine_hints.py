"""Hints through vLLM's own engine: its envelope, a session, llm-d's and Dynamo's way to name the
agent that has a prompt, and receipts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.agent import BINARY, AgentProcess, be_patient, eventually
from tests.holding import HoldingAgent
from tests.vllm import engine as real
from tests.vllm.engine import BLOCK, PROMPTS
from tests.vllm.ttft import first_token_s, forget, prompt, quartiles

pytestmark = pytest.mark.engine
PROMPT = PROMPTS[5]  # 250 tokens, that no other shares
PAUSES, PART = 15, 0.95  # of a session, and what a prefetch saves at least


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def told(agent: AgentProcess, *arguments: str) -> list[dict[str, Any]]:
    """Return the receipts that ``kvagent hint`` prints."""
    command = [str(BINARY), "hint", *arguments, "--json", "--socket-dir", str(agent.folder)]
    run = subprocess.run(command, check=True, capture_output=True, timeout=60)
    receipts: list[dict[str, Any]] = json.loads(run.stdout)["receipts"]
    return receipts


async def ask(arguments: dict[str, Any], peer: str) -> dict[str, Any]:
    """Return what a request with hints says, and what it is told of them."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    hints = KvHintsEnvelope("0.1", "message", [
        KvHintAction("f", "kv.fetch", "1.0", {"source_control_endpoint": f"tcp://{peer}", "block_hashes": [1]}),
        KvHintAction("r", "kv.retain", "1.0", {"priority": 90, "lease_until": time.time() + 600}),
        KvHintAction("p", "kv.pin", "1.0", {"seconds": 600}),
        KvHintAction("o", "kv.other", "1.0", {}),
    ])  # fmt: skip
    last: Any = None
    prompt: Any = {"prompt_token_ids": PROMPT}
    async for one in engine.generate(prompt, params, "one", kv_hints=hints, session_id="chat"):
        last = one
    engine.shutdown()
    return {
        "said": list(last.outputs[0].token_ids), "cached": last.num_cached_tokens,
        "receipts": last.kv_transfer_params["kvagent.receipts"],
    }  # fmt: skip


def print_told(model: str, socket_dir: str, peer: str) -> None:
    """Print what ``ask`` returns, as JSON in the last line."""
    from tests.vllm import kernels

    be_patient()
    kernels.plugin()
    kernels.install()
    arguments = real.arguments(Path(model), socket_dir)
    arguments.pop("disable_log_stats")
    print(json.dumps(asyncio.run(ask(arguments, peer))), flush=True)


def test_vllms_envelope_steers(opt: Path, reference: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        key = Path(folder) / "key"
        key.write_bytes(b"k" * 32)
        key.chmod(0o600)
        agents, peers = [], [f"127.0.0.1:{free_port()}" for _ in range(2)]
        try:
            for name, peer in zip(("far", "near"), peers, strict=True):
                path = Path(folder) / name
                path.mkdir(mode=0o700)
                agents.append(AgentProcess(path, "--peer-listen", peer, "--peer-key-file", str(key)))
            far, near = agents
            assert real.run_elsewhere(opt, far.folder) == reference
            answer = real.told_elsewhere(print_told, str(opt), str(near.folder), peers[0])
            assert answer["said"] == reference[5]
            whole = (len(PROMPT) - 1) // BLOCK
            fetched, retained, pinned, other = answer["receipts"]
            # The request's own look-up may have fetched some of them before the hint was read.
            assert (fetched["id"], fetched["state"]) == ("f", "accepted"), answer
            assert 0 < fetched["blocks"] <= whole, answer
            assert answer["cached"] == whole * BLOCK
            assert [retained["state"], pinned["state"]] == ["deferred"] * 2
            assert (other["id"], other["state"]) == ("o", "rejected")
            assert "no such action" in other["reason"]
            eventually(lambda: near.status()["hints"]["pinned_blocks"] >= whole, "pins, once its blocks are stored")
            states = {one["action"]: one["state"] for one in told(near)}
            assert states == {"kv.fetch": "accepted", "kv.retain": "accepted", "kv.pin": "accepted"}
            assert near.status()["hints"]["ended"] == 1
            (again,) = told(near, "kv.pin", "--session", "chat", "--for", "20m")
            assert again["state"] == "accepted"
            assert again["blocks"] >= whole
        finally:
            for one in agents:
                one.close()


def test_a_prefetch_at_the_pause_saves_what_memory_saves(opt: Path, tmp_path: Path) -> None:
    """A session comes back from a tool, and only a slow disk has its blocks. A prefetch as the tool
    ends saves 95 % of the time to its first token that blocks save which never left memory.
    """
    from vllm import SamplingParams

    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    agent = HoldingAgent(path, str(tmp_path / "disk"))
    options = {"weights_fixed": True, "pin_percent": 50, "lookup_wait_ms": 1_000, "lookup_grace_ms": 10_000}
    llm = real.make_engine(opt, str(path), options=options)
    named: Any = {"kv_transfer_params": {"kvagent.session": "chat"}}
    session = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, extra_args=named)
    tokens, whole = prompt(0), len(prompt(0)) // BLOCK

    def disk(count: str) -> int:
        return int(agent.status()["tiers"]["list"][0][count])

    spent: dict[str, list[float]] = {"none": [], "hint": [], "oracle": []}
    try:
        llm.generate([{"prompt_token_ids": tokens}], session, use_tqdm=False)
        real.settle(llm)
        eventually(lambda: disk("puts_stored") == whole, "the prompt is on the disk")
        eventually(lambda: agent.status()["hints"]["sessions"] == 1, "the agent knows the session")
        counts = real.sides(llm)[0].counts
        for i in range(PAUSES):
            for how, times in spent.items():
                forget(llm)
                eventually(lambda: agent.status()["leases"] == 0, "an agent that has heard that no block is in use")
                if how != "oracle":
                    # Of a load that is over, the agent may have blocks in use for a moment.
                    eventually(lambda: told(agent, "kv.drop", "--session", "chat")[0]["state"] == "accepted", "a drop")
                if how == "hint":
                    told(agent, "kv.prefetch", "--session", "chat")
                    eventually(lambda: told(agent)[0]["state"] == "accepted", "all of it is in memory")
                loaded, read = counts.tokens_loaded, disk("hits")
                times.append(first_token_s(llm, f"{how}{i}", tokens))
                assert counts.tokens_loaded - loaded == whole * BLOCK
                assert (disk("hits") - read >= whole) == (how == "none")
        saved = [(none - hint) / (none - oracle) for none, hint, oracle in zip(*spent.values(), strict=True)]
        print({how: quartiles(times) for how, times in spent.items()}, statistics.median(saved))
        assert statistics.median(saved) >= PART
    finally:
        llm.llm_engine.engine_core.shutdown()
        agent.close()
