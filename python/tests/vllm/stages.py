"""An engine of two pipeline stages in a process of its own, with synchronous loads of which each
stage fails a third, alone.

It prints its answers to PROMPTS, several times, and its counters as JSON in the last line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvagent.vllm.guests.sync import StepWaits
from tests.agent import be_patient, eventually
from tests.vllm import engine as real
from tests.vllm import kernels

STAGES = 2
TIMES = 3  # the first one is cold
OPTIONS = {"weights_fixed": True, "load_mode": "sync", "lookup_wait_ms": 100, "sync_wait_ms": 10_000}


def fail_some() -> None:
    """Let each stage fail the loads whose number, modulo one more than there are stages, is its
    own.
    """
    from vllm.distributed.parallel_state import get_pp_group

    submit = StepWaits._submit

    def submitted(self: StepWaits, load: Any, step: int | None) -> None:
        failing = load.job % (STAGES + 1) == get_pp_group().rank_in_group
        submit(self, load, None if failing else step)

    StepWaits._submit = submitted  # type: ignore[method-assign]


def main(model: str, socket_dir: str) -> None:
    """Run the engine; its workers are forked, so that they have the same failures."""
    be_patient()
    kernels.let_stages_receive()
    fail_some()
    llm = real.make_engine(
        Path(model), socket_dir, options=OPTIONS, pipeline_parallel_size=STAGES, distributed_executor_backend="mp"
    )
    core = llm.llm_engine.engine_core.engine_core
    said = []
    for _ in range(TIMES):
        said.append(real.generate(llm, real.PROMPTS))
        real.settle(llm)
        eventually(llm.reset_prefix_cache, "an engine without blocks")
    side = core.scheduler.connector._scheduler
    told = {
        "said": said,
        "in_flight": core.batch_queue_size,
        "counted": dict(vars(side.counts)),
        "pinned": side.blocks.loading,
    }
    print(json.dumps(told), flush=True)
    llm.llm_engine.engine_core.shutdown()
