"""Plays a trace of requests to an engine's cache and an agent's pool, with eager and with lazy
offload: what is copied, and what is found where.

The cache is vLLM's own block pool and the saves are the connector's; steps, the agent and its pool
(least recently used) are simulated. A block is one of the trace's, of 512 tokens. Needs vllm.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockPool

from kvagent.messages import BlockStatus, Group
from kvagent.vllm.geometry import Geometry
from kvagent.vllm.options import EAGER, LAZY, Options
from kvagent.vllm.plan import Outcome
from kvagent.vllm.scheduler.lazy import watermark
from kvagent.vllm.scheduler.requests import Blocks, Tables, Tracked
from kvagent.vllm.scheduler.saves import Saves

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOKENS = 512  # of a block of the traces
STEP_BLOCKS = 16  # that a step computes: 8,192 tokens
STEP_S = 0.2
RUNNING = 16  # requests at most
ANSWER_STEPS = 10  # that a request keeps its blocks for after its prompt
SAVE_STEPS = 1  # until a save is reported


@dataclass(slots=True)
class Result:
    """Blocks of all prompts."""

    asked: int = 0
    own: int = 0
    """Found in the engine's own cache."""
    loaded: int = 0
    """Found in the pool."""
    saved: int = 0
    """Copied to the pool."""
    missed: int = 0
    """Evicted by vLLM before they were saved."""


@dataclass(eq=False, slots=True)
class _Running:
    tracked: Tracked
    blocks: list[Any]
    """Those that are computed or loaded."""
    left: int = ANSWER_STEPS
    """Steps until it ends."""

    @property
    def lacking(self) -> int:
        """Return how many blocks are to be computed."""
        return len(self.tracked.request.block_hashes) - len(self.blocks)


class Node:
    """An engine with a cache of so many blocks, and an agent with a pool of so many."""

    def __init__(self, cache: int, pool: int, options: Options) -> None:
        self.result = Result()
        self._capacity = pool
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        geometry = Geometry((Group(TOKENS, cache),), TOKENS)
        self._cache = BlockPool(cache, enable_caching=True, hash_block_size=TOKENS)
        self._blocks = Blocks(self._cache, options.pin_percent / 100)
        self._tables = Tables()
        near = watermark(options, geometry, STEP_BLOCKS * TOKENS, cache)
        self._saves = Saves(geometry, 1, self._blocks, self._tables, watermark=near)
        self._running: dict[str, _Running] = {}
        self._tables.bind(SimpleNamespace(get_blocks=self._table))
        self._inflight: deque[tuple[int, list[bytes], int]] = deque()
        self._jobs = itertools.count(1)
        self._steps = 0

    def play(self, requests: Iterator[tuple[str, list[bytes]]]) -> Result:
        """Serve all requests."""
        waiting = next(requests, None)
        while waiting is not None or self._running or self._inflight:
            while waiting is not None and len(self._running) < RUNNING and self._admit(*waiting):
                waiting = next(requests, None)
            self._step()
        self.result.missed = self._saves.counts.missed
        return self.result

    def _table(self, name: str) -> Any:
        one = self._running[name]
        return SimpleNamespace(blocks=([*one.blocks],))

    def _admit(self, name: str, keys: list[bytes]) -> bool:
        """Admit a request unless there are too few blocks."""
        own: list[Any] = []
        for key in keys:
            found = self._cache.get_cached_block(key, [0])
            if found is None:
                break
            own += found
        need = len(keys) - len(own) + sum(block.ref_cnt == 0 for block in own)
        need += sum(one.lacking for one in self._running.values())
        if need > self._cache.get_num_free_blocks():
            assert self._running, f"a prompt of {len(keys)} blocks is larger than the cache"
            return False
        found_there = 0
        for key in keys[len(own) :]:
            if key not in self._stored:
                break
            self._stored.move_to_end(key)
            found_there += 1
        self._cache.touch(own)
        request = SimpleNamespace(request_id=name, block_hashes=keys, num_tokens=len(keys) * TOKENS)
        tracked = Tracked(request, False, [0], TOKENS, admitted=True)
        tracked.own = len(own) * TOKENS
        tracked.loaded = (tracked.own, tracked.own + found_there * TOKENS)
        self._saves.batch.begin(tracked)
        self._running[name] = _Running(tracked, [*own])
        self._fill(self._running[name], found_there)
        self.result.asked += len(keys)
        self.result.own += len(own)
        self.result.loaded += found_there
        return True

    def _fill(self, one: _Running, more: int) -> None:
        begin = len(one.blocks)
        one.blocks += self._cache.get_new_blocks(more)
        self._cache.cache_full_blocks(one.tracked.request, one.blocks, begin, len(one.blocks), TOKENS, 0)

    def _step(self) -> None:
        """Compute, plan saves, and let requests end."""
        self._steps += 1
        self._report()
        self._saves.begin(self._steps * STEP_S)
        computes = STEP_BLOCKS
        for one in self._running.values():
            more = min(computes, one.lacking, self._cache.get_num_free_blocks())
            self._fill(one, more)
            computes -= more
        self._plan()
        for name, one in list(self._running.items()):
            if not one.lacking:
                one.left -= 1
                if one.left <= 0:
                    self._saves.end(one.tracked, len(one.blocks) * TOKENS)
                    del self._running[name]
                    self._cache.free_blocks(reversed(one.blocks))

    def _plan(self) -> None:
        lazy = self._saves.lazy
        near = lazy is not None and lazy.due()
        if self._blocks.scarce():
            self._saves.revoke()
        elif self._saves.ready():
            for one in self._running.values():
                if len(one.blocks) * TOKENS >= one.tracked.next_tokens:
                    self._saves.batch.add(one.tracked, len(one.blocks) * TOKENS)
            self._saves.batch.pin()
            if near and lazy is not None:
                lazy.collect()
        for job in self._saves.finish(self._jobs.__next__, b"", 1):
            keys = [key for run in self._saves._inflight[job.job].runs for key in run.hashes]
            self._inflight.append((job.job, keys, self._steps + SAVE_STEPS))

    def _report(self) -> None:
        while self._inflight and self._inflight[0][2] <= self._steps:
            job, keys, _ = self._inflight.popleft()
            save = self._saves._inflight[job]
            statuses = bytes(map(self._store, keys)) if save.pinned else bytes([BlockStatus.REVOKED] * len(keys))
            self._saves.report(job, Outcome(1, statuses))

    def _store(self, key: bytes) -> int:
        if key in self._stored:
            self._stored.move_to_end(key)
            return BlockStatus.EXISTS
        self._stored[key] = None
        self.result.saved += 1
        if len(self._stored) > self._capacity:
            self._stored.popitem(last=False)
        return BlockStatus.OK


def requests(trace: Path, most: int, longest: int) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the name and the keys of each request whose prompt has at most ``longest`` blocks."""
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        for i, line in enumerate(itertools.islice(lines, most)):
            one = json.loads(line)
            session = one.get("session", "")
            keys = [f"{session} {number}".encode().rjust(32)[-32:] for number in one["hash_ids"]]
            if keys and len(keys) <= longest:
                yield str(i), keys


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m kvagent.bench.offload", description=__doc__)
    parser.add_argument("trace", type=Path, help="JSON lines with hash_ids, as Mooncake publishes them")
    parser.add_argument("--cache", type=int, nargs="+", default=[1000, 3000], help="the engine's blocks")
    parser.add_argument("--pool", type=int, nargs="+", default=[1000, 3000, 10000], help="the agent's blocks")
    parser.add_argument("--watermark", type=float, nargs="+", default=[10.0], help="percent")
    parser.add_argument("--pins", type=float, default=5.0, help="percent")
    parser.add_argument("--most", type=int, default=1 << 30, help="requests to play")
    given = parser.parse_args(arguments)
    row = "{:>6} {:>6} {:>9} {:>8} {:>8} {:>8} {:>8} {:>7} {:>7} {:>7}\n"
    head = ("cache", "pool", "offload", "asked", "saved", "loaded", "missed", "own", "pool", "both")
    sys.stdout.write(row.format(*head))
    ways = [Options(pin_percent=given.pins)]
    ways += [Options(offload=LAZY, watermark_percent=one, pin_percent=given.pins) for one in given.watermark]
    for cache, pool, options in itertools.product(given.cache, given.pool, ways):
        got = Node(cache, pool, options).play(requests(given.trace, given.most, cache // 2))
        shares = [f"{part / got.asked:.4f}" for part in (got.own, got.loaded, got.own + got.loaded)]
        name = EAGER if options.offload == EAGER else f"lazy {options.watermark_percent:g}"
        sys.stdout.write(row.format(cache, pool, name, got.asked, got.saved, got.loaded, got.missed, *shares))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
