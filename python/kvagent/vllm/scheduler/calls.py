"""The calls of vLLM's scheduler."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvagent.vllm.metadata import Metadata, WorkerMetadata
from kvagent.vllm.scheduler.saves import WorkerRevocation
from kvagent.vllm.space import with_resolved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.vllm.geometry import Ranks
    from kvagent.vllm.plan import WorkerInfo
    from kvagent.vllm.scheduler.side import SchedulerSide
    from kvagent.vllm.scheduler.weight_changes import LiveWeights

log = logging.getLogger("kvagent.vllm")


class SchedulerCalls:
    """A part of KVAgentConnector."""

    _scheduler: SchedulerSide | None = None
    _revocation: WorkerRevocation | None = None
    _workers: tuple[WorkerInfo, ...] = ()
    _ranks: Ranks
    _identity: tuple[tuple[str, str], ...]
    _live: LiveWeights | None = None
    """Of an engine whose model lies in the process of the program that uses it."""

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Takes vLLM's block tables and block pool."""
        self._kv_cache_manager = kv_cache_manager
        self._side.bind(kv_cache_manager.block_pool, kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Takes vLLM's block pool, all that 0.29 gives."""
        if getattr(self, "_kv_cache_manager", None) is None:
            self._side.bind(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Takes what other connectors' workers said at the start: MultiConnector gives it to all. Ours report."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """The same, of all pipeline stages."""

    def on_new_request(self, request: Any) -> None:
        """Tells the agent what will be asked for."""
        self._side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much of a prompt the agent has beyond what the engine has."""
        return self._side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request was let in."""
        self._side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """The plan of a step."""
        return Metadata(self._side.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes what the workers report."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkerMetadata):
            self._side.report(meta.report)
            if meta.report.workers:
                self._add_workers(meta.report.workers)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """A request is over. Its blocks need not be kept: what is being saved is pinned."""
        status = getattr(request.status, "name", "")
        self._side.finished(request, normally=status in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"))
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, for models with several KV cache groups."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to go on stepping without requests, so that pins come back (see patience)."""
        return self._side.pending()

    def reset_cache(self) -> bool | None:
        """Nothing that this engine stored until now is found by it again; after a plain reset, by nobody.

        That holds also where the agent did not answer, so it is no failure: vLLM would not go to sleep, or not pause.
        """
        if self._live is not None:
            self._live.changed()  # what is in place now is what the reset is about
        self._side.reset()
        return True

    def before_request(self) -> None:
        """vLLM's engine core is about to take a request."""
        if self._live is not None and self._side.idle():
            self.look_at_weights()

    def look_at_weights(self) -> None:
        """Looks whether the program in whose process the model lies has written to it."""
        if self._live is not None and self._live.changed():
            self._side.before_weights_call("a write to the model")

    def before_weights_call(self, call: str) -> None:
        """vLLM's engine core is about to make a call that may change the weights (weight_calls)."""
        if self._scheduler is not None:
            self._scheduler.before_weights_call(call)

    def weights_named(self, version: str) -> None:
        """vLLM's engine core was told the version of its weights."""
        if self._live is not None:
            self._live.changed()  # the name is that of what is in place now
        if self._scheduler is not None:
            self._scheduler.weights_named(version)

    def _leave_scheduler(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
        if self._revocation is not None:
            self._revocation.close()
            self._revocation = None

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a worker's connector, or one that was shut down"
        return self._scheduler

    def _add_workers(self, workers: Sequence[WorkerInfo]) -> None:
        """Workers reported for the first time."""
        for one in workers:
            if one.resolved and one.resolved != dict(self._identity)["resolved"]:
                log.info("the workers use the attention backends %s: registering anew", one.resolved)
                self._identity = with_resolved(self._identity, one.resolved)
                self._side.reregister()
        self._workers = (*self._workers, *workers)
        if len(self._workers) < self._ranks.world:
            return
        try:
            self._revocation = WorkerRevocation(self._workers)
        except OSError as error:
            log.warning("the workers' words cannot be reached (%s): reset_prefix_cache waits for saves", error)
            return
        self._side.use_revocation(self._revocation.revoke)
