"""Hints through vLLM's own engine: its envelope, a session, llm-d's and Dynamo's way to name the
agent that has a prompt, and receipts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.agent import BINARY, AgentProcess, be_patient, eventually
from tests.vllm import engine as real
from tests.vllm.engine import BLOCK, PROMPTS

pytestmark = pytest.mark.engine
PROMPT = PROMPTS[5]  # 250 tokens, that no other shares


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
            assert (fetched["id"], fetched["state"], fetched["blocks"]) == ("f", "accepted", whole), answer
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
