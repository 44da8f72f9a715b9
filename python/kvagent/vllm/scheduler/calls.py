"""The connector's methods that vLLM's scheduler calls."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from kvagent.vllm.boundary import SCHEDULER, RetiredScheduler, Unloaded, contained, of_all, retire
from kvagent.vllm.counters import CounterDeltas
from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.metadata import Metadata, WorkerMetadata
from kvagent.vllm.options import FAIL
from kvagent.vllm.scheduler.saves import WorkerRevocation
from kvagent.vllm.space import as_worker
from kvagent.vllm.uncached import MAX_REASON, Notice, notice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.vllm.boundary import Errors
    from kvagent.vllm.geometry import Ranks
    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import WorkerInfo
    from kvagent.vllm.scheduler.side import SchedulerSide
    from kvagent.vllm.start import Start

log = logging.getLogger("vllm.kvagent")


@contained(SCHEDULER)
class SchedulerCalls:
    """A part of KVAgentConnector. An error in a call of vLLM's is contained (boundary)."""

    _scheduler: SchedulerSide | None = None
    """There once vLLM has made its KV cache manager."""
    _make_side: Callable[[Any], SchedulerSide] | None = None
    _retired: RetiredScheduler | None = None
    """Takes the place of that in an engine that is not served."""
    _revocation: WorkerRevocation | None = None
    _workers: tuple[WorkerInfo, ...] = ()
    _options: Options
    _ranks: Ranks
    _start: Start
    _identity: tuple[tuple[str, str], ...]
    _uncached: str = ""
    """Why the engine is served without the agent; empty if it is not."""
    errors: Errors
    _deltas: Sequence[CounterDeltas] = ()
    unloaded: Unloaded
    _notice: Notice | None = None
    _vllm_config: Any

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take vLLM's block tables and block pool."""
        if self._make_side is None:
            return
        side = self._make_side(kv_cache_manager)
        side.failed = partial(of_all, self)
        self._scheduler = side
        self._deltas = [
            CounterDeltas(side.counts), CounterDeltas(side.saves.counts, "saves_"), CounterDeltas(self.errors.counts),
        ]  # fmt: skip

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
        (worker.sync).
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
        self._side.use_revocation(self._revocation.revoke)
