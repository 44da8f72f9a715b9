"""A simulated engine: requests, blocks and the block pool are stand-ins; sessions, look-ups and
copies are real.

It needs neither vllm nor torch. Every running request computes one token per step, and only the
connector's two sides are timed: what they add to an empty step.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvagent.bench.figures import Times
from kvagent.identity import identity_pairs
from kvagent.messages import Group, Role, Segment
from kvagent.registration import Registration
from kvagent.shm import SharedMemory, SyncWords
from kvagent.vllm.geometry import Geometry
from kvagent.vllm.link import Link
from kvagent.vllm.options import Options
from kvagent.vllm.plan import REVOKES
from kvagent.vllm.scheduler.side import SchedulerSide
from kvagent.vllm.worker.side import WorkerSide
from kvagent.vllm.worker.sync import EVENTS

MOST = 256  # requests
STEPS = 320
WARM_UP = 32
BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
PROMPT_BLOCKS = 64
REQUEST_BLOCKS = PROMPT_BLOCKS + (STEPS + WARM_UP) // BLOCK_TOKENS + 2
BLOCKS = MOST * REQUEST_BLOCKS
STEP_S = 0.001  # between two steps; else the agent's CPU time would be measured too
LOOKUPS = 500
NOTHING = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None)  # a step's output


@dataclass(slots=True)
class _Block:
    """Like vLLM's KVCacheBlock."""

    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False
    ref_cnt: int = 1


class _Pool:
    """Reference counts like those of vLLM's block pool."""

    num_gpu_blocks = BLOCKS

    def __init__(self) -> None:
        self.blocks = [_Block(i) for i in range(BLOCKS)]

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return BLOCKS

    def get_new_blocks(self, count: int) -> list[_Block]:
        raise NotImplementedError(f"{count} blocks: all tables are there from the start")

    def reset_prefix_cache(self) -> bool:
        return True


class Engine:
    """The two sides of one engine, and its requests' block tables."""

    def __init__(self, socket_dir: str) -> None:
        self.name = f"bench {os.getpid()} {time.monotonic_ns()}"
        self.group = Group(BLOCK_TOKENS, BLOCKS)
        self.cache = SharedMemory(BLOCKS * BLOCK_BYTES)
        self.words = SyncWords(EVENTS, REVOKES)
        self.pool = self.block_pool = _Pool()
        self.tables: dict[str, list[Any]] = {}
        worker_link = Link(socket_dir, "bench, worker", lambda: self._registration(Role.WORKER))
        link = Link(socket_dir, "bench, scheduler", lambda: self._registration(Role.SCHEDULER))
        if worker_link.wait(5) is None or link.wait(5) is None:
            sys.exit(f"no agent answers in {socket_dir}")
        geometry = Geometry((self.group,), BLOCK_TOKENS)
        self.scheduler = SchedulerSide(Options(), geometry, 1, link, saves=True)
        self.scheduler.bind(self)
        self.worker = WorkerSide(worker_link, self.words, per_block=True)
        self.scheduler.plan(NOTHING)  # adopts the session: earlier blocks would be saved too

    def get_blocks(self, request: str) -> Any:
        """Return the block tables in the form of vLLM's KV cache manager."""
        return SimpleNamespace(blocks=(self.tables[request],))

    def close(self) -> None:
        """Leave the agent."""
        self.scheduler.close()
        self.worker.close()
        self.words.close()
        self.cache.close()

    def _registration(self, role: Role) -> Registration:
        common: dict[str, Any] = {
            "instance": self.name, "role": role, "groups": (self.group,), "hash_tokens": BLOCK_TOKENS,
            "identity": identity_pairs({"model": self.name, "dtype": "none", "tenant": ""}),
        }  # fmt: skip
        if role == Role.SCHEDULER:
            return Registration(**common)
        regions = [(self.words.memory.region(0), self.words.memory.fd), (self.cache.region(1), self.cache.fd)]
        segments = {0: [Segment(1, 0, BLOCK_BYTES, BLOCK_BYTES)]}
        return Registration(**common, sync=self.words.sync(0), regions=regions, segments=segments)


def steps(engine: Engine, running: int) -> tuple[Times, Times, float]:
    """Return the times of the scheduler's and the worker's side, and the blocks planned per
    step.
    """
    requests = [_running(engine, i, f"{running}/{i}") for i in range(running)]
    output = SimpleNamespace(
        num_scheduled_tokens={r.request_id: 1 for r in requests}, total_num_scheduled_tokens=running,
        preempted_req_ids=None,
    )  # fmt: skip
    scheduler, worker = Times(), Times()
    planned = 0
    for number in range(STEPS + WARM_UP):
        if number == WARM_UP:
            scheduler.skip()
            worker.skip()
            planned = engine.scheduler.counted()["saves_planned"]
        _step(engine, output, scheduler, worker)
        _compute()
        for request in requests:
            request.num_tokens += 1
            request.num_computed_tokens += 1
            if request.num_tokens % BLOCK_TOKENS == 0:
                request.block_hashes.append(os.urandom(32))
    for request in requests:
        engine.scheduler.finished(request, normally=False)
    return scheduler, worker, (engine.scheduler.counted()["saves_planned"] - planned) / STEPS


def lookups(engine: Engine) -> Times:
    """Return the times of look-ups of PROMPT_BLOCKS blocks that the agent does not have, with their
    answers.
    """
    taken = Times()
    for i in range(LOOKUPS):
        request = _request(f"lookup {i}", PROMPT_BLOCKS * BLOCK_TOKENS + 1)
        taken.begin()
        engine.scheduler.matched(request, 0)
        taken.end()
        taken.step()
        engine.scheduler.finished(request, normally=False)
        engine.scheduler.plan(NOTHING)
    return taken


def _step(engine: Engine, output: Any, scheduler: Times, worker: Times) -> None:
    """Run one step; the plan and the report are pickled as between processes."""
    scheduler.begin()
    sent = pickle.dumps(engine.scheduler.plan(output), pickle.HIGHEST_PROTOCOL)
    scheduler.end()
    worker.begin()
    plan = pickle.loads(sent)  # noqa: S301
    engine.worker.begin(plan)
    engine.worker.start(plan)
    engine.worker.end(plan)
    engine.worker.results()
    reported = pickle.dumps(engine.worker.report(), pickle.HIGHEST_PROTOCOL)
    worker.end()
    scheduler.begin()
    if (report := pickle.loads(reported)) is not None:  # noqa: S301
        engine.scheduler.report(report)
    scheduler.end()
    scheduler.step()
    worker.step()


def _compute() -> None:
    """Keep the processor busy for the rest of a step, like an engine."""
    until = time.perf_counter() + STEP_S
    while time.perf_counter() < until:
        pass


def _running(engine: Engine, i: int, name: str) -> Any:
    """Return the i-th running request, whose prompt is already saved and so not measured."""
    request = _request(name, PROMPT_BLOCKS * BLOCK_TOKENS + i % BLOCK_TOKENS)
    engine.tables[name] = engine.pool.blocks[i * REQUEST_BLOCKS : (i + 1) * REQUEST_BLOCKS]
    engine.scheduler._track(request).saving.cursor[0] = PROMPT_BLOCKS
    engine.scheduler.allocated(request, None, 0)
    return request


def _request(name: str, tokens: int) -> Any:
    return SimpleNamespace(
        request_id=name, num_tokens=tokens, num_prompt_tokens=tokens, num_computed_tokens=tokens - 1,
        num_output_placeholders=0, block_hashes=[os.urandom(32) for _ in range(tokens // BLOCK_TOKENS)],
        lora_request=None, skip_reading_prefix_cache=False,
    )  # fmt: skip
