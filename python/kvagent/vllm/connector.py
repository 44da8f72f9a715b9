"""The connector class: vLLM creates one object in the scheduler's process and one in each
worker's.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvagent.messages import Role
from kvagent.registration import Registration
from kvagent.vllm import geometry as geo
from kvagent.vllm.boundary import Call, Errors, RetiredScheduler, Unloaded, contained, of_little
from kvagent.vllm.geometry import Unsupported, check, hash_tokens, preferred_layout
from kvagent.vllm.link import Link, start_agent
from kvagent.vllm.metadata import PromMetrics, Stats
from kvagent.vllm.options import FAIL, Options, parse, saves, synonyms
from kvagent.vllm.scheduler.calls import SchedulerCalls
from kvagent.vllm.scheduler.side import SchedulerSide
from kvagent.vllm.space import identity, unknown_weights, unobserved
from kvagent.vllm.specs import canvas_refusal
from kvagent.vllm.start import of
from kvagent.vllm.uncached import warn
from kvagent.vllm.weight_changes import (
    PRIVATE,
    Generations,
    initial_generation,
    watch,
    with_generation,
)
from kvagent.vllm.worker.calls import WorkerCalls

if TYPE_CHECKING:
    from collections.abc import Callable

STATS_INTERVAL_S = 0.1  # minimum interval between two reports of counters to vLLM

log = logging.getLogger("vllm.kvagent")


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
        self._ranks = self._start.ranks(whole)
        self._identity = identity(
            vllm_config, kv_cache_config, self._options.tenant, self._ranks, vllm.__version__,
            self._start.distribution(),
        )  # fmt: skip
        reasons = unobserved(vllm_config, self._options)
        start_agent(self._options.socket_dir, self._options.pool)
        in_process = False
        if role == KVConnectorRole.SCHEDULER and not self._options.weights_fixed:
            unwatched, in_process = watch()
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
        if now < self._next_stats and not self._idle():
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

    def _idle(self) -> bool:
        return self._plans_idle() if self._scheduler is None else self._scheduler.idle()

    def _maker(self, kv_role: str, generations: Generations) -> Callable[[Any], SchedulerSide]:
        """Return what makes the scheduler's side, with vLLM's KV cache manager."""

        def registration() -> Registration:
            self._generation = generations.now
            return Registration(role=Role.SCHEDULER, **self._common())

        link = Link(self._options.socket_dir, "scheduler", registration, pool=self._options.pool)
        may_save = saves(kv_role, self._options)
        joined = self._start.scheduler(self._geometry, self._ranks.world, saves=may_save)
        link.attached = joined.attached
        link.wait(self._options.start_wait_ms / 1e3)
        return partial(
            SchedulerSide, self._options, self._geometry, self._ranks.world, link, saves=may_save,
            generations=generations, joined=joined,
        )  # fmt: skip

    def _common(self) -> dict[str, Any]:
        part, generation = self._start.part, self._generation if self._worker is None else self._worker.generation
        ranks = part.of_ranks(self._ranks, self._replicas)
        return {
            "instance": str(self._vllm_config.kv_transfer_config.engine_id)[:128],
            "identity": part.of_identity(with_generation(self._identity, generation)),
            "groups": self._geometry.groups,
            "hash_tokens": self._geometry.hash_tokens,
            "world": ranks.world,
            "shards": ranks.shards,
        }


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
