"""``KVAgentTier``: the tier as vLLM's tiering manager sees it.

All its methods run in the scheduler's process under the manager's lock. None of them speaks with
the agent or copies; they exchange orders and results with the tier's thread (courier). A look-up is
answered ``RETRY`` once at least, and by the next step if the agent is quick.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from itertools import groupby
from queue import Empty
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingManager,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvagent.vllm.boundary import Call, Errors, contained
from kvagent.vllm.counters import CounterDeltas, count, texts
from kvagent.vllm.geometry import check
from kvagent.vllm.link import start_agent
from kvagent.vllm.space import unobserved as unobserved_changes
from kvagent.vllm.tier import events, identity
from kvagent.vllm.tier.construction import under_construction
from kvagent.vllm.tier.courier import Courier
from kvagent.vllm.tier.jobs import Rows
from kvagent.vllm.tier.options import parse
from kvagent.vllm.tier.questions import Answered, Ask, Finished, Load, Store, group_of, hash_of, kind_of
from kvagent.vllm.weight_changes import Generations, watch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvagent.vllm.tier.events import TierEvents
    from kvagent.vllm.tier.questions import Key

MAX_KEYS = 4096  # of one question
MAX_VAIN = 8  # answers in a row by which a request finds nothing, before all that it asked for counts as missing
MARGIN_S = 1.0  # beyond the bounds of the tier's thread, before a look-up counts as unanswered here too
FAILED_S = 10.0  # for which a key that did not arrive counts as not stored
MAX_FAILED = 65_536  # of these keys; with more, all are forgotten
FENCED = hasattr(OffloadingManager, "on_reset_flushed")
"""Whether vLLM itself waits, after a reset, for the GPU's copies to and from freed rows before it
fills them from a tier; from 0.33 on.
"""

PREFIX = "vllm:kvagent_tier_"  # of metrics
CONNECTED = "connected", "Whether the tier has an agent that answers."

log = logging.getLogger("vllm.kvagent")


@dataclass
class TierCounts:
    """What the tier counts, in chunks unless it says blocks."""

    errors: int = count("Errors of the tier's own in vLLM's calls.")
    lookups: int = count("Chunks that were asked for.")
    hits: int = count("Chunks that were stored.")
    unanswered: int = count("Chunks for which the agent's answer did not come in time.")
    loaded: int = count("Chunks that arrived and verified.")
    loads_failed: int = count("Chunks that did not arrive, or did not verify.")
    stored: int = count("Chunks that the agent stored, or had already.")
    stores_failed: int = count("Chunks that the agent did not store.")
    events_stored: int = count("Blocks of vLLM of which KV events said that the agent holds them.")
    events_removed: int = count("Blocks of vLLM of which KV events said that the agent no longer holds them.")
    events_unsaid: int = count("Chunks whose tokens the agent was not told, because it did not read for too long.")


HELP = texts(TierCounts)


@dataclass(slots=True)
class Asked:
    """What one request has asked."""

    verdicts: dict[Key, bool | None] = field(default_factory=dict)
    """Whether a chunk is stored; None until the answer comes."""
    fresh: list[Key] = field(default_factory=list)
    """Asked since the last step's end."""
    since: float = 0.0
    """When the oldest open question was sent."""
    vain: int = 0
    """Answers in a row by which nothing is stored: each settles one key of a window's look-up."""
    tails: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """By group, the end and the hash of the last chunk that was saved."""


ANSWERS: dict[str, Any] = {"lookup": LookupResult.MISS, "get_finished_jobs": (), "has_pending_work": False}
MOVES = ("drain_jobs", "before_weights_call", "weights_named", "before_reset")
CONTAINED = (
    *ANSWERS, *MOVES, "on_schedule_end", "on_request_finished", "submit_store", "submit_load", "shutdown", "get_stats",
)  # fmt: skip


class KVAgentTier(SecondaryTierManager):
    """A secondary tier whose chunks are in the node's agent (docs/vllm/tier.md)."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None,
        **config: Any,
    ) -> None:  # fmt: skip
        check(vllm.__version__)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._options = parse(config)
        self._errors, self._retired = Errors(), False
        self._requests: dict[str, Asked] = {}
        self._jobs: dict[int, Store | Load] = {}
        self._finished: list[Finished] = []
        self._failed: dict[Key, float] = {}  # keys that did not arrive, and until when they count as not stored
        self._serial = 1
        self._held_steps = 0  # for which look-ups wait after a reset
        self._counts = TierCounts()
        self._grown = CounterDeltas(self._counts)
        self._connected = False
        self._courier: Courier | None = None
        self.events: TierEvents | None = None
        """What it publishes of its agent, if anything."""
        self._patience_s = (self._options.lookup_age_ms + self._options.tier_wait_ms) / 1e3 + MARGIN_S
        self._generations = self._start(offloading_spec, primary_kv_view)

    def _start(self, spec: Any, view: memoryview) -> Generations:
        """Join the agent, unless this engine cannot be served."""
        construction, in_process = under_construction(), False
        config = spec.config
        mmap = getattr(spec, "_scheduler_mmap", None)
        unobserved = [] if construction is None else unobserved_changes(construction.vllm_config, self._options)
        rows = Rows(view, getattr(mmap, "fd", None))
        if reason := identity.refusal(construction, config, rows.bytes, rows.count):
            rows.close()
            log.warning("tier: it stores and finds nothing: %s", reason)
            return Generations("", self._options)
        if construction is not None:
            construction.listeners.append(self)
            unwatched, in_process = watch(self._options)
            unobserved += unwatched
        space = identity.space(construction, config, self._options, rows.bytes, vllm.__version__, unobserved)
        identity.explain(space)
        start_agent(self._options.socket_dir, self._options.pool)
        self._courier = Courier(self._options, rows, space, str(config.engine_id))
        generations = Generations(space.generation, self._options, unobserved=bool(unobserved), in_process=in_process)
        if construction is not None:
            self.events = events.of_engine(
                construction, config, self._options, space, rows.count, generations, self._counts
            )
        return generations

    # ---- look-ups

    def on_new_request(self, req_context: Any) -> Any:  # noqa: ARG002
        """Return that chunks are offloaded as they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: Key, req_context: Any) -> Any:
        """Return whether a chunk is stored; RETRY until it is known, for a bounded time."""
        courier = self._courier
        if courier is None or self._retired:
            return LookupResult.MISS
        if not courier.results.empty():
            self._collect(courier)
        if not courier.loading:
            return LookupResult.MISS
        if self._held_steps:
            return LookupResult.RETRY
        asked = self._requests.get(req_context.req_id)
        if asked is None:
            asked = self._requests[req_context.req_id] = Asked()
        verdict = asked.verdicts.get(key, self)
        if verdict is self:  # it asks for the first time
            if self._failed and self._failed.get(key, 0.0) > time.monotonic():
                return LookupResult.MISS
            asked.verdicts[key] = None
            asked.fresh.append(key)
            return LookupResult.RETRY
        if verdict is None:
            late = asked.since and time.monotonic() > asked.since + self._patience_s
            return LookupResult.MISS if late else LookupResult.RETRY
        return LookupResult.HIT if verdict else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002
        """Send the questions of the step: one for each request and group."""
        self._held_steps = max(0, self._held_steps - 1)
        if self._courier is None:
            return
        for request, asked in self._requests.items():
            if not asked.fresh:
                continue
            asked.since = time.monotonic()
            self._counts.lookups += len(asked.fresh)
            keys = sorted(asked.fresh, key=kind_of)  # stable: within a group in the order of asking
            for _, some in groupby(keys, kind_of):
                alike = tuple(some)
                for start in range(0, len(alike), MAX_KEYS):
                    self._courier.post(Ask(request, self._serial, alike[start : start + MAX_KEYS]))
            asked.fresh = []

    def on_request_finished(self, req_context: Any) -> None:
        """Drop what a request has asked."""
        asked = self._requests.pop(req_context.req_id, None)
        if self.events is not None:
            self.events.end(req_context.req_id)
        if asked is not None and asked.verdicts and self._courier is not None:
            self._courier.forget(req_context.req_id)

    def _answered(self, answered: Answered) -> None:
        ask = answered.ask
        asked = self._requests.get(ask.request)
        if asked is None or ask.serial != self._serial:
            return
        self._counts.hits += answered.found
        self._counts.unanswered += answered.known if answered.late else 0
        asked.vain = 0 if answered.found else asked.vain + 1
        for i, key in enumerate(ask.keys):
            if i >= answered.known and asked.vain < MAX_VAIN:
                asked.verdicts.pop(key, None)  # beyond the first that is missing: asked again if it matters
            elif asked.verdicts.get(key, True) is None:
                asked.verdicts[key] = i < answered.found

    # ---- jobs

    def submit_store(self, job_metadata: Any) -> None:
        """Have rows saved."""
        keys, rows = _chunks(job_metadata)
        self._submit(Store(int(job_metadata.job_id), keys, rows, self._parents(keys, job_metadata.req_context)))
        self._say(keys, job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Have chunks loaded into rows."""
        keys, rows = _chunks(job_metadata)
        self._submit(Load(int(job_metadata.job_id), job_metadata.req_context.req_id, keys, rows))
        self._say(keys, job_metadata)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that have ended since the last call."""
        if self._courier is not None:
            self._collect(self._courier)
        ended = []
        while self._finished:
            one = self._finished.pop()
            try:
                ended.append(self._result(one))
            except Exception as error:  # noqa: BLE001
                self.fail("get_finished_jobs", error)
                self._jobs.pop(one.job, None)
                ended.append(JobResult(job_id=one.job, success=False))
        return ended

    def has_pending_work(self) -> bool:
        """Return whether results are to come, or KV events are to be published."""
        return bool(self._jobs) or (self.events is not None and self.events.pending())

    def drain_jobs(self) -> None:
        """End all jobs before a reset of vLLM's cache, which may mean other weights."""
        if self._courier is None:
            return
        self._courier.drain(self._options.drain_wait_ms / 1e3)
        self._collect(self._courier)
        if self.events is not None:
            self.events.drained()
        # Copies under way at a reset end within some steps: the first plan after it has the
        # workers wait for them, and vLLM plans no further ahead than it has steps in flight, one
        # for each stage, or two.
        self._held_steps = 0 if FENCED else max(2, int(self._offloading_spec.config.parallel.pp_size)) + 2
        if self._generations.after_reset():
            self._move()

    def shutdown(self) -> None:
        """Leave the agent; vLLM's memory is not referred to any more."""
        self._leave()
        if self.events is not None:
            self.events.close()
            self.events = None
        self._requests.clear()

    def _leave(self) -> None:
        courier, self._courier = self._courier, None
        if courier is not None:
            courier.drain(self._options.drain_wait_ms / 1e3)
            courier.close()

    def _say(self, keys: tuple[Key, ...], job: Any) -> None:
        if self.events is not None:
            self.events.say(job.req_context.req_id, keys)

    def _submit(self, order: Store | Load) -> None:
        if self._courier is None:
            self._finished.append(Finished(order.job, (), 0.0))
        else:
            self._courier.post(order)
        self._jobs[order.job] = order

    def _collect(self, courier: Courier) -> None:
        """Take the results of the tier's thread. Without the thread all jobs have failed."""
        alive = courier.alive  # before the last results are taken
        while True:
            try:
                result = courier.results.get_nowait()
            except Empty:
                break
            if isinstance(result, Answered):
                self._answered(result)
            else:
                self._finished.append(result)
        if not alive:
            self._end_all()

    def _end_all(self) -> None:
        """Report as failed what nothing else will report."""
        known = {one.job for one in self._finished}
        self._finished += [Finished(job, (), 0.0) for job in self._jobs if job not in known]

    def _result(self, finished: Finished) -> Any:
        order = self._jobs.pop(finished.job)
        count, done = len(order.keys), len(finished.done)
        if isinstance(order, Store):
            self._counts.stored += done
            self._counts.stores_failed += count - done
        else:
            self._counts.loaded += done
            self._counts.loads_failed += count - done
            missing = {*order.keys} - {*finished.done}
            if len(self._failed) + len(missing) > MAX_FAILED:
                self._failed.clear()
            self._failed |= dict.fromkeys(missing, time.monotonic() + FAILED_S)
            if missing and (asked := self._requests.get(order.request)) is not None:
                asked.verdicts |= dict.fromkeys(missing, False)
        return JobResult(
            job_id=finished.job,
            success=done == count,
            successful_keys=finished.done if isinstance(order, Load) and 0 < done < count else None,
            transfer_time=finished.seconds,
            transfer_bytes=done * self._primary_kv_view.strides[0],
        )

    def _parents(self, keys: tuple[Key, ...], req_context: Any) -> tuple[bytes, ...]:
        """Return the hash before each chunk where it is known, for the agent's eviction."""
        config, request = self._offloading_spec.config, self._requests.get(req_context.req_id)
        tails = request.tails if request is not None else {}
        tokens = {int(one.group_id): one.tokens_per_block * config.cache.blocks_per_chunk for one in config.groups}
        parents = []
        for key in keys:
            group, end = group_of(key), req_context.get_offload_key_position(key)
            last = tails.get(group)
            follows = last is not None and (end is None or end == last[0] + tokens.get(group, 0))
            parents.append(last[1] if last is not None and follows else b"")
            tails[group] = (end or 0, hash_of(key))
        return tuple(parents)

    # ---- weights

    def before_weights_call(self, call: str) -> None:
        """Handle a call of vLLM's engine core that may change the weights, before it is made."""
        if self._courier is not None and self._generations.after_call(call):
            self._move()

    def weights_named(self, version: str) -> None:
        """Handle the version of the weights that was passed to vLLM's engine core. They are private
        all the same: chunks of others may still be in vLLM's region, and running requests hold KV
        of others.
        """
        self.before_weights_call(f"version {version}")

    def before_reset(self) -> None:
        """Handle a reset of vLLM's own cache, which may follow an untold change of the weights."""
        if self._generations.counts_resets:
            self.before_weights_call("reset_prefix_cache")

    def _move(self) -> None:
        """Continue in the space of the present weights. Nothing of the others counts."""
        self._serial += 1
        for asked in self._requests.values():
            asked.verdicts.clear()
            asked.fresh.clear()
            asked.tails.clear()
        if self._courier is not None:
            self._courier.move(self._generations.now)
        if self.events is not None:
            self.events.move()

    # ---- errors

    def fail(self, call: str, error: Exception, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Handle an error in a call. What a step asked is a miss in a while, and a job that came
        has failed unless it was begun. After too many, or where other weights may compute, nothing
        more is found.
        """
        reason = self._errors.note(call, error, "Its chunks are computed")
        self._counts.errors = self._errors.counts.errors
        if (call in MOVES or self._errors.too_many) and not self._retired:
            self._retired = True
            log.warning("tier: it finds nothing any more: %s", reason)
            try:
                self._leave()
                self._end_all()
            except Exception as left:  # noqa: BLE001  its thread may still copy into rows, so its jobs do not end
                self._errors.note("leave", left, "Jobs in flight are not ended")
        if call == "on_schedule_end":  # the questions may not have been sent
            for asked in self._requests.values():
                if asked.fresh:
                    asked.since, asked.fresh = time.monotonic(), []
        elif call in ("submit_store", "submit_load") and (job := int(args[0].job_id)) not in self._jobs:
            self._jobs[job] = Store(job, (b"",), (0,), (b"",))
            self._finished.append(Finished(job, (), 0.0))

    # ---- metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        """Return the definitions of what get_stats counts."""
        counters = {PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in HELP.items()}
        return counters | {PREFIX + CONNECTED[0]: OffloadingGaugeMetadata(documentation=CONNECTED[1])}

    def get_stats(self) -> Any:
        """Return what was counted since the last call, or None."""
        grown = self._grown.take()
        connected = self._courier is not None and self._courier.loading and self._courier.saving
        if not grown and connected == self._connected:
            return None
        stats = OffloadingConnectorStats()
        for name, value in grown.items():
            stats.increase_counter(PREFIX + name, value)
        stats.set_gauge(PREFIX + CONNECTED[0], int(connected))
        self._connected = connected
        return stats


contained({name: Call(KVAgentTier.fail, ANSWERS.get(name)) for name in CONTAINED})(KVAgentTier)


def _chunks(job: Any) -> tuple[tuple[Key, ...], tuple[int, ...]]:
    return tuple(bytes(key) for key in job.keys), tuple(int(row) for row in job.chunk_ids)
