"""Measures what a secondary tier adds to a step of vLLM's own offloading: KVAgentTier beside vLLM's
``fs``, in one process and in turn.

The tiering manager and its host memory are vLLM's. Requests, steps and the copies of the GPU are
simulated: some requests arrive in each step, ask for their prompt's chunks as vLLM's scheduler
does, load what is stored and store the others. Needs vllm 0.33 and an agent.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload import config as offloading
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvagent import socketdir
from kvagent.bench.figures import Times, mean, percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CHUNK_BYTES = 64 << 10
ROWS = 1024
PROMPT = 64  # chunks
ARRIVALS = 2  # requests in each step
AGAIN = 4 * ROWS // PROMPT  # requests after which a prompt's first half comes again
STEP_S = 0.005  # between two steps, in which a GPU would compute
STEPS = 300
WARM_UP = 60
TIMED = (
    "lookup", "submit_store", "submit_load", "get_finished_jobs", "has_pending_work", "on_new_request", "touch",
    "on_request_finished", "on_schedule_end", "take_events", "get_stats",
)  # fmt: skip


@dataclass(eq=False, slots=True)
class _Request:
    context: ReqContext
    keys: list[Any]
    loading: list[Any] = field(default_factory=list)
    storing: list[Any] = field(default_factory=list)


class Engine:
    """A tiering manager with one secondary tier, which is timed."""

    def __init__(self, name: str, tier: dict[str, Any]) -> None:
        self.lookups, self.steps = Times(), Times()
        self.results: Counter[str] = Counter()
        spec = TieringOffloadingSpec(_config(f"bench-{name}-{time.monotonic_ns()}", tier))
        self.manager: Any = spec.get_manager()
        self._waiting: list[_Request] = []
        self._computing: list[_Request] = []
        self._numbers = itertools.count()
        self._time(self.manager.secondary_tiers[0])

    def step(self, prompts: Sequence[list[Any]]) -> None:
        """Run a step in which these prompts arrive."""
        manager = self.manager
        with manager.lock:
            for request in self._computing:  # the GPU has copied
                if request.loading:
                    manager.complete_load(request.loading, request.context)
                if request.storing:
                    manager.complete_store(request.storing, request.context)
                manager.on_request_finished(request.context)
            self._computing.clear()
            for keys in prompts:
                request = _Request(ReqContext(req_id=str(next(self._numbers))), keys)
                manager.on_new_request(request.context)
                self._waiting.append(request)
            self._waiting = [request for request in self._waiting if not self._admit(request)]
            manager.on_schedule_end(ScheduleEndContext([one.context.req_id for one in self._computing], ()))
            list(manager.take_events())
        manager.get_stats()
        self.steps.step()

    def rest(self) -> None:
        """Step until nothing is left to do."""
        while self._waiting or self._computing or self.manager.has_pending_work():
            self.step(())
            time.sleep(STEP_S)

    def _admit(self, request: _Request) -> bool:
        """Ask for a prompt's chunks like vLLM's scheduler. Return whether the answer is known."""
        found, deferred = 0, False
        for key in request.keys:
            result = self.manager.lookup(key, request.context)
            if result is LookupResult.MISS:
                break
            found += result is not LookupResult.RETRY
            deferred |= result is not LookupResult.HIT
        if deferred:
            return False
        request.loading = request.keys[:found]
        self.results["found"] += found
        self.results["asked"] += len(request.keys)
        if request.loading:
            self.manager.prepare_load(request.loading, request.context)
        output = self.manager.prepare_store(request.keys[found:], request.context)
        request.storing = list(output.keys_to_store) if output is not None else []
        self._computing.append(request)
        return True

    def _time(self, tier: Any) -> None:
        for name in TIMED:
            setattr(tier, name, self._timed(name, getattr(tier, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        step, lookups, looks = self.steps, self.lookups, name == "lookup"

        def timed(*given: Any) -> Any:
            step.begin()
            if looks:
                lookups.begin()
            result = call(*given)
            if looks:
                lookups.end()
                lookups.step()
            step.end()
            return result

        return timed


def prompts(kind: str) -> Iterator[list[list[Any]]]:
    """Yield the prompts that arrive in each step: every second one's first half was there before,
    too long ago for vLLM's host memory.
    """
    for i in itertools.count():
        yield [_keys(kind, i * ARRIVALS + j) for j in range(ARRIVALS)]


def measure(engines: dict[str, Engine]) -> None:
    """Run the steps of all engines in turn."""
    arriving = {name: prompts(name) for name in engines}
    for i in range(WARM_UP + STEPS):
        for name, engine in engines.items():
            if i == WARM_UP:
                engine.steps.skip()
                engine.lookups.skip()
            engine.step(next(arriving[name]))
            time.sleep(STEP_S)
    for engine in engines.values():
        engine.steps, engine.lookups = Times(), Times()
        engine.rest()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m kvagent.bench.tier", description=__doc__)
    parser.add_argument("--socket-dir", default=socketdir.default(), help="the agent's (default %(default)s)")
    parser.add_argument("--fs-dir", default="/dev/shm", help="of fs's files (default %(default)s)")  # noqa: S108
    parser.add_argument("--rounds", type=int, default=3, help="of both tiers (default %(default)s)")
    given = parser.parse_args(arguments)
    row = "{:>12} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8}\n"
    head = ("tier", "look p50", "p99", "step own", "step p50", "p99", "mean", "chunks", "found")
    sys.stdout.write(f"us; {ARRIVALS} requests of {PROMPT} chunks of {CHUNK_BYTES >> 10} KiB in each step\n")
    sys.stdout.write(row.format(*head))
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory(prefix="kvagent-bench-", dir=given.fs_dir) as folder:
            agent = {"type": "KVAgentTier", "module_path": "kvagent.vllm.tier", "socket_dir": given.socket_dir}
            engines = {
                "fs": Engine("fs", {"type": "fs", "root_dir": folder}),
                "KVAgentTier": Engine("agent", agent | {"start_wait_ms": 10_000}),
            }
            times = {name: (engine.lookups, engine.steps) for name, engine in engines.items()}
            try:
                measure(engines)
            finally:
                for engine in engines.values():
                    engine.manager.shutdown()
            for name, (lookups, steps) in times.items():
                look = [f"{percentile(lookups.wall, at):.1f}" for at in (50, 99)]
                results = engines[name].results
                some = [f"{mean(steps.wall):.0f}", results["asked"], results["found"]]
                sys.stdout.write(row.format(name, *look, *steps.figures(), *some))
            sys.stdout.flush()


def _keys(kind: str, number: int) -> list[Any]:
    shared = PROMPT // 2 if number % 2 else 0
    names = [f"{kind} {number % AGAIN if i < shared else -number} {i}" for i in range(PROMPT)]
    return [make_offload_key(hashlib.sha256(name.encode()).digest(), 0) for name in names]


def _config(engine: str, tier: dict[str, Any]) -> offloading.OffloadingConfig:
    return offloading.OffloadingConfig(
        groups=(offloading.OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=CHUNK_BYTES, enable_kv_cache_events=False, engine_id=engine,
        extra_config={"cpu_bytes_to_use": ROWS * CHUNK_BYTES, "secondary_tiers": [tier]},
        model=offloading.OffloadingModelConfig(name="kvagent.bench/tier", dtype="bfloat16"),
        cache=offloading.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=offloading.OffloadingParallelConfig(
            rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
            data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
