"""Times from a request to its first token, by load mode: a real engine on the CPU whose own cache
is reset before each request, so that a warm one's prompt comes from the agent.

``python -m tests.vllm.ttft [TIMES]`` prints, for each mode, the quartiles cold and warm in
milliseconds as a line of JSON. Each mode has an engine and an agent of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.agent import AgentProcess, eventually
from tests.vllm import engine as real

TOKENS = 960  # of a prompt
COMMON = {"weights_fixed": True, "lookup_wait_ms": 100, "sync_wait_ms": 5_000}
MODES: dict[str, dict[str, Any] | None] = {
    "no connector": None,
    "async": {"load_mode": "async"},
    "sync": {"load_mode": "sync"},
    "auto": {"load_mode": "auto"},
    "layerwise": {"load_mode": "sync", "layerwise": True},
}


def prompt(i: int) -> list[int]:
    """Return a prompt with no block of another one's."""
    return [(j * 11 + i * 17) % 450 + 10 for j in range(TOKENS)]


def first_token_s(llm: Any, name: str, tokens: list[int]) -> float:
    """Return the time from a request to its first token."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    begin, taken = time.perf_counter(), 0.0
    llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, params)
    while llm.llm_engine.has_unfinished_requests():
        for result in llm.llm_engine.step():
            if not taken and result.outputs[0].token_ids:
                taken = time.perf_counter() - begin
    return taken


def measure(llm: Any, times: int) -> tuple[list[float], list[float]]:
    """Return the times of cold requests, and of warm ones that loaded nearly all their prompt."""
    cold, warm = [], []
    real.generate(llm, [prompt(-1)], 2)
    side = None if llm.llm_engine.vllm_config.kv_transfer_config is None else real.sides(llm)[0]
    for i in range(times):
        cold.append(first_token_s(llm, f"cold{i}", prompt(i)))
        forget(llm)
        if side is None:
            continue
        loaded = side.counts.tokens_loaded
        took = first_token_s(llm, f"warm{i}", prompt(i))
        if side.counts.tokens_loaded - loaded >= TOKENS - 2 * real.BLOCK:
            warm.append(took)
        forget(llm)
    return cold, warm


def forget(llm: Any) -> None:
    """Reset the engine's own cache."""
    real.settle(llm)
    eventually(llm.reset_prefix_cache, "an engine without blocks")


def main(times: int) -> None:
    """Measure all modes, one after the other, and print a table."""
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        model = real.write_model(Path(folder) / "model", ffn=4096)
        for mode, options in MODES.items():
            path = Path(folder) / mode.replace(" ", "-")
            path.mkdir(mode=0o700)
            agent = AgentProcess(path)
            more = {} if options is None else {"options": COMMON | options}
            llm = real.make_engine(model, None if options is None else str(path), max_num_batched_tokens=1024, **more)
            cold, warm = measure(llm, times)
            llm.llm_engine.engine_core.shutdown()
            agent.close()
            row: dict[str, Any] = {"mode": mode, "warm hits": len(warm), "load": round(os.getloadavg()[0])}
            row |= {name: quartiles(one) for name, one in (("cold", cold), ("warm", warm)) if one}
            print(json.dumps(row), flush=True)


def quartiles(values: list[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile, in milliseconds."""
    cuts = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [round(one * 1e3, 1) for one in cuts]


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
