"""The class that vLLM makes, one object in the scheduler's process and one in every worker's."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvagent.messages import Role
from kvagent.registration import Registration
from kvagent.shm import SyncWords
from kvagent.vllm import geometry as geo
from kvagent.vllm.link import Link
from kvagent.vllm.memory import Memory, memory
from kvagent.vllm.options import Options, loads, parse, saves
from kvagent.vllm.plan import Report, StepPlan, WorkerWords
from kvagent.vllm.saves import REVOKES
from kvagent.vllm.scheduler import SchedulerSide
from kvagent.vllm.space import identity
from kvagent.vllm.stats import Stats, make_prom
from kvagent.vllm.words import OthersWords
from kvagent.vllm.worker import EVENTS, WorkerSide

if TYPE_CHECKING:
    from collections.abc import Mapping

OLDEST, NEWEST = (0, 29), (0, 33)  # versions of vLLM that this connector is tested with

log = logging.getLogger("kvagent.vllm")


@dataclass
class Metadata(KVConnectorMetadata):
    """A step's plan on its way to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers' reports on their way to the scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both reports as one."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.join(other.report))


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What the scheduler learns of a worker at the start."""

    words: WorkerWords


class KVAgentConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves KV blocks to the node's agent and loads them from it. See docs/VLLM.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options: Options = parse(transfer.kv_connector_extra_config)
        self._config = kv_cache_config
        _check_version(vllm.__version__)
        if role == KVConnectorRole.SCHEDULER and getattr(transfer, "kv_load_failure_policy", "") != "recompute":
            log.warning(
                'kv_load_failure_policy is not "recompute": a request whose blocks do not come fails instead of being '
                'computed. Add "kv_load_failure_policy": "recompute" to --kv-transfer-config.'
            )
        self._geometry = geo.geometry(kv_cache_config, _hash_tokens(vllm_config, kv_cache_config))
        self._ranks, self._replicas = geo.ranks(vllm_config.parallel_config, kv_cache_config)
        self._identity = identity(vllm_config, kv_cache_config, self._options.tenant, self._ranks, vllm.__version__)
        self._whole_failures = hasattr(base, "KVConnectorTransferResults")
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._words: SyncWords | None = None
        self._memory: Memory | None = None
        self._kv_caches: Mapping[str, Any] = {}
        self._others: OthersWords | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler(transfer.kv_role)

    # What vLLM asks of the class.

    @property
    def requires_kv_delivery(self) -> bool:
        """A preempted request keeps its output: nobody waits for its blocks."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The layout to wish for: block by block over all layers, so that copies are large."""
        wish = parse(vllm_config.kv_transfer_config.kv_connector_extra_config).layout
        if wish == "auto":
            device = getattr(getattr(vllm_config, "device_config", None), "device_type", "")
            return "BLHNC" if device == "cuda" else None
        return None if wish == "none" else wish

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Stats from what came over a process boundary."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        """Counters of /metrics."""
        return make_prom(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Takes vLLM's block tables and block pool."""
        self._kv_cache_manager = kv_cache_manager
        self._as_scheduler.bind(kv_cache_manager.block_pool, kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Takes vLLM's block pool, all that 0.29 gives."""
        if getattr(self, "_kv_cache_manager", None) is None:
            self._as_scheduler.bind(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Takes what the workers said at the start."""
        self._meet(list(metadata.values()))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Takes what the workers of all pipeline stages said at the start."""
        self._meet(list(metadata.values()))

    def on_new_request(self, request: Any) -> None:
        """Tells the agent what will be asked for."""
        self._as_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much of a prompt the agent has beyond what the engine has."""
        return self._as_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request was let in."""
        self._as_scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The plan of a step."""
        return Metadata(self._as_scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes what the workers report."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkerMetadata):
            self._as_scheduler.report(meta.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """A request is over. Its blocks need not be kept: what is being saved is pinned."""
        status = getattr(request.status, "name", "")
        self._as_scheduler.finished(request, normally=status in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"))
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, for models with several KV cache groups."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to go on stepping without requests, so that pins come back."""
        return self._as_scheduler.pending()

    def reset_cache(self) -> bool | None:
        """Nothing that was stored until now is found again, by this engine or another of the same space."""
        return self._as_scheduler.reset()

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Announces the KV caches to the agent; waits a little for one that is there."""
        self._kv_caches = kv_caches
        self._words = self._words or SyncWords(EVENTS, REVOKES)
        names = [list(group.layer_names) for group in self._config.kv_cache_groups]
        self._memory = memory(kv_caches, names, self._config.num_blocks, self._options.cpu_memory)
        link = Link(self._options.socket_dir, f"rank {self._rank}", self._registration_of_worker)
        if self._worker is None:
            per_block = len(self._config.kv_cache_groups) == 1
            self._worker = WorkerSide(link, self._words, per_block=per_block, whole_failures=self._whole_failures)
        else:
            self._worker.rejoin(link)
        link.wait(self._options.start_wait_ms / 1e3)

    def unregister_kv_caches(self) -> None:
        """Takes the KV caches back, before the engine sleeps."""
        if self._worker is not None and not self._worker.leave():
            log.error("rank %d: the agent did not let go of the KV caches in time", self._rank)

    def restore_kv_caches(self) -> None:
        """Announces the KV caches anew, after the engine slept."""
        if self._kv_caches:
            self.register_kv_caches(dict(self._kv_caches))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Where the scheduler finds this worker's revocation words."""
        if self._words is None:
            return None
        path = f"/proc/{os.getpid()}/fd/{self._words.memory.fd}"
        return Handshake(WorkerWords(path, self._words.memory.size, self._words.revoke_off, self._words.revokes))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begins a step: the first that vLLM says of it, before its kernels are launched."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(self._plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Hands in the loads; they run between steps."""
        if self._worker is not None:
            self._worker.start(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """Ends the step and hands in the saves. Does not wait."""
        if self._worker is not None:
            self._worker.end(self._plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Requests whose load is over; what vLLM 0.29 calls."""
        return None, self._take_results().received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        """Requests whose load is over, and those whose load failed as a whole."""
        results = self._take_results()
        return base.KVConnectorTransferResults(
            finished_sending=set(), finished_recving=results.received, failed_recving=results.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not come, of the requests that get_finished gave last."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This worker's report."""
        report = self._worker.report() if self._worker is not None else None
        return None if report is None else WorkerMetadata(report)

    def get_kv_connector_stats(self) -> Stats | None:
        """What this role counted since the last call."""
        counts = {}
        if self._worker is not None:
            counts = {f"worker_{f.name}": getattr(self._worker.counts, f.name) for f in fields(self._worker.counts)}
        if self._scheduler is not None:
            counts |= self._scheduler.counted()
        grown = {name: value - self._told.get(name, 0) for name, value in counts.items()}
        self._told = counts
        return Stats(data=grown) if any(grown.values()) else None

    # Both.

    def shutdown(self) -> None:
        """Leaves the agent."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
        if self._worker is not None:
            self._worker.leave()
            self._worker = None
        if self._others is not None:
            self._others.close()
            self._others = None

    _bad_blocks: set[int] = set()  # noqa: RUF012  replaced, never changed
    _told: dict[str, int] = {}  # noqa: RUF012  replaced, never changed

    @property
    def _as_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "a worker's connector, or one that was shut down"
        return self._scheduler

    @property
    def _plan(self) -> StepPlan:
        metadata = self._connector_metadata
        return metadata.plan if isinstance(metadata, Metadata) else StepPlan()

    @property
    def _rank(self) -> int:
        return int(self._vllm_config.parallel_config.rank) % self._ranks.world

    def _take_results(self) -> Any:
        if self._worker is None:
            return _NO_RESULTS
        results = self._worker.results()
        self._bad_blocks = self._bad_blocks | results.bad_blocks
        return results

    def _make_scheduler(self, kv_role: str) -> SchedulerSide:
        link = Link(self._options.socket_dir, "scheduler", self._registration_of_scheduler)
        side = SchedulerSide(
            self._options, self._geometry, self._ranks.world, link,
            saves=saves(kv_role, self._options), whole_failures=self._whole_failures,
            # 0.29 cannot be told that a load failed as a whole, and where there are several groups, nothing else.
            loads=loads(kv_role, self._options) and (self._whole_failures or len(self._geometry.groups) == 1),
        )  # fmt: skip
        link.wait(self._options.start_wait_ms / 1e3)
        return side

    def _registration_of_scheduler(self) -> Registration:
        return Registration(role=Role.SCHEDULER, **self._common())

    def _registration_of_worker(self) -> Registration:
        assert self._memory is not None
        assert self._words is not None
        words = (self._words.memory.region(0), self._words.memory.fd)
        tp = int(self._vllm_config.parallel_config.tensor_parallel_size)
        return Registration(
            role=Role.WORKER, rank=self._rank, shard=geo.shard(self._rank, tp, self._replicas),
            sync=self._words.sync(0), regions=[words, *self._memory.regions], segments=self._memory.segments,
            **self._common(),
        )  # fmt: skip

    def _common(self) -> dict[str, Any]:
        return {
            "instance": str(self._vllm_config.kv_transfer_config.engine_id)[:128],
            "identity": self._identity,
            "groups": self._geometry.groups,
            "hash_tokens": self._geometry.hash_tokens,
            "world": self._ranks.world,
            "shards": self._ranks.shards,
        }

    def _meet(self, handshakes: list[Any]) -> None:
        words = [one.words for one in handshakes if isinstance(one, Handshake)]
        if len(words) != self._ranks.world:
            return
        try:
            self._others = OthersWords(words)
        except OSError as error:
            log.warning("the workers' words cannot be reached (%s): reset_prefix_cache waits for saves", error)
            return
        self._as_scheduler.use_words(self._others.revoke)


class _NoResults:
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


_NO_RESULTS = _NoResults()


def _check_version(version: str) -> None:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers <= NEWEST:
        log.warning("vLLM %s: this connector is tested with %d.%d to %d.%d", version, *OLDEST, *NEWEST)
    missing = [
        name for name in ("bind_gpu_block_pool", "build_connector_worker_meta") if not hasattr(KVConnectorBase_V1, name)
    ]
    if missing:
        raise geo.Unsupported(f"vLLM {version}: its connectors have no {', '.join(missing)}; 0.29 or newer is needed")


def _hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Tokens of one block hash, as the scheduler makes them; None where it does not say (then the groups' greatest)."""
    told = getattr(kv_cache_config, "hash_block_size", None)
    if told is not None:
        return int(told)
    from vllm.v1.core import kv_cache_utils

    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    return int(resolve(kv_cache_config, vllm_config)[1]) if resolve is not None else None
