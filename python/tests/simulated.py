"""The connector's two sides with a real agent, in an engine that a test drives step by step: no
vllm, no torch.
"""

from __future__ import annotations

import ctypes
import pickle
import time
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvagent.messages import Group, Region, RegionKind, Role, Segment
from kvagent.registration import Registration, identity_pairs
from kvagent.shm import SharedMemory
from kvagent.vllm.geometry import Geometry
from kvagent.vllm.hooks import Joined
from kvagent.vllm.link import Link
from kvagent.vllm.options import Options
from kvagent.vllm.scheduler.side import SchedulerSide
from kvagent.vllm.weight_changes import LOADED, PAIR, Generations
from kvagent.vllm.worker.side import HostClock, Results, WorkerSide, make_clock
from tests.agent import AgentProcess, chain, eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from kvagent.cuda import CudaClock
    from kvagent.vllm.guests.adapters import LoadedAdapters

BLOCK = 16  # tokens
BLOCK_BYTES = 64
# Resets are plain, unless a test is about new weights.
OPTIONS: dict[str, Any] = {
    "lookup_wait_ms": 100.0, "lookup_grace_ms": 10_000.0, "lookup_age_ms": 10_000.0, "min_load_tokens": BLOCK,
    "weights_fixed": True,
}  # fmt: skip


class FinishedRequest(Enum):
    """Like vLLM's RequestStatus."""

    FINISHED_STOPPED = 1
    FINISHED_LENGTH_CAPPED = 2
    FINISHED_ABORTED = 3


NO_TOKENS = SimpleNamespace(
    num_scheduled_tokens={}, preempted_req_ids=None, total_num_scheduled_tokens=0, scheduled_spec_decode_tokens={},
    scheduled_new_reqs=[],
)  # fmt: skip
"""What vLLM says of a step that computes nothing."""


@dataclass(slots=True)
class Block:
    """Like vLLM's KVCacheBlock."""

    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False
    ref_cnt: int = 1


class Pool:
    """The reference counts of vLLM's block pool."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks
        self.blocks = [Block(i) for i in range(blocks)]

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    def get_cached_block(self, key: bytes, groups: Sequence[int]) -> None:
        """Return that the engine's own cache has none of the blocks."""
        return

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks

    def get_new_blocks(self, count: int) -> list[Block]:
        """Take free blocks, the first ones."""
        return [block for block in self.blocks if not block.ref_cnt][:count]

    def reset_prefix_cache(self) -> bool:
        return True


class Clock:
    """The time of a scheduler's side, which stands still unless a test advances it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()  # it goes on where the engines were
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in ("side", "loads"):
            monkeypatch.setattr(f"kvagent.vllm.scheduler.{module}.time", clock)


@dataclass
class Step:
    """The results of a step."""

    plan: Any
    results: Results
    report: Any
    scheduled: dict[str, int] = field(default_factory=dict)


def guests_of(**engine: Any) -> Joined:
    """Return the guests of an engine, if they are installed."""
    try:
        from kvagent.vllm.guests.start import joined
    except ModuleNotFoundError:
        return Joined()
    return joined(**engine)


class SimulatedEngine:
    """An engine. Requests get consecutive blocks, from block 1 on."""

    def __init__(
        self, agent: AgentProcess, name: str, *, blocks: int = 64, peer: bool = False, saves: bool = True,
        window: int = 0, identity: dict[str, str] | None = None, generation: str = LOADED,
        unobserved: bool = False, in_process: bool = False, adapters: LoadedAdapters | None = None, following: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        self.name = name
        self._identity = {"model": "simulated", "dtype": "none", "tenant": ""} | (identity or {})
        groups = [Group(BLOCK, blocks)] + [Group(BLOCK, blocks, window)] * bool(window)
        self.groups = tuple(groups)
        self.pool = self.block_pool = Pool(blocks)
        self.sync = self.make_memory(len(groups) * blocks * BLOCK_BYTES, peer=peer)
        self.tables: dict[str, list[Block]] = {}
        self._next = 1
        self._admitted: dict[str, int] = {}  # since the last step, without a load
        directory = str(agent.folder)
        self._directory = directory
        settings = Options(**(OPTIONS | {"pin_percent": 50.0} | options))
        self.generations = Generations(generation, settings, unobserved=unobserved, in_process=in_process)
        self._begins_with = generation
        self.worker_link = self.new_worker_link()
        self.link = Link(directory, "scheduler", lambda: self._registration(Role.SCHEDULER))
        self.worker_link.wait(20)
        self.link.wait(20)
        geometry = Geometry(self.groups, BLOCK, following=following)
        self.scheduler = SchedulerSide(
            settings, geometry, 1, self.link, self, saves=saves, generations=self.generations,
            joined=guests_of(options=settings, geometry=geometry, saves=saves, engine_id=name),
        )  # fmt: skip
        self.worker = WorkerSide(
            self.worker_link, self.sync, per_block=not window,
            generation=generation, guests=[adapters] if adapters else [],
        )  # fmt: skip

    def make_memory(self, size: int, *, peer: bool) -> HostClock | CudaClock:
        """Create the KV cache, and the words that show its kernels' progress."""
        self._shared = None if peer else SharedMemory(size)
        self._private = (ctypes.c_char * size)() if peer else None
        if self._shared is None:
            self.memory = memoryview(self._private).cast("B")  # type: ignore[arg-type]
        else:
            self.memory = self._shared.view
        return make_clock(None)

    def regions(self) -> list[tuple[Region, int | None]]:
        """Return the regions of the KV cache, from number 1 on."""
        if self._shared is not None:
            return [(self._shared.region(1), self._shared.fd)]
        assert self._private is not None
        return [(Region(1, RegionKind.PEER, len(self._private), ctypes.addressof(self._private)), None)]

    def offset(self) -> int:
        """Return the KV cache's offset in region 1."""
        return 0

    def new_worker_link(self) -> Link:
        """Create the worker's link."""
        return Link(self._directory, "rank 0", lambda: self._registration(Role.WORKER))

    def get_blocks(self, request: str) -> Any:
        """Return a block table like vLLM's KV cache manager."""
        return SimpleNamespace(blocks=(self.tables[request],) * len(self.groups))

    def request(self, name: str, prompt: str, blocks: int, **more: Any) -> Any:
        """Return a request of that many blocks and a token, whose hashes are those of its prompt's
        name.
        """
        tokens = blocks * BLOCK + 1
        request = SimpleNamespace(
            request_id=name, num_tokens=tokens, num_prompt_tokens=tokens, num_computed_tokens=0,
            num_output_placeholders=0, block_hashes=chain(prompt, blocks), lora_request=None,
            mm_features=[], skip_reading_prefix_cache=False, status=FinishedRequest.FINISHED_STOPPED,
            num_output_tokens=1, output_token_ids=[7],
            _block_hasher=lambda one: chain(prompt, blocks)[len(one.block_hashes) :],
        )  # fmt: skip
        request.__dict__.update(more)
        return request

    def admit(self, request: Any, external: int = 0) -> list[Block]:
        """Give a request blocks for all its tokens; ``external`` of them are to be loaded."""
        if request.request_id not in self.tables:
            need = -(-request.num_tokens // BLOCK)
            self.tables[request.request_id] = self.pool.blocks[self._next : self._next + need]
            self._next += need
        request.num_computed_tokens = external
        if not external:
            self._admitted[request.request_id] = 0
        self.scheduler.allocated(request, self.get_blocks(request.request_id), external)
        return self.tables[request.request_id]

    def matched(self, request: Any, own: int = 0) -> int:
        """Return what is promised, once it is known."""
        found: list[int] = []
        self.scheduler.on_new_request(request)

        def ask() -> bool:
            tokens, _ = self.scheduler.matched(request, own)
            found[:] = [] if tokens is None else [tokens]
            if tokens is None:
                self.step()
            return bool(found)

        eventually(ask, "an answer")
        return found[0]

    def fill(self, request: Any, salt: int) -> None:
        """Fill a request's blocks with bytes that differ by salt and position."""
        for i, block in enumerate(self.tables[request.request_id]):
            for group in range(len(self.groups)):
                self._at(group, block)[:] = bytes([salt, i % 256, i // 256, group]) * (BLOCK_BYTES // 4)

    def holds(self, request: Any, salt: int, blocks: int) -> bool:
        """Return whether a request's first blocks hold what ``fill`` wrote for that salt."""
        return all(
            self._at(group, block) == bytes([salt, i % 256, i // 256, group]) * (BLOCK_BYTES // 4)
            for i, block in enumerate(self.tables[request.request_id][:blocks])
            for group in range(len(self.groups))
        )

    def step(self, *computed: tuple[Any, int], preempted: Sequence[str] = ()) -> Step:
        """Run a step that computes that many tokens of those requests, and none of others that were
        admitted for it.
        """
        scheduled = self._admitted | {request.request_id: tokens for request, tokens in computed}
        self._admitted = {}
        total = len(scheduled) if set(scheduled.values()) == {1} else 0
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled, preempted_req_ids=set(preempted),
            total_num_scheduled_tokens=total, scheduled_spec_decode_tokens={}, scheduled_new_reqs=[],
        )  # fmt: skip
        plan = pickle.loads(pickle.dumps(self.scheduler.plan(output)))  # noqa: S301
        self.worker.begin(plan)
        self.worker.start(plan)
        self.worker.end(plan)
        results, report = self._report()
        for request, tokens in computed:
            request.num_computed_tokens += tokens
        return Step(plan, results, report, scheduled)

    def _report(self) -> tuple[Results, Any]:
        """Bring the worker's report to the scheduler."""
        results = self.worker.results()
        report = pickle.loads(pickle.dumps(self.worker.report()))  # noqa: S301
        if report is not None:
            self.scheduler.report(report)
        return results, report

    def until_saved(self) -> None:
        """Wait, without a step, until no save that was sent is in flight."""
        saves = self.scheduler.saves
        eventually(lambda: (self._report(), not saves._inflight)[1], "the end of the saves")

    def save(self, name: str, prompt: str, blocks: int, salt: int, **more: Any) -> Any:
        """Run a request that arrives, is computed, saved, and ends."""
        request = self.request(name, prompt, blocks, **more)
        self.matched(request)
        self.admit(request)
        self.fill(request, salt)
        self.step((request, request.num_tokens))
        self.quiet()
        self.scheduler.finished(request, normally=True)
        return request

    def quiet(self) -> None:
        """Step until nothing is in flight."""
        eventually(lambda: (self.step(), not self.scheduler.pending())[1], "the end of all that is under way")

    def until_received(self, request: Any) -> Results:
        """Step until the request's load has ended."""
        found: list[Results] = []

        def look() -> bool:
            results = self.step().results
            if request.request_id in results.received:
                found.append(results)
            return bool(found)

        eventually(look, "the end of a load")
        return found[0]

    def close(self) -> None:
        self.scheduler.close()
        self.worker.leave()
        self.sync.close()
        self.close_memory()

    def close_memory(self) -> None:
        """Free the KV cache."""
        self.memory.release()
        if self._shared is not None:
            self._shared.close()

    def _at(self, group: int, block: Block) -> memoryview:
        start = (group * self.pool.num_gpu_blocks + block.block_id) * BLOCK_BYTES
        return self.memory[start : start + BLOCK_BYTES]

    def _registration(self, role: Role) -> Registration:
        generation = self.generations.now
        if role == Role.WORKER:
            generation = self.worker.generation if hasattr(self, "worker") else self._begins_with
        common: dict[str, Any] = {
            "instance": self.name, "role": role, "groups": self.groups, "hash_tokens": BLOCK,
            "identity": identity_pairs(self._identity | {PAIR: generation}),
        }  # fmt: skip
        if role == Role.SCHEDULER:
            return Registration(**common)
        size, groups = self.pool.num_gpu_blocks * BLOCK_BYTES, range(len(self.groups))
        return Registration(
            **common, sync=self.sync.words.sync(0),
            regions=[(self.sync.words.memory.region(0), self.sync.words.memory.fd), *self.regions()],
            held={0: {g: [Segment(1, self.offset() + g * size, BLOCK_BYTES, BLOCK_BYTES)] for g in groups}},
        )  # fmt: skip
