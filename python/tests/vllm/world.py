"""A real scheduler, real worker drivers and a fake GPU that knows what every slot of the KV cache must hold.

The GPU writes f(prefix, position, layer, rank) into the slots of the tokens that a step computes, and checks all
earlier positions of the same request, through its own block table. Its kernels run when ``complete`` is called, behind
the launch, so saves and loads overlap steps in flight; only then does the step word say that the step has ended.
"""

from __future__ import annotations

import copy
import pickle
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from kvagent.vllm.clock import HostClock
from tests.agent import eventually

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.agent import AgentProcess

BLOCK = 16
LAYERS = 4
HEADS = 2
HEAD = 8
PRIME = 16_777_213  # the greatest below 2**24: a float32 holds every number below it
EOS = 1


@dataclass(eq=False)
class Sequence:
    """A request as the GPU knows it: all its tokens, to come ones too, and the rolling hash of each prefix."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        state = 7
        for i in range(len(self.prompt) + self.max_tokens + 8):
            token = self.prompt[i] if i < len(self.prompt) else state % 500 + 3
            state = (state * 31 + token + 1) % PRIME
            self.tokens.append(token)
            self.hashes.append(state)


@dataclass
class _Launch:
    output: Any
    work: list[tuple[str, int, int, tuple[list[int], ...], bool]]
    ends: list[Callable[[], None]]
    connector_outputs: list[Any]


class World:
    """See the module."""

    def __init__(
        self, model: Path, socket_dir: str, *, blocks: int = 64, asynchronous: bool = False, v2: bool = True,
        layout: str = "LBNHC", ranks: int = 1, window: int = 0, depth: int = 1, connector: bool = True,
        extra: dict[str, Any] | None = None, transfer: dict[str, Any] | None = None, max_batched: int = 256,
        policy: str = "recompute",
    ) -> None:  # fmt: skip
        self.v2, self.ranks, self.depth, self.window = v2, ranks, depth, window
        self.bad: list[str] = []
        self.checked = 0
        self.preempted = 0
        self.steps = 0
        options = {
            "socket_dir": socket_dir, "min_load_tokens": BLOCK, "lookup_age_ms": 2000, "lookup_wait_ms": 100,
            "pin_percent": 15,
        }  # fmt: skip
        settings = {
            "kv_connector": "KVAgentConnector", "kv_connector_module_path": "kvagent.vllm", "kv_role": "kv_both",
            "kv_load_failure_policy": policy, "kv_connector_extra_config": options | (extra or {}),
        } | (transfer or {})  # fmt: skip
        self.config = _config(model, settings if connector else None, layout, asynchronous, max_batched, ranks)
        self.config.cache_config.num_gpu_blocks = blocks
        self.kv = _kv_cache_config(self.config, blocks, window)
        self.kv.kv_cache_layout = layout
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        kind = AsyncScheduler if asynchronous else Scheduler
        # The workers are there before the scheduler is.
        self.queue: list[Callable[[], None]] = []
        self.caches = [allocate_kv_cache(self.kv, torch.device("cpu"), KVCacheLayout[layout]) for _ in range(ranks)]
        self.workers: list[Any] = []
        self.drivers: list[Any] = []
        if connector:
            for rank in range(ranks):
                self._make_worker(rank)
        self.scheduler = kind(
            vllm_config=self.config, kv_cache_config=self.kv, block_size=BLOCK, hash_block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(self.config), log_stats=False,
        )  # fmt: skip
        self.scheduler.use_v2_model_runner = v2
        if connector:
            handshakes = {(0, r): w.get_handshake_metadata() for r, w in enumerate(self.workers)}
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self._aggregator = KVOutputAggregator(ranks)
        self._flight: deque[_Launch] = deque()
        self.sequences: dict[str, Sequence] = {}
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    @property
    def side(self) -> Any:
        """The scheduler's side of the connector."""
        connector = self.scheduler.connector
        return getattr(connector, "_connectors", [connector])[0]._scheduler

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, name: str, prompt: list[int], max_tokens: int, **more: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, EOS)
        request = Request(
            request_id=name, prompt_token_ids=prompt, sampling_params=params, pooling_params=None,
            block_hasher=self._hasher, **more,
        )  # fmt: skip
        self.sequences[name] = Sequence(prompt, max_tokens)
        self.outputs[name] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        if name in self.scheduler.requests:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """Launches a step and completes those beyond the pipeline's depth."""
        self.launch()
        while len(self._flight) >= self.depth:
            self.complete()

    def launch(self) -> None:
        output = self.scheduler.schedule()
        self.steps += 1
        self.preempted += len(output.preempted_req_ids or ())
        work = []
        for name, scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            tables = tuple(list(t) for t in self.scheduler.kv_cache_manager.get_block_ids(name))
            work.append((name, end - scheduled, end, tables, not request.is_prefill_chunk))
        ends: list[Callable[[], None]] = []
        self.queue = ends
        outputs = []
        for rank in range(len(self.workers)):
            sent = pickle.loads(pickle.dumps(output))  # noqa: S301
            outputs.append(pickle.loads(pickle.dumps(self._drive(rank, sent))))  # noqa: S301
        self._flight.append(_Launch(output, work, ends, outputs))

    def complete(self) -> None:
        """Runs the kernels of the oldest step and hands its output to the scheduler."""
        launch = self._flight.popleft()
        for name, begin, end, tables, _ in launch.work:
            for rank, cache in enumerate(self.caches):
                self._compute(name, begin, end, tables, rank, cache)
        for end_step in launch.ends:
            end_step()
        names = [name for name, *_ in launch.work]
        sampled = [[self.sequences[name].tokens[end]] if last else [] for name, _, end, _, last in launch.work]
        outputs = [
            ModelRunnerOutput(
                req_ids=names, req_id_to_index={n: i for i, n in enumerate(names)}, sampled_token_ids=sampled,
                kv_connector_output=one,
            )
            for one in launch.connector_outputs or [None]
        ]  # fmt: skip
        joined = self._aggregator.aggregate(outputs) if self.ranks > 1 else outputs[0]
        for engine in self.scheduler.update_from_output(launch.output, joined).values():
            for out in engine.outputs:
                self.outputs[out.request_id] += out.new_token_ids
                if out.finish_reason is not None:
                    self.reasons[out.request_id] = str(out.finish_reason)

    def run(self, limit: int = 20_000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(limit):
            if self.scheduler.has_requests():
                self.step()
            elif self._flight:
                self.complete()
            else:
                return
        raise AssertionError(f"still at work after {limit} steps: {list(self.scheduler.requests)}")

    def close(self) -> None:
        while self._flight:
            self.complete()
        for worker in self.workers:
            worker.shutdown()
        if self.scheduler.connector is not None:
            self.scheduler.connector.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def _make_worker(self, rank: int) -> None:
        config = copy.deepcopy(self.config)
        config.parallel_config.rank = rank
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.kv)
        kv_transfer_state._KV_CONNECTOR_AGENT = worker
        if self.v2:
            self.drivers.append(ActiveKVConnector(config, self.caches[rank]))
        else:
            worker.register_kv_caches(self.caches[rank])
            self.drivers.append(None)
        for one in getattr(worker, "_connectors", [worker]):
            one._worker._clock = _Clock(one._sync.words, self)
        self.workers.append(worker)

    def _drive(self, rank: int, output: Any) -> Any:
        """What a model runner does around its forward pass."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.workers[rank]
        driver = self.drivers[rank]
        empty = not output.total_num_scheduled_tokens
        if driver is not None:
            if empty:
                return driver.no_forward(output).kv_connector_output
            driver.pre_forward(output)
            if hasattr(driver, "finish_forward"):
                driver.finish_forward()
            return driver.post_forward(output.finished_req_ids)
        from vllm.forward_context import set_forward_context

        self.workers[rank].handle_preemptions(output.kv_connector_metadata)
        if empty:
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config).kv_connector_output
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as connector_output,
        ):
            pass
        return connector_output

    def _compute(
        self, name: str, begin: int, end: int, tables: tuple[list[int], ...], rank: int, cache: dict[str, Any]
    ) -> None:
        sequence = self.sequences[name]
        hashes = torch.tensor(sequence.hashes[:end], dtype=torch.int64)
        for group, spec in enumerate(self.kv.kv_cache_groups):
            window = getattr(spec.kv_cache_spec, "sliding_window", None) or end
            low = max(0, begin - window + 1)
            size = spec.kv_cache_spec.block_size
            positions = torch.arange(low, end)
            table = torch.tensor(tables[group], dtype=torch.int64)
            blocks, slots = table[positions // size], positions % size
            for number, layer in enumerate(spec.layer_names):
                want = ((hashes[low:end] * 7 + (number + 8 * group) * 13 + rank * 29) % PRIME).to(torch.float32)
                view = cache[layer]
                view[blocks[begin - low :], :, slots[begin - low :]] = want[begin - low :, None, None]
                got = view[blocks[: begin - low], :, slots[: begin - low]]
                wrong = (got != want[: begin - low, None, None]).flatten(1).any(1)
                self.checked += len(wrong)
                if bool(wrong.any()):
                    at = int(positions[: begin - low][wrong][0])
                    self.bad.append(f"{name} rank {rank} {layer} position {at} of {begin}, {int(wrong.sum())} wrong")


class _Clock(HostClock):
    """Puts the ends of steps behind the kernels of the launch that is being made."""

    def __init__(self, words: Any, world: World) -> None:
        super().__init__(words)
        self._world = world

    def end(self, step: int) -> None:
        self._world.queue.append(lambda: super(_Clock, self).end(step))


def clean(world: World, agent: AgentProcess, blocks: int) -> None:
    """Nothing is left behind, and no byte was wrong."""
    assert not world.bad, world.bad[:5]
    assert world.free_blocks() == blocks - 1
    assert (world.side.blocks.saving, world.side.blocks.loading) == (0, 0)
    eventually(lambda: agent.status()["leases"] == 0, "an agent without leases")


def _config(
    model: Path, transfer: dict[str, Any] | None, layout: str, asynchronous: bool, max_batched: int, ranks: int
) -> VllmConfig:
    model_config = ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=4096)
    scheduler = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=max_batched, max_model_len=4096, enable_chunked_prefill=True,
        is_encoder_decoder=False, async_scheduling=asynchronous,
    )  # fmt: skip
    cache = CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, cache_dtype="auto", enable_prefix_caching=True)
    cache.kv_cache_layout = layout
    config = VllmConfig(
        model_config=model_config, scheduler_config=scheduler, cache_config=cache, device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
    )  # fmt: skip
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.parallel_config.tensor_parallel_size = ranks
    config.parallel_config.world_size = ranks
    return config


def _kv_cache_config(config: VllmConfig, blocks: int, window: int) -> Any:
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32)
    specs: dict[str, Any] = {f"model.layers.{i}.attn": full for i in range(LAYERS)}
    if window:
        sliding = SlidingWindowSpec(
            block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32, sliding_window=window
        )
        specs = {name: sliding if i % 2 else full for i, name in enumerate(specs)}
    groups = planning.get_kv_cache_groups(config, specs)
    assert len(groups) == (2 if window else 1), "the hybrid manager is off"
    layers = max(len(group.layer_names) for group in groups)
    return planning.get_kv_cache_config_from_groups(config, groups, blocks * full.page_size_bytes * layers)
