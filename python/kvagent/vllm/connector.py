"""The connector class: vLLM creates one object in the scheduler's process and one in each worker's.

SchedulerCalls and WorkerCalls have the methods that vLLM calls in either. The metadata and the
counters are subclasses of vLLM's that travel between the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvagent.errors import KVAgentError
from kvagent.messages import Role
from kvagent.registration import Registration
from kvagent.vllm import geometry as geo
from kvagent.vllm.boundary import (
    MAX_REASON,
    SCHEDULER,
    WORKER,
    Call,
    Errors,
    Notice,
    RetiredScheduler,
    Unloaded,
    contained,
    notice,
    of_all,
    of_little,
    retire,
    warn,
)
from kvagent.vllm.counters import GAUGES, HELP, CounterDeltas
from kvagent.vllm.geometry import Unsupported, canvas_refusal, check, hash_tokens, preferred_layout
from kvagent.vllm.hooks import of
from kvagent.vllm.link import Link, start_agent
from kvagent.vllm.options import FAIL, Options, parse, saves, synonyms
from kvagent.vllm.plan import Report, StepPlan
from kvagent.vllm.scheduler.saves import WorkerRevocation
from kvagent.vllm.scheduler.side import SchedulerSide
from kvagent.vllm.space import as_worker, identity, unknown_weights, unobserved, used_backends, with_resolved
from kvagent.vllm.weight_changes import PRIVATE, Generations, initial_generation, watch, with_generation
from kvagent.vllm.worker.memory import Memory, RetainedMemory, memory, release_fenced, retain
from kvagent.vllm.worker.side import NO_RESULTS, HostClock, Results, WorkerSide, abandon, make_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvagent.cuda import CudaClock
    from kvagent.vllm.geometry import Geometry, Ranks
    from kvagent.vllm.hooks import Start, WorkerGuest
    from kvagent.vllm.plan import WorkerInfo


@dataclass
class Metadata(KVConnectorMetadata):
    """A step's plan for the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers' reports for the scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both reports as one."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.join(other.report))


class Stats(KVConnectorStats):
    """The counters since the last report."""

    def reset(self) -> None:
        """Clear the counters."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counters of another."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counters that are not zero, for the log."""
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not any(self.data.values())


class PromMetrics(KVConnectorPromMetrics):
    """One counter ``vllm:kvagent_..._total`` per name of HELP, and one gauge ``vllm:kvagent_...``
    per name of GAUGES, present at zero from the start.
    """

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        for kind, texts in ((self._counter_cls, HELP), (self._gauge_cls, GAUGES)):
            for name, text in texts.items():
                one = kind(name=f"vllm:kvagent_{name}", documentation=text, labelnames=labelnames)
                self._metrics[name] = {engine: one.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counters of a report; a gauge in it is 1, however many processes report it."""
        for name, value in transfer_stats_data.items():
            if name in GAUGES and value > 0:
                self._metrics[name][engine_idx].set(1)
            elif name in HELP and value > 0:
                self._metrics[name][engine_idx].inc(value)


log = logging.getLogger("vllm.kvagent")


class Calls:
    """What both roles of KVAgentConnector have."""

    _vllm_config: Any
    _config: Any
    _options: Options
    _ranks: Ranks
    _replicas: int
    _geometry: Geometry
    _start: Start
    _identity: tuple[tuple[str, str], ...]
    _generation: str
    _uncached: str = ""
    """Why the engine is served without the agent; empty if it is not."""
    errors: Errors
    _deltas: Sequence[CounterDeltas] = ()

    def _registration(self, role: Role, generation: str, **more: Any) -> Registration:
        """Return a registration of the engine, with this generation of the weights."""
        part, config = self._start.part, self._vllm_config
        ranks = part.of_ranks(self._ranks, self._replicas)
        return Registration(
            role=role, instance=str(config.kv_transfer_config.engine_id)[:128], groups=self._geometry.groups,
            identity=part.of_identity(with_generation(self._identity, generation)),
            hash_tokens=self._geometry.hash_tokens, world=ranks.world, shards=ranks.shards, **more,
        )  # fmt: skip


@contained(SCHEDULER)
class SchedulerCalls(Calls):
    """A part of KVAgentConnector. An error in a call of vLLM's is contained (boundary)."""

    _scheduler: SchedulerSide | None = None
    """There once vLLM has made its KV cache manager."""
    _make_side: Callable[[Any], SchedulerSide] | None = None
    _retired: RetiredScheduler | None = None
    """Takes the place of that in an engine that is not served."""
    _revocation: WorkerRevocation | None = None
    _workers: tuple[WorkerInfo, ...] = ()
    unloaded: Unloaded
    _notice: Notice | None = None

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take vLLM's block tables and block pool."""
        if self._make_side is None:
            return
        side = self._make_side(kv_cache_manager)
        side.failed = partial(of_all, self)
        self._scheduler = side
        self._deltas = [CounterDeltas(side.counts), CounterDeltas(self.errors.counts)]

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Ignore handshake data of all pipeline stages: MultiConnector passes that of other
        connectors. Our workers send reports.
        """

    def on_new_request(self, request: Any) -> None:
        """Tell the agent which blocks a later look-up will ask for."""
        self._side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens of a prompt the agent has beyond those that the engine has."""
        return self._side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Handle a request's admission."""
        self._side.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:  # noqa: ARG002
        """Return how many tokens of the request just admitted came from where, for vLLM 0.33.

        What does not add up to ``num_external_tokens`` counts as external_unspecified there.
        """
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        admitted, found = self._side.hit
        return {CacheHitSource(name): n for name, n in found.items() if n and admitted == request.request_id}

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """Return the plan of a step."""
        if self._notice is not None:
            self._notice.poll()
        side = self._retired or self._side
        return Metadata(self.unloaded.put(side.plan(scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        """Handle the workers' reports."""
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, WorkerMetadata):
            return
        report = meta.report
        (self._retired or self._side).report(report)
        if self._retired is not None:
            return
        self._adopt(report.workers)
        reason = report.unsupported or self._start.part.difference(self._identity, report)
        if reason and self._options.on_unsupported == FAIL:
            raise Unsupported(reason)  # what only the first step shows ends the engine there
        if reason:
            retire(self, reason)
        elif report.workers:
            self._add_workers(report.workers)

    def take_events(self) -> Sequence[Any]:
        """Return KV events of what the agent's memory holds, since the last call."""
        return self._side.take_events()

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handle a request's end. Return that vLLM need not keep its blocks, since saves in flight
        have pinned theirs, and what a decode engine needs to know.
        """
        normally = getattr(request.status, "name", "") in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        self._side.finished(request, normally=normally)
        return False, self._side.transfer_params(request) if normally else None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request of a model with several KV cache groups."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must go on stepping without requests to release pins
        (worker.side).
        """
        return (self._retired or self._side).pending()

    def reset_cache(self) -> bool | None:
        """Make blocks stored so far unreachable for this engine; after a plain reset, for all
        engines.

        This holds even if the agent does not answer, so it always succeeds: a failure would keep
        vLLM from sleeping or pausing.
        """
        self._side.reset()
        return True

    def before_weights_call(self, call: str) -> None:
        """Handle a call of vLLM's engine core that may change the weights, before it is made
        (weight_changes.observe).
        """
        self._side.before_weights_call(call)

    def weights_named(self, version: str) -> None:
        """Handle the version of the weights that was passed to vLLM's engine core."""
        self._side.weights_named(version)

    def _say_uncached(self) -> None:
        """Tell the agent why the engine is served without it, now and after each of its starts."""
        model, transfer = self._vllm_config.model_config, self._vllm_config.kv_transfer_config
        identity = {
            "model": str(model.model)[:MAX_REASON], "dtype": str(model.dtype), "tenant": self._options.tenant,
        }  # fmt: skip
        self._notice = Notice(self._options.socket_dir, notice(str(transfer.engine_id), identity, self._uncached))

    def _leave_scheduler(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = self._make_side = None
        if self._revocation is not None:
            self._revocation.close()
            self._revocation = None
        if self._notice is not None:
            self._notice.close()
            self._notice = None

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a worker's connector, or one that was shut down"
        return self._scheduler

    def _adopt(self, workers: Sequence[WorkerInfo]) -> None:
        """Register as the first worker does, whose configuration computes the blocks."""
        first = not self._workers
        for one in workers:
            theirs = as_worker(self._identity, one.identity or self._identity)
            if theirs != self._identity:
                names = ", ".join(sorted({key for key, _ in {*theirs} ^ {*self._identity}}))
                if not first:
                    log.warning("ranks of this engine resolved different values (%s): it finds nothing", names)
                    continue
                log.info("the workers resolved other values than this process (%s): registering again", names)
                self._identity = theirs
                self._side.reregister()
            first = False

    def _add_workers(self, workers: Sequence[WorkerInfo]) -> None:
        """Record workers that reported for the first time."""
        self._workers = (*self._workers, *workers)
        if len(self._workers) < self._ranks.world or self._start.part.count > 1:
            return  # words of other nodes cannot be mapped: saves are revoked by plans
        try:
            self._revocation = WorkerRevocation(self._workers)
        except OSError as error:
            log.warning(
                "the workers' revocation words cannot be mapped (%s): reset_prefix_cache waits for saves", error
            )
            return
        self._side.saves.revoke_now = self._revocation.revoke


@contained(WORKER)
class WorkerCalls(Calls):
    """A part of KVAgentConnector. An error in a call of vLLM's is contained (boundary)."""

    _worker: WorkerSide | None = None
    _lost: WorkerSide | None = None
    """Takes the place of that after too many errors."""
    _clock: HostClock | CudaClock | None = None
    _memory: Memory | None = None
    _guests: Sequence[WorkerGuest] = ()
    _kv_caches: Mapping[str, Any] = {}
    _bad_blocks: set[int] = set()  # noqa: RUF012  replaced, never changed
    _connector_metadata: Any

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the KV caches with the agent; wait briefly for one that is running.

        Where that is not supported, the scheduler's side is told, unless the start is to end.
        """
        release_fenced()
        try:
            if self._uncached:
                raise Unsupported(self._uncached)
            self._register(kv_caches)
        except Unsupported as error:
            if self._options.on_unsupported == FAIL:
                raise
            self.refuse(str(error))

    def refuse(self, reason: str) -> None:
        """Join no agent, and report the reason with the next step. Jobs that the scheduler's side
        has planned until it knows fail at once.
        """
        owner = f"rank {int(self._vllm_config.parallel_config.rank)}"
        if not self._uncached:
            log.warning("%s: %s", owner, reason)
        self._uncached = reason
        self._close_guests()
        self._close_memory()
        self._clock = self._clock or make_clock(None)
        link = Link(self._options.socket_dir, owner, None)
        if self._worker is None:
            per_block = geo.fails_by_block(self._config)
            self._worker = WorkerSide(link, self._clock, per_block=per_block)
        else:
            self._worker.rejoin(link)
        self._worker.refuse(f"{owner}: {reason}")

    def recover(self, reason: str) -> None:
        """Give up what is in flight after an error, and leave the agent; join it again unless
        there were too many.
        """
        worker = self._worker
        if worker is None:
            return
        plan = _plan(self._connector_metadata)
        abandon(worker, plan.loads)
        self._connector_metadata = Metadata(dataclasses.replace(plan, loads=[]))  # they have failed
        free = False
        try:
            free = worker.leave()
            if free and not self.errors.too_many:
                worker.rejoin(self._make_link())
                return
        except Exception as error:  # noqa: BLE001
            self.errors.note("leave", error, "The engine goes on uncached")
        self._uncached = self._uncached or reason
        log.warning("rank %d: %s", int(self._vllm_config.parallel_config.rank), reason)
        self._worker, self._lost = None, worker
        abandon(worker, plan.saves)
        if not free:
            self._retain(worker, lambda: False)
            self._clock = None
        self._close_memory()
        with contextlib.suppress(Exception):
            self._close_guests()

    def _make_link(self) -> Link:
        budget, pool = self._options.cpu_bytes_to_use_per_rank, self._options.pool
        return Link(self._options.socket_dir, f"rank {self._rank}", self._registration_of_worker, budget, pool)

    def _register(self, kv_caches: dict[str, Any]) -> None:
        self._kv_caches = kv_caches
        caches, clock = self._share(kv_caches)
        self._identity = with_resolved(self._identity, used_backends(self._vllm_config, self._config, self._kv_caches))
        link = self._make_link()
        if self._worker is None:
            self._guests = self._start.worker(caches, self._rank, self._registration_of_node, lambda: self._identity)
            per_block = geo.fails_by_block(self._config)
            self._worker = WorkerSide(
                link, clock, per_block=per_block,
                generation=self._generation,
                identity=() if self._start.part.index else self._identity, guests=self._guests,
            )  # fmt: skip
            self._deltas = [CounterDeltas(one, "worker_") for one in (self._worker.counts, self.errors.counts)]
        else:
            self._worker.rejoin(link)
        link.wait(self._options.start_wait_ms / 1e3)

    def _share(self, kv_caches: dict[str, Any]) -> tuple[Memory, HostClock | CudaClock]:
        """Return what the agent is to open of this worker. Whatever the driver, the kernel or torch
        does not allow of it is Unsupported.
        """
        names = [list(group.layer_names) for group in self._config.kv_cache_groups]
        try:
            self._memory = memory(
                kv_caches,
                names,
                self._config.num_blocks,
                extents_of=self._start.extents(self._rank),
            )
            self._clock = self._clock or make_clock(self._memory.device)
        except (KVAgentError, OSError, RuntimeError) as error:
            raise Unsupported(f"the agent cannot be given the KV caches: {error}") from error
        return self._memory, self._clock

    def unregister_kv_caches(self) -> None:
        """Withdraw the KV caches from the agent, before the engine sleeps."""
        if self._part.leave():
            self._close_memory()
        else:
            self._retain(self._part, self._part.fence())

    def restore_kv_caches(self) -> None:
        """Register the KV caches again, after the engine slept."""
        if self._kv_caches:
            self.register_kv_caches(dict(self._kv_caches))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Revoke the saves of blocks that were taken from their requests, before any can be
        overwritten.

        Blocks of saves and loads in flight are pinned, so vLLM does not reuse them. A save is
        revoked by its word, without waiting, in the plan of the step before the first one that may
        reuse its blocks.
        """
        if (plan := _plan(kv_connector_metadata)).revokes:
            self._part.revoke_saves(plan)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin a step: vLLM's first call of it, before its kernels are launched."""
        self._connector_metadata, plan = connector_metadata, _plan(connector_metadata)
        if self._worker is not None and self._start.part.index:
            plan = self._start.part.of_plan(plan)
            self._connector_metadata = Metadata(plan)
        if self._lost is not None:
            abandon(self._lost, [*plan.saves, *plan.loads])
        elif self._worker is not None and plan.uncached:
            self._uncached = self._uncached or "the scheduler's part found the reason"
            self._leave_agent()  # the words stay: kernels of earlier steps may still write to them
        elif self._worker is not None:
            self._worker.begin(plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Send the loads, and wait for those that this step computes from."""
        if (plan := _plan(self._connector_metadata)).loads:
            self._part.start(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for the layer's part of the loads that this step waits for, with ``layerwise``."""
        self._part.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: saves are sent at the end of the step (docs/decisions)."""

    def wait_for_save(self) -> None:
        """End the step and send the saves, without waiting."""
        self._part.end(_plan(self._connector_metadata))

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        """Return the requests whose load has ended, and those whose load failed as a whole."""
        results = self._worker.results() if self._worker is not None else NO_RESULTS
        if self._lost is not None:
            results, self._lost.pending_results = self._lost.pending_results, Results()
        if results.bad_blocks:
            self._bad_blocks = self._bad_blocks | results.bad_blocks
        if results is NO_RESULTS:  # a new object: vLLM modifies its sets
            return base.KVConnectorTransferResults()
        return base.KVConnectorTransferResults(finished_recving=results.received, failed_recving=results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that failed to load, of the requests in the last results."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Return this worker's report."""
        report = self._worker.report() if self._worker is not None else None
        if self._lost is not None:
            report, self._lost.pending_report = self._lost.pending_report, Report()
            report.unsupported = self._uncached
        return None if report is None else WorkerMetadata(report)

    @property
    def _weights(self) -> str:
        """The generation of the weights, with which this worker registers."""
        return self._generation if self._worker is None else self._worker.generation

    def _registration_of_node(self) -> Registration:
        return self._registration(Role.SCHEDULER, self._weights)

    def _close_guests(self) -> None:
        for guest in self._guests:
            guest.close()
        self._guests = ()

    def _leave_agent(self) -> None:
        worker, self._worker = self._worker, None
        self._close_guests()
        if worker is not None and not worker.leave():
            self._retain(worker, lambda: False)
            self._clock = None
        self._close_memory()

    def _leave_worker(self) -> None:
        self._leave_agent()
        if self._clock is not None:
            self._clock.close()
            self._clock = None

    def _retain(self, worker: WorkerSide, fenced: Callable[[], bool]) -> None:
        """Retain what the agent can access of this worker: the KV caches, their exports and the
        words.
        """
        memory, self._memory = self._memory, None
        close = memory.close if memory is not None else lambda: None
        retain(
            RetainedMemory(f"rank {self._rank}", worker, (dict(self._kv_caches), memory, self._clock), close, fenced)
        )

    def _close_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    @property
    def _rank(self) -> int:
        return int(self._vllm_config.parallel_config.rank) % self._ranks.world

    @property
    def _part(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def _registration_of_worker(self) -> Registration:
        assert self._memory is not None
        assert self._clock is not None
        words = self._clock.words
        return self._registration(
            Role.WORKER, self._weights, rank=self._rank - self._start.part.ranks[0],
            shard=self._start.part.shard(self._rank, self._replicas), sync=words.sync(0),
            regions=[(words.memory.region(0), words.memory.fd), *self._memory.regions],
            segments=self._memory.segments, cells=self._memory.cells,
        )  # fmt: skip


def _plan(metadata: Any) -> StepPlan:
    return metadata.plan if isinstance(metadata, Metadata) else StepPlan()


STATS_INTERVAL_S = 0.1  # minimum interval between two reports of counters to vLLM


@contained({"get_kv_connector_stats": Call(of_little), "shutdown": Call(of_little)})
class KVAgentConnector(SchedulerCalls, WorkerCalls, KVConnectorBase_V1, SupportsHMA):
    """Save KV blocks to the node's agent and load them from it. See docs/VLLM.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options: Options = parse(transfer.kv_connector_extra_config)
        self._config = kv_cache_config
        self._next_stats = 0.0
        self._told_uncached = False
        self.errors, self.unloaded = Errors(), Unloaded()
        if role == KVConnectorRole.SCHEDULER:
            _check_policy(transfer)
            for name, ours in synonyms(transfer.kv_connector_extra_config).items():
                log.info("%s is %s here: an option of another connector", name, ours)
        try:
            self._begin(vllm_config, role, kv_cache_config)
        except Unsupported as error:
            if self._options.on_unsupported == FAIL:
                raise
            self._uncached = str(error)
            if role == KVConnectorRole.SCHEDULER:
                warn(self._uncached)
                self._retired = RetiredScheduler(None)
                self._say_uncached()

    def _begin(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Determine what is registered, and create the scheduler's part. Raise Unsupported."""
        transfer = vllm_config.kv_transfer_config
        check(vllm.__version__, KVConnectorBase_V1)
        if reason := canvas_refusal(vllm_config.model_config):
            raise Unsupported(reason)
        self._start = of(vllm_config, kv_cache_config, self._options)
        following = self._start.following()
        self._geometry = geo.geometry(kv_cache_config, hash_tokens(vllm_config, kv_cache_config), following)
        whole, self._replicas = geo.ranks(vllm_config.parallel_config, kv_cache_config)
        self._start.check(self._geometry, transfer.kv_role)
        self._options = self._start.options
        self._ranks, pairs = self._start.distribution(whole)
        self._identity = identity(
            vllm_config, kv_cache_config, self._options.tenant, self._ranks, vllm.__version__, pairs
        )
        reasons = unobserved(vllm_config, self._options)
        start_agent(self._options.socket_dir, self._options.pool)
        in_process = False
        if role == KVConnectorRole.SCHEDULER:
            unwatched, in_process = watch(self._options)
            reasons += unwatched
        unseen = bool(reasons)
        reasons += unknown_weights(self._identity)
        self._generation = initial_generation(vllm_config, self._options.weights_version, reasons)
        if role == KVConnectorRole.SCHEDULER:
            _log_generation(self._generation, reasons)
            generations = Generations(self._generation, self._options, unobserved=unseen, in_process=in_process)
            self._make_side = self._maker(transfer.kv_role, generations)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return whether vLLM drops the output of a preempted request that is in flight.

        A prefill engine has nothing but its blocks to deliver; other engines keep the output.
        """
        producer = self._vllm_config.kv_transfer_config.kv_role == "kv_producer"
        return bool(producer and self._options.transfers and not self._uncached)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """Return whether an engine with the connector may sleep.

        It may: the connector withdraws the KV caches before and registers them again after it. KV
        caches that vLLM's allocator made so that no other process can open them are refused when
        they are registered, as all memory of that kind is.
        """
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the KV layout to ask vLLM for; a block-outermost layout allows large copies,
        a layer-outermost one large copies of a layer.
        """
        transfer = vllm_config.kv_transfer_config
        options = parse(transfer.kv_connector_extra_config)
        return preferred_layout(vllm_config, options.layout, layerwise=options.layerwise)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether vLLM must not replay a whole forward pass: a replay calls no
        wait_for_layer_load.
        """
        return parse(extra_config).layerwise

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Return the stats for data received from another process."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        """Return the Prometheus counters for /metrics."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> Stats | None:
        """Return what this role counted since the last report, at most once per STATS_INTERVAL_S
        while there are requests.

        vLLM merges and transports the stats in every step that returns some. A step without
        requests may be the last one for long, so it returns them at once.
        """
        now = time.monotonic()
        idle = not self._scheduler.requests if self._scheduler else _plan(self._connector_metadata).idle
        if now < self._next_stats and not idle:
            return None
        self._next_stats = now + STATS_INTERVAL_S
        grown: dict[str, int] = {}
        for delta in self._deltas:
            grown |= delta.take()
        if self._uncached and not self._told_uncached:
            self._told_uncached = True
            grown["uncached"] = 1
        return Stats(data=grown) if grown else None

    def shutdown(self) -> None:
        """Leave the agent."""
        self._leave_scheduler()
        self._leave_worker()

    def _maker(self, kv_role: str, generations: Generations) -> Callable[[Any], SchedulerSide]:
        """Return what makes the scheduler's side, with vLLM's KV cache manager."""
        link = Link(
            self._options.socket_dir, "scheduler", lambda: self._registration(Role.SCHEDULER, generations.now),
            pool=self._options.pool,
        )  # fmt: skip
        may_save = saves(kv_role, self._options)
        joined = self._start.scheduler(self._geometry, self._ranks.world, saves=may_save)
        link.attached = joined.attached
        link.wait(self._options.start_wait_ms / 1e3)
        return partial(
            SchedulerSide, self._options, self._geometry, self._ranks.world, link, saves=may_save,
            generations=generations, joined=joined,
        )  # fmt: skip


def _check_policy(transfer: Any) -> None:
    if transfer.kv_load_failure_policy != "recompute":
        log.warning(
            'kv_load_failure_policy is not "recompute": a request whose blocks do not come fails instead of being '
            'computed. Add "kv_load_failure_policy": "recompute" to --kv-transfer-config.'
        )


def _log_generation(generation: str, reasons: list[str]) -> None:
    why = "; ".join(reasons)
    if generation.startswith(PRIVATE):
        log.warning(
            "the weights may differ from their files (%s): this engine shares blocks with no other engine, and does "
            "not find them after a restart. Name the weights that it starts with (weights_version in "
            "kv_connector_extra_config) or, if they never change in place, set weights_fixed; see docs/VLLM.md",
            why,
        )
    elif reasons:
        log.info("the weights count as %s, although they may differ (%s): see docs/VLLM.md", generation, why)
