"""A real scheduler, real worker drivers and a fake GPU.

Its kernels run when ``complete`` is called, after the launch, so saves and loads overlap steps in
flight; only then does the step word say that the step has ended. Messages between scheduler and
workers are pickled.
"""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from kvagent.vllm.worker.side import HostClock
from tests.agent import eventually
from tests.vllm import agents
from tests.vllm import gpu as fake
from tests.vllm.gpu import Gpu, Part
from tests.vllm.setting import BLOCK, HEADS, LAYERS, kv_cache_config, speculate_like_eagle, vllm_config

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from pathlib import Path

    from tests.agent import AgentProcess

EOS = 1


class Attention:
    """Stands for a layer whose forward waits for its part of a load."""


@dataclass
class _Launch:
    output: Any
    work: list[Part]
    ends: list[Callable[[], None]]
    connector_outputs: list[Any]
    sampled: list[list[int]] | None = None
    """Once its kernels have run."""


class World:
    """An engine. ``depth``: steps in flight. ``drafts``: speculative tokens per step.

    ``split``: its ranks divide the heads of the model among them; else each has all of them.
    """

    def __init__(
        self, model: Path, socket_dir: str, *, blocks: int = 64, asynchronous: bool = False, v2: bool = True,
        layout: str = "LBNHC", ranks: int = 1, window: int = 0, scale: int = 1, depth: int = 1, drafts: int = 0,
        kind: str = "sliding", extra: dict[str, Any] | None = None, transfer: dict[str, Any] | None = None,
        max_batched: int = 256, dense: bool = False, split: bool = False, silent: Container[str] = (),
        eagle: bool = False, stages: int = 1, events: Callable[[bytes], None] | str = "",
        others: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """``others``: the socket directories of the other nodes that its ranks are on.

        ``events`` takes the batches of KV events, or is the endpoint where vLLM publishes.

        ``silent``: layers that do not wait for their part of a load, such as indexers.
        ``stages``: of the pipeline, which divide its ranks among them.

        ``dense``: vLLM keeps all states and blocks of windows, not only those at the ends of
        prompts. ``eagle``: the last layer is a draft model's, whose KV depends on the next token.
        """
        if hasattr(ActiveKVConnector, "finalize_step"):  # 0.33; older ones refuse the second one on CPUs
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(v2))
        self.v2, self.ranks, self.depth, self.drafts, self.asynchronous = v2, ranks, depth, drafts, asynchronous
        self.blocks = blocks
        self.preempted = self.steps = 0
        options: dict[str, Any] = {
            "socket_dir": socket_dir, "min_load_tokens": BLOCK, "lookup_grace_ms": 10_000, "lookup_age_ms": 10_000,
            "lookup_wait_ms": 100, "pin_percent": 15, "start_wait_ms": 20_000,
        }  # fmt: skip
        options |= extra or {}
        settings = {
            "kv_connector": "KVAgentConnector", "kv_connector_module_path": "kvagent.vllm", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": options,
        } | (transfer or {})  # fmt: skip
        self.config = vllm_config(
            model, settings, layout=layout, asynchronous=asynchronous, max_batched=max_batched, ranks=ranks,
            drafts=drafts, stages=stages,
        )  # fmt: skip
        if eagle:
            speculate_like_eagle(self.config)
        self._others = others
        if others:
            self.config.parallel_config.nnodes = 1 + len(others)
            self.config.parallel_config.distributed_executor_backend = "mp"
        self.config.cache_config.num_gpu_blocks = blocks
        if events:
            where = {"publisher": "zmq", "endpoint": events} if isinstance(events, str) else {"publisher": "null"}
            self.config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, **where)
        if dense:
            self.config.cache_config.prefix_cache_retention_interval = None
        self.kv = kv_cache_config(self.config, blocks, window, scale, HEADS // ranks if split else HEADS, kind)
        self.kv.kv_cache_layout = layout
        merged = generate_scheduler_kv_cache_config([self.kv])
        init_none_hash(sha256)
        block, hashed = resolve_kv_cache_block_sizes(merged, self.config)
        assert (block, hashed) == (BLOCK * scale, BLOCK)
        self._hasher = get_request_block_hasher(hashed, sha256)
        # The workers are there before the scheduler is.
        self.queue: list[Callable[[], None]] = []
        caches = [allocate_kv_cache(self.kv, torch.device("cpu"), KVCacheLayout[layout]) for _ in range(ranks)]
        self.gpu = Gpu(self.kv, caches, split=split)
        if eagle:
            (self.gpu.draft,) = (
                name for group in self.kv.kv_cache_groups for name in group.layer_names if f".{LAYERS - 1}." in name
            )
        names = self.kv.kv_cache_groups[0].layer_names if options.get("layerwise") else []
        self.layers = [name for name in names if name not in silent]
        """Those that wait for their part of a load."""
        self._silent = [name for name in names if name in silent]
        self._reading: list[Part] = []
        for layer in self.layers:
            self.config.compilation_config.static_forward_context[layer] = Attention()
        self.workers: list[Any] = []
        self.drivers: list[Any] = []
        for rank in range(ranks):
            self._make_worker(rank)
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=self.config, kv_cache_config=merged, block_size=block, hash_block_size=hashed,
            structured_output_manager=StructuredOutputManager(self.config), log_stats=False,
        )  # fmt: skip
        self.scheduler.use_v2_model_runner = v2
        if callable(events):
            self.scheduler.kv_event_publisher.publish = lambda batch: events(msgspec.msgpack.encode(batch))
        self._named = not options.get("weights_fixed")
        self._greet()
        self._aggregator = KVOutputAggregator(ranks)
        self._flight: deque[_Launch] = deque()
        self.resumed = Counter[str]()
        """How often requests were resumed: as new ones (V2), or by their id (V1)."""
        self.outputs: dict[str, list[int]] = {}
        self.params: dict[str, Any] = {}
        """The kv_transfer_params that ended requests returned."""
        self.reasons: dict[str, str] = {}
        self._seen: set[str] = set()
        self.promised: Counter[str] = Counter()
        """Loads that workers were told to do, by request."""
        self.told: list[Counter[str]] = [Counter() for _ in range(ranks)]
        """Loads that each rank reported as over, by request."""
        self.failed: list[Counter[str]] = [Counter() for _ in range(ranks)]
        """Those that each rank reported as failed as a whole."""
        self.invalid: list[set[int]] = [set() for _ in range(ranks)]
        """Blocks that each rank reported as failed."""

    @property
    def side(self) -> Any:
        """The scheduler's side of the connector."""
        connector = self.scheduler.connector
        return getattr(connector, "_connectors", [connector])[0]._scheduler

    def wait_at_most(self, wait_s: float) -> None:
        """Wait so long for the agent's answers and loads from now on, also for those under way.

        For an agent that was stopped: a limit that is short from the start also strikes one that is
        merely late, on a busy machine.
        """
        side, lookups = self.side, self.side.agent.lookups
        waits = side.loads.waits
        waits._age_s = waits._grace_s = side.loads._deadline_s = wait_s
        if lookups is not None:
            lookups._age_s = lookups._client.timeout_s = wait_s
        for worker in self.workers:
            for inflight in worker._worker.jobs.values():
                inflight.deadline = min(inflight.deadline, time.monotonic() + wait_s)

    @property
    def sequences(self) -> dict[str, fake.Sequence]:
        return self.gpu.sequences

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(
        self, name: str, prompt: list[int], max_tokens: int, *, unread: bool = False,
        params: Any = None, **more: Any,
    ) -> None:  # fmt: skip
        """Add a request.

        ``unread``: it must not be served from any cache. ``params``: its kv_transfer_params.
        ``more`` goes to vLLM's Request.
        """
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, skip_reading_prefix_cache=unread or None,
        )  # fmt: skip
        sampling.update_from_generation_config({}, EOS)
        request = Request(
            request_id=name, prompt_token_ids=prompt, sampling_params=sampling, pooling_params=None,
            block_hasher=self._hasher, **more,
        )  # fmt: skip
        request.kv_transfer_params = copy.deepcopy(params)  # without vLLM's own checks of a client's
        lora = more.get("lora_request")
        self.sequences[name] = fake.Sequence(prompt, max_tokens, f"{more.get('cache_salt')} {lora and lora.lora_name}")
        self.outputs[name] = []
        self.params[name] = None
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        if name in self.scheduler.requests:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def retrain(self, *, named: bool = True) -> bool:
        """Change the weights: nothing computed so far may be used again.

        Return whether that was possible.

        The connector is told the weights' version, shared with other engines, unless they are not
        ``named``. vLLM preempts running requests, but not one that waits for its load or for more
        blocks after it.
        """
        if not self._may_forget():
            return False
        self.settle()
        self.gpu.weights += 1
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if named and self._named:
            connector = self.scheduler.connector
            getattr(connector, "_connectors", [connector])[0].weights_named(str(self.gpu.weights))
        return True

    def forget(self) -> bool:
        """Reset the engine's own cache; running requests restart. Return whether that was
        possible.
        """
        if not self._may_forget():
            return False
        self.settle()
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        return True

    def _may_forget(self) -> bool:
        """Return whether vLLM can reset its cache: not while a request that does not run has
        blocks.
        """
        table = self.scheduler.kv_cache_manager.get_block_ids
        waiting = [name for name, one in self.scheduler.requests.items() if one.status != RequestStatus.RUNNING]
        return not (self.side.blocks.loading or any(any(table(name)) for name in waiting))

    def step(self) -> None:
        """Launch a step and complete those beyond the pipeline's depth."""
        self.launch()
        while len(self._flight) >= self.depth:
            self.complete()

    def launch(self) -> None:
        output = self.scheduler.schedule()
        self.steps += 1
        self.preempted += len(output.preempted_req_ids or ())
        ends: list[Callable[[], None]] = []
        self.queue = ends
        plan = getattr(output.kv_connector_metadata, "metadata", [output.kv_connector_metadata])[0].plan
        self.promised.update(load.request for load in plan.loads if not load.sync)
        if any(load.sync for load in plan.loads):
            for earlier in self._flight:  # a GPU goes on while its worker waits
                self._execute(earlier)
        work = self._work(output)
        outputs = []
        self._reading = work if any(load.sync for load in plan.loads) else []
        for rank in range(len(self.workers)):
            sent = pickle.loads(pickle.dumps(output))  # noqa: S301
            outputs.append(pickle.loads(pickle.dumps(self._drive(rank, sent))))  # noqa: S301
            self._listen(rank, outputs[-1])
        self._flight.append(_Launch(output, work, ends, outputs))

    def complete(self) -> None:
        """Run the kernels of the oldest step and pass its output to the scheduler."""
        launch = self._flight.popleft()
        sampled = self._execute(launch)
        names = [part.name for part in launch.work]
        outputs = [
            ModelRunnerOutput(
                req_ids=names, req_id_to_index={n: i for i, n in enumerate(names)}, sampled_token_ids=sampled,
                kv_connector_output=one,
            )
            for one in launch.connector_outputs
        ]  # fmt: skip
        joined = self._aggregator.aggregate(outputs) if self.ranks > 1 else outputs[0]
        for engine in self.scheduler.update_from_output(launch.output, joined).values():
            for out in engine.outputs:
                self.outputs[out.request_id] += out.new_token_ids
                self.params[out.request_id] = out.kv_transfer_params or self.params[out.request_id]
                if out.finish_reason is not None:
                    self.reasons[out.request_id] = str(out.finish_reason)
        if self.drafts and not self.asynchronous:
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[9] * self.drafts for _ in names]))

    def _execute(self, launch: _Launch) -> list[list[int]]:
        """Run the kernels of a step, once. Return what they sampled."""
        if launch.sampled is None:
            launch.sampled = [self.gpu.run(part) for part in launch.work]
            for end_step in launch.ends:
                end_step()
        return launch.sampled

    def settle(self) -> None:
        """Complete what is in flight."""
        while self._flight:
            self.complete()

    def run(self, limit: int = 20_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if self.scheduler.has_requests():
                self.step()
            elif self._flight:
                self.complete()
            else:
                return
        raise AssertionError(f"still at work after {limit} steps: {list(self.scheduler.requests)}")

    def close(self) -> None:
        self.settle()
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.connector.shutdown()
        self.scheduler.kv_event_publisher.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def _work(self, output: Any) -> list[Part]:
        new = {new.req_id for new in output.scheduled_new_reqs}
        again = set(output.scheduled_cached_reqs.resumed_req_ids)
        self.resumed["as new"] += len(new & self._seen)
        self.resumed["by id"] += len(again)
        self._seen |= new
        work = []
        for name, scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            tables = tuple(list(t) for t in self.scheduler.kv_cache_manager.get_block_ids(name))
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            begin = request.num_computed_tokens - scheduled
            samples = not request.is_prefill_chunk
            work.append(Part(name, begin, scheduled, drafts, tables, samples, name in new | again or not self.drafts))
        return work

    def _greet(self) -> None:
        """Exchange handshakes like the engine's core at its start."""
        told = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        if told := {rank: one for rank, one in told.items() if one is not None}:
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(told)

    def _make_worker(self, rank: int) -> None:
        config = copy.deepcopy(self.config)
        config.parallel_config.rank = rank
        if node := rank * (1 + len(self._others)) // self.ranks:  # as another command line says
            config.parallel_config.node_rank = node
            config.kv_transfer_config.engine_id = f"{config.kv_transfer_config.engine_id} on node {node}"
            config.kv_transfer_config.kv_connector_extra_config["socket_dir"] = self._others[node - 1]
            config.instance_id = f"node {node}"
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.kv)
        kv_transfer_state._KV_CONNECTOR_AGENT = worker
        if self.v2:
            self.drivers.append(ActiveKVConnector(config, self.gpu.caches[rank]))
        else:
            worker.register_kv_caches(self.gpu.caches[rank])
            self.drivers.append(None)
        own = getattr(worker, "_connectors", [worker])[0]
        own._worker._clock = _Clock(own._clock.words, self)
        self.workers.append(worker)

    def _drive(self, rank: int, output: Any) -> Any:
        """Run a model runner's calls around its forward pass; with draft tokens the step ends after
        the rest.
        """
        kv_transfer_state._KV_CONNECTOR_AGENT = self.workers[rank]
        driver = self.drivers[rank]
        empty = not output.total_num_scheduled_tokens
        later = {"defer_finalize": True} if self.drafts and not empty else {}
        if driver is not None:
            if empty:
                return driver.no_forward(output).kv_connector_output
            driver.pre_forward(output)
            self._forward(rank)
            driver.finish_forward()
            if not later or not hasattr(driver, "finalize_step"):
                return driver.post_forward(output.finished_req_ids)
            connector_output = driver.post_forward(output.finished_req_ids, **later)
            driver.finalize_step()
            return connector_output
        from vllm.forward_context import set_forward_context

        self.workers[rank].handle_preemptions(output.kv_connector_metadata)
        if empty:
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config).kv_connector_output
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output, **later) as connector_output,
        ):
            self._forward(rank)
        if later:
            KVConnectorModelRunnerMixin.finalize_kv_connector()
        return connector_output

    def _forward(self, rank: int) -> None:
        """Let the layers wait, each before it reads. The silent ones read first."""
        for layer in self._silent + self.layers:
            if layer not in self._silent:
                self.workers[rank].wait_for_layer_load(layer)
            for part in self._reading:
                self.gpu.reads(part, rank, layer, self._reading)

    def _listen(self, rank: int, output: Any) -> None:
        if output is not None:
            self.told[rank].update(output.finished_recving or ())
            self.failed[rank].update(getattr(output, "failed_recving", None) or ())
            self.invalid[rank] |= output.invalid_block_ids


class _Clock(HostClock):
    """Ends steps after the kernels of the current launch."""

    def __init__(self, words: Any, world: World) -> None:
        super().__init__(words)
        self._world = world

    def end(self, step: int) -> None:
        self._world.queue.append(lambda: super(_Clock, self).end(step))


def joined(world: World, agent: AgentProcess) -> None:
    """Wait until an engine, which lost the last agent, is at the running one. It steps if it has
    not noticed the loss.
    """
    agents.joined(world.side, [worker._worker for worker in world.workers], agent, world.step)


def clean(world: World, agent: AgentProcess, *others: World) -> None:
    """Check that nothing is left over, no byte was wrong, and every rank reported every promised
    load once.
    """
    for each in (world, *others):
        assert not each.gpu.bad, each.gpu.bad[:5]
        assert each.free_blocks() == each.blocks - 1, f"{each.free_blocks()} blocks are free of {each.blocks - 1}"
        assert (each.side.blocks.saving, each.side.blocks.loading) == (0, 0)
        assert all(told == each.promised for told in each.told), f"promised {each.promised}, reported {each.told}"

    def given_back() -> bool:
        for each in (world, *others):  # a look-up that was answered too late is read in the next step
            each.step()
            each.settle()
        return bool(agent.status()["leases"] == 0)

    eventually(given_back, "an agent without leases")
