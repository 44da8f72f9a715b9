"""The connector's methods that vLLM's workers call."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvagent.errors import KVAgentError
from kvagent.messages import Role
from kvagent.registration import Registration
from kvagent.vllm import geometry as geo
from kvagent.vllm.boundary import WORKER, LostWorker, abandon, contained
from kvagent.vllm.counters import CounterDeltas
from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.link import Link
from kvagent.vllm.metadata import Metadata, WorkerMetadata
from kvagent.vllm.options import FAIL
from kvagent.vllm.plan import StepPlan
from kvagent.vllm.space import used_backends, with_resolved
from kvagent.vllm.worker.memory import Memory, RetainedMemory, memory, release_fenced, retain
from kvagent.vllm.worker.side import NO_RESULTS, WorkerSide, joined
from kvagent.vllm.worker.sync import Sync, make_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvagent.vllm.boundary import Errors
    from kvagent.vllm.options import Options
    from kvagent.vllm.start import Start
    from kvagent.vllm.worker.guest import WorkerGuest
    from kvagent.vllm.worker.side import Results


log = logging.getLogger("vllm.kvagent")


@contained(WORKER)
class WorkerCalls:
    """A part of KVAgentConnector. An error in a call of vLLM's is contained (boundary)."""

    _vllm_config: Any
    _config: Any
    _options: Options
    _uncached: str
    _identity: tuple[tuple[str, str], ...]
    _ranks: geo.Ranks
    _replicas: int
    _start: Start
    _worker: WorkerSide | None = None
    _lost: LostWorker | None = None
    """Takes the place of that after too many errors."""
    _sync: Sync | None = None
    _memory: Memory | None = None
    _guests: Sequence[WorkerGuest] = ()
    _kv_caches: Mapping[str, Any] = {}
    _bad_blocks: set[int] = set()  # noqa: RUF012  replaced, never changed
    _connector_metadata: Any
    _deltas: Sequence[CounterDeltas] = ()
    errors: Errors
    _given_up: Results | None = None
    """The results of jobs that were given up after an error."""
    _generation: str

    def _common(self) -> dict[str, Any]:
        """Return what all registrations of the engine have in common."""
        raise NotImplementedError

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
        self._sync = self._sync or make_sync(None)
        link = Link(self._options.socket_dir, owner, None)
        if self._worker is None:
            per_block = geo.fails_by_block(self._config)
            self._worker = WorkerSide(link, self._sync.words, per_block=per_block, clock=self._sync.clock)
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
        self._given_up = joined(self._given_up, abandon(worker, plan))
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
        self._worker, self._lost = None, LostWorker(worker, plan, reason)
        if not free:
            self._retain(worker, lambda: False)
            self._sync = None
        self._close_memory()
        with contextlib.suppress(Exception):
            self._close_guests()

    def _make_link(self) -> Link:
        budget, pool = self._options.cpu_bytes_to_use_per_rank, self._options.pool
        return Link(self._options.socket_dir, f"rank {self._rank}", self._registration_of_worker, budget, pool)

    def _register(self, kv_caches: dict[str, Any]) -> None:
        self._kv_caches = kv_caches
        caches, sync = self._share(kv_caches)
        self._identity = with_resolved(self._identity, used_backends(self._vllm_config, self._config, self._kv_caches))
        link = self._make_link()
        if self._worker is None:
            self._guests = self._start.worker(caches, self._rank, self._registration_of_node, lambda: self._identity)
            per_block = geo.fails_by_block(self._config)
            self._worker = WorkerSide(
                link, sync.words, per_block=per_block, clock=sync.clock,
                generation=self._generation,
                identity=() if self._start.part.index else self._identity, guests=self._guests,
            )  # fmt: skip
            self._deltas = [CounterDeltas(one, "worker_") for one in (self._worker.counts, self.errors.counts)]
        else:
            self._worker.rejoin(link)
        link.wait(self._options.start_wait_ms / 1e3)

    def _share(self, kv_caches: dict[str, Any]) -> tuple[Memory, Sync]:
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
            self._sync = self._sync or make_sync(self._memory.device)
        except (KVAgentError, OSError, RuntimeError) as error:
            raise Unsupported(f"the agent cannot be given the KV caches: {error}") from error
        return self._memory, self._sync

    def unregister_kv_caches(self) -> None:
        """Withdraw the KV caches from the agent, before the engine sleeps."""
        worker = self._part
        if worker.leave():
            self._close_memory()
            return
        self._retain(worker, worker.fence())

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
            self._lost.begin(plan)
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
        results = self._take_results()
        if results is NO_RESULTS:  # a new object: vLLM modifies its sets
            return base.KVConnectorTransferResults()
        return base.KVConnectorTransferResults(finished_recving=results.received, failed_recving=results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that failed to load, of the requests in the last results."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Return this worker's report."""
        report = self._reporter.report() if self._reporter is not None else None
        return None if report is None else WorkerMetadata(report)

    def _plans_idle(self) -> bool:
        return _plan(self._connector_metadata).idle

    def _registration_of_node(self) -> Registration:
        return Registration(role=Role.SCHEDULER, **self._common())

    def _close_guests(self) -> None:
        for guest in self._guests:
            guest.close()
        self._guests = ()

    def _leave_agent(self) -> None:
        worker, self._worker = self._worker, None
        self._close_guests()
        if worker is not None and not worker.leave():
            self._retain(worker, lambda: False)
            self._sync = None
        self._close_memory()

    def _leave_worker(self) -> None:
        self._leave_agent()
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def _retain(self, worker: WorkerSide, fenced: Callable[[], bool]) -> None:
        """Retain what the agent can access of this worker: the KV caches, their exports and the
        words.
        """
        memory, self._memory = self._memory, None
        close = memory.close if memory is not None else lambda: None
        retain(RetainedMemory(f"rank {self._rank}", worker, (dict(self._kv_caches), memory, self._sync), close, fenced))

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

    @property
    def _reporter(self) -> WorkerSide | LostWorker | None:
        return self._lost or self._worker

    def _take_results(self) -> Results:
        results = self._reporter.results() if self._reporter is not None else NO_RESULTS
        if self._given_up is not None:
            results, self._given_up = joined(self._given_up, results), None
        if results.bad_blocks:
            self._bad_blocks = self._bad_blocks | results.bad_blocks
        return results

    def _registration_of_worker(self) -> Registration:
        assert self._memory is not None
        assert self._sync is not None
        words = self._sync.words
        return Registration(
            role=Role.WORKER, rank=self._rank - self._start.part.ranks[0],
            shard=self._start.part.shard(self._rank, self._replicas), sync=words.sync(0),
            regions=[(words.memory.region(0), words.memory.fd), *self._memory.regions],
            segments=self._memory.segments, cells=self._memory.cells, **self._common(),
        )  # fmt: skip


def _plan(metadata: Any) -> StepPlan:
    return metadata.plan if isinstance(metadata, Metadata) else StepPlan()
