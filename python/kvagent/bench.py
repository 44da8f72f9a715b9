"""What the vLLM connector costs in each step of an engine: ``python -m kvagent.bench --socket-dir DIR``.

It plays an engine of so many running requests, each of which computes one token in a step, against the agent of that
directory, and times the connector's two sides alone: what they add to a step is this. Requests, blocks and the block
pool are stand-ins; sessions, look-ups and copies are real. It needs neither vllm nor torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

from kvagent.identity import identity_pairs
from kvagent.messages import Group, Role, Segment
from kvagent.registration import Registration
from kvagent.shm import SharedMemory, SyncWords
from kvagent.vllm.geometry import Geometry
from kvagent.vllm.link import Link
from kvagent.vllm.options import Options
from kvagent.vllm.saves import REVOKES
from kvagent.vllm.scheduler import SchedulerSide
from kvagent.vllm.worker import EVENTS, WorkerSide

RUNNING = (1, 64, 256)  # requests
STEPS = 320
BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
PROMPT_BLOCKS = 64
BLOCKS = 256 * (PROMPT_BLOCKS + STEPS // BLOCK_TOKENS + 2)
STEP_S = 0.002  # a step's time on a GPU: without it, the agent's share of the processors would be measured
LOOKUPS = 500


class _Pool:
    """Reference counts as in vLLM's block pool."""

    num_gpu_blocks = BLOCKS

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=i, block_hash=None, is_null=False, ref_cnt=1) for i in range(BLOCKS)]

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return BLOCKS

    def reset_prefix_cache(self) -> bool:
        return True


class _Engine:
    """The sides of one engine, and its requests."""

    def __init__(self, socket_dir: str) -> None:
        self.name = f"bench {os.getpid()} {time.monotonic_ns()}"
        self.group = Group(BLOCK_TOKENS, BLOCKS)
        self.cache = SharedMemory(BLOCKS * BLOCK_BYTES)
        self.words = SyncWords(EVENTS, REVOKES)
        self.pool = _Pool()
        self.tables: dict[str, list[Any]] = {}
        worker_link = Link(socket_dir, "bench, worker", lambda: self._registration(Role.WORKER))
        link = Link(socket_dir, "bench, scheduler", lambda: self._registration(Role.SCHEDULER))
        if worker_link.wait(5) is None or link.wait(5) is None:
            sys.exit(f"no agent answers in {socket_dir}")
        geometry = Geometry((self.group,), BLOCK_TOKENS)
        self.scheduler = SchedulerSide(Options(), geometry, 1, link, saves=True, loads=True, whole_failures=True)
        self.scheduler.bind(self.pool, self)
        self.worker = WorkerSide(worker_link, self.words, per_block=True, whole_failures=True)

    def get_blocks(self, request: str) -> Any:
        """The block tables, as vLLM's KV cache manager gives them."""
        return SimpleNamespace(blocks=(self.tables[request],))

    def close(self) -> None:
        self.scheduler.close()
        self.worker.leave()
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


def steps(engine: _Engine, running: int) -> tuple[list[float], list[float], float]:
    """Seconds of the scheduler's and of the worker's side in each step, and blocks planned in a step."""
    requests = []
    for i in range(running):
        tokens = PROMPT_BLOCKS * BLOCK_TOKENS + i % BLOCK_TOKENS
        hashes = [os.urandom(32) for _ in range(PROMPT_BLOCKS)]
        request = SimpleNamespace(
            request_id=f"{running}/{i}", num_tokens=tokens, num_prompt_tokens=tokens, num_computed_tokens=tokens - 1,
            num_output_placeholders=0, block_hashes=hashes, lora_request=None, skip_reading_prefix_cache=False,
        )  # fmt: skip
        per = PROMPT_BLOCKS + STEPS // BLOCK_TOKENS + 2
        engine.tables[request.request_id] = engine.pool.blocks[i * per : (i + 1) * per]
        engine.scheduler._track(request).cursor[0] = PROMPT_BLOCKS  # the prompts are not what is measured
        requests.append(request)
    output = SimpleNamespace(num_scheduled_tokens={r.request_id: 1 for r in requests}, preempted_req_ids=None)
    planned = engine.scheduler.counted()["saves_planned"]
    of_scheduler, of_worker = [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        plan = engine.scheduler.plan(output)
        middle = time.perf_counter()
        engine.worker.begin(plan)
        engine.worker.start(plan)
        engine.worker.end(plan)
        engine.worker.results()
        report = engine.worker.report()
        end = time.perf_counter()
        if report is not None:
            engine.scheduler.report(report)
        of_scheduler.append(middle - begin + time.perf_counter() - end)
        of_worker.append(end - middle)
        time.sleep(STEP_S)
        for request in requests:
            request.num_tokens += 1
            request.num_computed_tokens += 1
            if request.num_tokens % BLOCK_TOKENS == 0:
                request.block_hashes.append(os.urandom(32))
    for request in requests:
        engine.scheduler.finished(request, normally=False)
    return of_scheduler, of_worker, (engine.scheduler.counted()["saves_planned"] - planned) / STEPS


def lookups(engine: _Engine) -> list[float]:
    """Seconds of a look-up of a prompt of PROMPT_BLOCKS blocks that the agent does not have."""
    taken = []
    for i in range(LOOKUPS):
        request = SimpleNamespace(
            request_id=f"lookup {i}", num_tokens=PROMPT_BLOCKS * BLOCK_TOKENS + 1, lora_request=None,
            block_hashes=[os.urandom(32) for _ in range(PROMPT_BLOCKS)], skip_reading_prefix_cache=False,
        )  # fmt: skip
        begin = time.perf_counter()
        engine.scheduler.matched(request, 0)
        taken.append(time.perf_counter() - begin)
        engine.scheduler.finished(request, normally=False)
        if engine.scheduler._asker is not None:
            engine.scheduler._asker.new_step()
    return taken


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m kvagent.bench", description=__doc__)
    parser.add_argument("--socket-dir", default="/run/kvagent", help="the agent's (default %(default)s)")
    engine = _Engine(parser.parse_args().socket_dir)
    row = "{:>9} {:>12} {:>14} {:>8} {:>11} {:>8}\n"
    out = sys.stdout.write
    try:
        out(row.format("running", "blocks/step", "scheduler p50", "p99", "worker p50", "p99") + "us of one step\n")
        for running in RUNNING:
            of_scheduler, of_worker, blocks = steps(engine, running)
            figures = [*_p50_p99(of_scheduler), *_p50_p99(of_worker)]
            out(row.format(running, f"{blocks:.1f}", *figures))
        out("look-up of {} blocks: p50 {} us, p99 {} us\n".format(PROMPT_BLOCKS, *_p50_p99(lookups(engine))))
    finally:
        engine.close()


def _p50_p99(seconds: list[float]) -> tuple[str, str]:
    ordered = sorted(seconds)
    return tuple(f"{ordered[len(ordered) * p // 100] * 1e6:.0f}" for p in (50, 99))  # type: ignore[return-value]


if __name__ == "__main__":
    main()
