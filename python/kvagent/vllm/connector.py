"""The connector class: vLLM creates one object in the scheduler's process and one in each worker's.

SchedulerCalls and WorkerCalls have the methods that vLLM calls in either; those that are forwarded
as they are stand in the tables below them. The metadata and the counters are subclasses of vLLM's
that travel between the two.
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
from kvagent.vllm.boundary import MAX_REASON, Call, Errors, RetiredScheduler, Unloaded, contained, notice, warn
from kvagent.vllm.counters import GAUGES, HELP, CounterDeltas
from kvagent.vllm.geometry import Unsupported, canvas_refusal, check, hash_tokens, preferred_layout
from kvagent.vllm.hooks import of
from kvagent.vllm.link import Link, start_agent
from kvagent.vllm.options import FAIL, Options, parse, saves, synonyms
from kvagent.vllm.plan import Report, StepPlan
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
    from kvagent.vllm.scheduler.agent_session import AgentSession


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

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, engines: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, engines)
        self._metrics: dict[str, dict[int, Any]] = {}
        for kind, texts in ((self._counter_cls, HELP), (self._gauge_cls, GAUGES)):
            for name, text in texts.items():
                one = kind(name=f"vllm:kvagent_{name}", documentation=text, labelnames=labelnames)
                self._metrics[name] = {engine: one.labels(*values) for engine, values in engines.items()}

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


class SchedulerCalls(Calls):
    """The calls of the scheduler's role."""

    _scheduler: SchedulerSide | None = None
    """There once vLLM has made its KV cache manager."""
    _make_side: Callable[[Any], SchedulerSide] | None = None
    _retired: RetiredScheduler | None = None
    """Takes the place of the side in an engine that is not served."""
    _adopted = False
    """Whether a worker has reported."""
    unloaded: Unloaded
    _notice: AgentSession | None = None

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take vLLM's block tables and block pool."""
        if self._make_side is not None:
            self._scheduler = side = self._make_side(kv_cache_manager)
            side.failed = self._fail
            self._deltas = [CounterDeltas(side.counts), CounterDeltas(self.errors.counts)]

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Ignore handshake data, which MultiConnector passes of other connectors."""

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:  # noqa: ARG002
        """Return how many tokens of the request just admitted came from where, for vLLM 0.33, which
        counts the rest as external_unspecified.
        """
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        admitted, found = self._side.hit
        return {CacheHitSource(name): n for name, n in found.items() if n and admitted == request.request_id}

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """Return the plan of a step."""
        if self._notice is not None:
            self._notice.poll()
        return Metadata(self.unloaded.put((self._retired or self._side).plan(scheduler_output)))

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
            self._retire(reason)

    def request_finished(
        self, request: Any, block_ids: list[int]  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:  # fmt: skip
        """Handle a request's end. Return that vLLM need not keep its blocks, as saves pin theirs,
        and what a decode engine needs to know.
        """
        normally = getattr(request.status, "name", "") in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        return False, self._side.finished(request, normally=normally)

    request_finished_all_groups = request_finished

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must go on stepping without requests to release pins."""
        return (self._retired or self._side).pending()

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a worker's connector, or one that was shut down"
        return self._scheduler

    def _adopt(self, workers: Sequence[WorkerInfo]) -> None:
        """Register as the first worker does, whose configuration computes the blocks."""
        for one in workers:
            theirs = as_worker(self._identity, one.identity or self._identity)
            if theirs != self._identity:
                names = ", ".join(sorted({key for key, _ in {*theirs} ^ {*self._identity}}))
                if self._adopted:
                    log.warning("ranks of this engine resolved different values (%s): it finds nothing", names)
                    continue
                log.info("the workers resolved other values than this process (%s): registering again", names)
                self._identity = theirs
                self._side.reregister()
            self._adopted = True

    def _retire(self, reason: str) -> None:
        """Save and load nothing more."""
        if self._retired is not None or self._make_side is None:  # or it is a worker's connector
            return
        self._uncached = self._uncached or reason
        warn(reason)
        side, self._scheduler = self._scheduler, None
        if side is not None:
            self.unloaded.add_planned([*side.loads.taken, *side.loads.take()[0]])
        self._retired = RetiredScheduler(side)
        with contextlib.suppress(Exception):
            self._say_uncached()

    def _say_uncached(self) -> None:
        """Tell the agent why the engine is served without it, now and after each of its starts."""
        model, transfer = self._vllm_config.model_config, self._vllm_config.kv_transfer_config
        about = {"model": str(model.model)[:MAX_REASON], "dtype": str(model.dtype), "tenant": self._options.tenant}
        self._notice = notice(self._options.socket_dir, str(transfer.engine_id), about, self._uncached)

    # ---- errors: each takes the name of vLLM's call, the error and the call's arguments

    def _fail(self, call: str, error: Exception, *args: Any) -> None:  # noqa: ARG002
        """Handle an error in a call that the whole part depends on."""
        self._retire(self.errors.note(call, error, "The engine goes on uncached"))

    def _fail_little(self, call: str, error: Exception, *args: Any) -> None:  # noqa: ARG002
        """Handle an error in a call that nothing depends on."""
        reason = self.errors.note(call, error, "The call is ignored")
        if self.errors.too_many:
            self._retire(reason)

    def _fail_request(self, call: str, error: Exception, request: Any, *args: Any) -> None:
        """Handle an error in a call about a request: it is neither saved nor loaded any more. When
        it was admitted, vLLM waits for what was promised, or computes in this step from what did
        not come. When it ended, vLLM frees its blocks, except for pinned ones.
        """
        reason = self.errors.note(call, error, "The request is served uncached")
        side, tracked = self._scheduler, None
        try:
            if side is not None:
                tracked = side.exclude(request.request_id, over=call.startswith("request_finished"))
        except Exception as again:  # noqa: BLE001
            self._fail("exclude", again)
        if self.errors.too_many:
            self._retire(reason)
        if call == "update_state_after_alloc" and args[1] > 0:
            blocks, external = args
            own = 0 if tracked is None else tracked.own // self._geometry.groups[0].block_tokens
            waits = tracked is not None and tracked.waits
            job = self.unloaded.add(request.request_id, blocks, own, sync=waits)
            if side is not None and tracked is not None and waits:
                try:
                    side.waiting_loads.start(job, tracked, external)
                except Exception as again:  # noqa: BLE001
                    self._fail(call, again)


_ALL, _LITTLE, _REQUEST = SchedulerCalls._fail, SchedulerCalls._fail_little, SchedulerCalls._fail_request
_SIDE = "_scheduler"
contained({
    "bind_kv_cache_manager": Call(_ALL), "on_new_request": Call(_REQUEST, None, _SIDE, to="on_new_request"),
    "get_num_new_matched_tokens": Call(_REQUEST, (0, False), _SIDE, to="matched"),
    "update_state_after_alloc": Call(_REQUEST, None, _SIDE, to="allocated"),
    "get_external_cache_hit_sources": Call(_LITTLE, {}, _SIDE), "build_connector_meta": Call(_ALL, again=True),
    "update_connector_output": Call(_ALL, again=True), "take_events": Call(_LITTLE, (), _SIDE, to="take_events"),
    "request_finished": Call(_REQUEST, (False, None), _SIDE),
    "request_finished_all_groups": Call(_REQUEST, (False, None), _SIDE),
    "has_pending_push_work": Call(_LITTLE, False), "reset_cache": Call(_ALL, True, _SIDE, to="reset"),
    "before_weights_call": Call(_ALL, None, _SIDE, to="before_weights_call"),
    "weights_named": Call(_ALL, None, _SIDE, to="weights_named"),
})(SchedulerCalls)  # fmt: skip


class WorkerCalls(Calls):
    """The calls of a worker's role."""

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
        """Register the KV caches with the agent; wait briefly for one that is running. Where that
        is not supported, the scheduler's side is told, unless the start is to end.
        """
        release_fenced()
        try:
            if self._uncached:
                raise Unsupported(self._uncached)
            self._register(kv_caches)
        except Unsupported as error:
            if self._options.on_unsupported == FAIL:
                raise
            self._refuse(str(error))

    def unregister_kv_caches(self) -> None:
        """Withdraw the KV caches from the agent, before the engine sleeps."""
        if self._worker_side.leave():
            self._close_memory()
        else:
            self._retain(self._worker_side, self._worker_side.fence())

    def restore_kv_caches(self) -> None:
        """Register the KV caches again, after the engine slept."""
        if self._kv_caches:
            self.register_kv_caches(dict(self._kv_caches))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Revoke the saves of blocks that were taken from their requests, before any can be
        overwritten: in the plan of the step before the first one that may reuse them.
        """
        if (plan := _plan(kv_connector_metadata)).revokes:
            self._worker_side.revoke_saves(plan)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin a step: vLLM's first call of it, before its kernels are launched."""
        self._connector_metadata, plan = connector_metadata, _plan(connector_metadata)
        if self._lost is not None:
            abandon(self._lost, [*plan.saves, *plan.loads])
        elif self._worker is not None and plan.uncached:
            self._uncached = self._uncached or "the scheduler's part found the reason"
            self._leave_agent()  # the words stay: kernels of earlier steps may still write to them
        elif self._worker is not None:
            if self._start.part.index:
                plan = self._start.part.of_plan(plan)
                self._connector_metadata = Metadata(plan)
            self._worker.begin(plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Send the loads, and wait for those that this step computes from."""
        if (plan := _plan(self._connector_metadata)).loads:
            self._worker_side.start(plan)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: saves are sent at the end of the step (docs/decisions)."""

    def wait_for_save(self) -> None:
        """End the step and send the saves, without waiting."""
        self._worker_side.end(_plan(self._connector_metadata))

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        """Return the requests whose load has ended, and those whose load failed as a whole."""
        results = self._worker.results() if self._worker is not None else NO_RESULTS
        if self._lost is not None:
            results, self._lost.pending_results = self._lost.pending_results, Results()
        if results is NO_RESULTS:  # a new object: vLLM modifies its sets
            return base.KVConnectorTransferResults()
        self._bad_blocks = self._bad_blocks | results.bad_blocks
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

    def _register(self, kv_caches: dict[str, Any]) -> None:
        """Register the KV caches. Whatever the driver, the kernel or torch does not allow the agent
        to open is Unsupported.
        """
        self._kv_caches = kv_caches
        names = [list(group.layer_names) for group in self._config.kv_cache_groups]
        try:
            self._memory = caches = memory(
                kv_caches, names, self._config.num_blocks, extents_of=self._start.extents(self._rank),
                shard=self._start.part.shard(self._rank, self._replicas),
            )  # fmt: skip
            self._clock = self._clock or make_clock(caches.device)
        except (KVAgentError, OSError, RuntimeError) as error:
            raise Unsupported(f"the agent cannot be given the KV caches: {error}") from error
        self._identity = with_resolved(self._identity, used_backends(self._vllm_config, self._config, kv_caches))
        link = self._make_link()
        if self._worker is None:
            self._guests = self._start.worker(
                caches, self._rank, lambda: self._registration(Role.SCHEDULER, self._weights), lambda: self._identity
            )  # fmt: skip
            self._worker = WorkerSide(
                link, self._clock, per_block=geo.fails_by_block(self._config), generation=self._generation,
                identity=() if self._start.part.index else self._identity, guests=self._guests,
            )  # fmt: skip
            self._deltas = [CounterDeltas(one, "worker_") for one in (self._worker.counts, self.errors.counts)]
        else:
            self._worker.rejoin(link)
        link.wait(self._options.start_wait_ms / 1e3)

    def _make_link(self) -> Link:
        budget, pool = self._options.cpu_bytes_to_use_per_rank, self._options.pool
        return Link(self._options.socket_dir, f"rank {self._rank}", self._registration_of_worker, budget, pool)

    def _registration_of_worker(self) -> Registration:
        assert self._memory is not None
        assert self._clock is not None
        words = self._clock.words
        return self._registration(
            Role.WORKER, self._weights, rank=self._rank - self._start.part.ranks[0], sync=words.sync(0),
            regions=[(words.memory.region(0), words.memory.fd), *self._memory.regions], held=self._memory.held,
        )  # fmt: skip

    @property
    def _weights(self) -> str:
        """The generation of the weights, with which this worker registers."""
        return self._generation if self._worker is None else self._worker.generation

    @property
    def _rank(self) -> int:
        return int(self._vllm_config.parallel_config.rank) % self._ranks.world

    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def _leave_agent(self) -> None:
        worker, self._worker = self._worker, None
        self._close_guests()
        if worker is not None and not worker.leave():
            self._retain(worker, lambda: False)
            self._clock = None
        self._close_memory()

    def _close_guests(self) -> None:
        for guest in self._guests:
            guest.close()
        self._guests = ()

    def _close_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _retain(self, worker: WorkerSide, fenced: Callable[[], bool]) -> None:
        """Retain what the agent can access of this worker: KV caches, their exports and words."""
        kept, self._memory = self._memory, None
        close = kept.close if kept is not None else lambda: None
        what = (dict(self._kv_caches), kept, self._clock)
        retain(RetainedMemory(f"rank {self._rank}", worker, what, close, fenced))

    # ---- errors, as in SchedulerCalls

    def _refuse(self, reason: str) -> None:
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
        self._worker = self._worker or WorkerSide(link, self._clock, per_block=geo.fails_by_block(self._config))
        self._worker.rejoin(link)
        self._worker.refuse(f"{owner}: {reason}")

    def _fail_start(self, call: str, error: Exception, *args: Any) -> None:  # noqa: ARG002
        """Handle an error before the first step: the worker joins no agent."""
        self._refuse(self.errors.note(call, error, "The engine goes on uncached"))

    def _fail_begin(self, call: str, error: Exception, connector_metadata: Any) -> None:
        """Handle an error when a step began: the loads in its plan fail."""
        self._connector_metadata = connector_metadata
        self._fail_step(call, error)

    def _fail_step(self, call: str, error: Exception, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Handle an error in a step: give up what is in flight, and leave the agent; join it again
        unless there were too many.
        """
        reason, worker = self.errors.note(call, error, "The worker leaves the agent and joins it again"), self._worker
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
        except Exception as again:  # noqa: BLE001
            self.errors.note("leave", again, "The engine goes on uncached")
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


_STEP, _START, _WORKER = WorkerCalls._fail_step, WorkerCalls._fail_start, "_worker"
contained({
    "register_kv_caches": Call(_START), "unregister_kv_caches": Call(_STEP, None, _WORKER),
    "restore_kv_caches": Call(_START, None, _WORKER), "handle_preemptions": Call(_STEP, None, _WORKER),
    "bind_connector_metadata": Call(WorkerCalls._fail_begin), "start_load_kv": Call(_STEP, None, _WORKER),
    "wait_for_layer_load": Call(_STEP, None, _WORKER, to="wait_layer"), "wait_for_save": Call(_STEP, None, _WORKER),
    "get_transfer_results": Call(_STEP, again=True), "build_connector_worker_meta": Call(_STEP),
})(WorkerCalls)  # fmt: skip


def _plan(metadata: Any) -> StepPlan:
    return metadata.plan if isinstance(metadata, Metadata) else StepPlan()


STATS_INTERVAL_S = 0.1  # minimum interval between two reports of counters to vLLM


@contained({"get_kv_connector_stats": Call(_LITTLE), "shutdown": Call(_LITTLE)})
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
        scheduler = role == KVConnectorRole.SCHEDULER
        if scheduler:
            _log_settings(transfer)
        try:
            self._begin(vllm_config, kv_cache_config, scheduler=scheduler)
        except Unsupported as error:
            if self._options.on_unsupported == FAIL:
                raise
            self._uncached = str(error)
            if scheduler:
                warn(self._uncached)
                self._retired = RetiredScheduler(None)
                self._say_uncached()

    def _begin(self, vllm_config: Any, kv_cache_config: Any, *, scheduler: bool) -> None:
        """Determine what is registered, and create the scheduler's part. Raise Unsupported."""
        kv_role = vllm_config.kv_transfer_config.kv_role
        check(vllm.__version__, KVConnectorBase_V1)
        if reason := canvas_refusal(vllm_config.model_config):
            raise Unsupported(reason)
        self._start = start = of(vllm_config, kv_cache_config, self._options)
        following = start.following()
        self._geometry = geo.geometry(kv_cache_config, hash_tokens(vllm_config, kv_cache_config), following)
        whole, self._replicas = geo.ranks(vllm_config.parallel_config, kv_cache_config)
        start.check(self._geometry, kv_role)
        self._options = options = start.options
        self._ranks, pairs = start.distribution(whole)
        self._identity = identity(vllm_config, kv_cache_config, options.tenant, self._ranks, vllm.__version__, pairs)
        unseen, in_process = unobserved(vllm_config, options), False
        start_agent(options.socket_dir, options.pool)
        if scheduler:
            unwatched, in_process = watch(options)
            unseen += unwatched
        reasons = [*unseen, *unknown_weights(self._identity)]
        self._generation = initial_generation(vllm_config, options.weights_version, reasons)
        if scheduler:
            _log_generation(self._generation, reasons)
            generations = Generations(self._generation, options, unobserved=bool(unseen), in_process=in_process)
            link = Link(
                options.socket_dir, "scheduler", lambda: self._registration(Role.SCHEDULER, generations.now),
                pool=options.pool,
            )  # fmt: skip
            may_save = saves(kv_role, options)
            joined = start.scheduler(self._geometry, self._ranks.world, saves=may_save)
            link.attached = joined.attached
            link.wait(options.start_wait_ms / 1e3)
            self._make_side = partial(
                SchedulerSide, options, self._geometry, self._ranks.world, link, saves=may_save,
                generations=generations, joined=joined,
            )  # fmt: skip

    @property
    def requires_kv_delivery(self) -> bool:
        """Return whether vLLM drops the output in flight of a preempted request: a prefill engine
        has nothing but its blocks to deliver.
        """
        producer = self._vllm_config.kv_transfer_config.kv_role == "kv_producer"
        return bool(producer and self._options.transfers and not self._uncached)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """Return that an engine may sleep: the connector withdraws its KV caches before, and
        registers them again after it.
        """
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the KV layout to ask vLLM for: block-outermost for large copies, layer-outermost
        for large copies of a layer.
        """
        options = parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return preferred_layout(vllm_config, options.layout, layerwise=options.layerwise)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether vLLM must not replay forward passes, which call no wait_for_layer_load."""
        return parse(extra_config).layerwise

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Return the stats for data received from another process."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *config: Any) -> Any:
        """Return the Prometheus counters for /metrics."""
        return PromMetrics(*config)

    def get_kv_connector_stats(self) -> Stats | None:
        """Return what this role counted since the last report, at most once per STATS_INTERVAL_S
        while there are requests: a step without them may be the last one for long.
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
        for one in (self._scheduler, self._notice):
            if one is not None:
                one.close()
        self._scheduler = self._make_side = self._notice = None
        self._leave_agent()
        if self._clock is not None:
            self._clock.close()
            self._clock = None


def _log_settings(transfer: Any) -> None:
    for name, ours in synonyms(transfer.kv_connector_extra_config).items():
        log.info("%s is %s here: an option of another connector", name, ours)
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
