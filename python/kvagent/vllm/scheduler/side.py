"""The scheduler's side: what the agent has of a prompt, which blocks a step saves and loads, what
is pinned.

vLLM's scheduler calls it from one thread. It blocks only, and briefly, for the answers to look-ups
(lookups) and to resets. It uses only attributes of vLLM's objects and imports no vllm.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvagent.vllm.counters import Counts
from kvagent.vllm.events.publication import Publication, Published
from kvagent.vllm.events.tokens import Tokens, extra_of
from kvagent.vllm.keys.adapters import Adapters, unkey
from kvagent.vllm.keys.following import Followed, keyable
from kvagent.vllm.keys.media import Keyed, Media
from kvagent.vllm.link import LISTEN_STEPS
from kvagent.vllm.nodes.joint import JointSession
from kvagent.vllm.plan import StepPlan
from kvagent.vllm.scheduler.agent_session import NO_CHANGE, AgentSession, SessionChange
from kvagent.vllm.scheduler.keeps import Keeps
from kvagent.vllm.scheduler.lazy import watermark
from kvagent.vllm.scheduler.loads import Loads
from kvagent.vllm.scheduler.lookups import Promises, sources
from kvagent.vllm.scheduler.requests import Blocks, StaleRequests, Tables, Tracked
from kvagent.vllm.scheduler.save_plan import SaveSchedule, collect_saves
from kvagent.vllm.scheduler.saves import Saves
from kvagent.vllm.scheduler.states import States
from kvagent.vllm.scheduler.sync_loads import SyncLoads
from kvagent.vllm.scheduler.transfers import Transfers
from kvagent.vllm.scheduler.waits import LookupWaits
from kvagent.vllm.switches import Switches
from kvagent.vllm.transfer_names import wanted
from kvagent.vllm.weight_changes import LOADED, PRIVATE, Generations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.vllm.events.publication import EventsOptions
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.link import Link
    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import LoadedAdapter, Report
    from kvagent.vllm.scheduler.preemption import Preemption


class SchedulerSide:
    """The scheduler's side.

    ``bind`` precedes all calls except ``on_new_request`` and ``matched``.
    """

    def __init__(
        self, options: Options, geometry: Geometry, world: int, link: Link, *, saves: bool,
        generations: Generations | None = None, media: Media | None = None, engine_id: str = "", tp_size: int = 1,
        preemption: Preemption | None = None, token_bytes: float = 0.0, step_tokens: int = 0, following: int = 0,
        events: EventsOptions | None = None, parts: int = 1,
    ) -> None:  # fmt: skip
        """``preemption``: steps may wait for loads. ``token_bytes``: what a rank has of a token.

        ``step_tokens``: the most tokens that a step computes. ``following``: how many tokens after
        a block its bytes depend on.

        ``events``: how KV events are made; None without them.

        ``parts``: the nodes that the engine is on.
        """
        self._was_reset = False  # vLLM reset its own cache, and no call has followed yet
        self.generations = generations or Generations(LOADED, options)
        self._workers_in_space = 0  # workers that have reported the current generation
        self._moved_at = -1  # the step after which the generation last changed
        self.counts = Counts()
        self._options = options
        self._geometry = geometry
        self._world = world
        self._may_save = saves
        self._may_load = True
        self._adapters = Adapters(world)
        self._following = following
        self._media = media or Media(options.media, geometry.hash_tokens)
        self._switches = Switches(self.counts, transfers=options.transfers)
        self._agent = AgentSession(link, options) if parts < 2 else JointSession(link, options, parts)
        self.waits = LookupWaits(options)
        self._sync_loads = SyncLoads(options, geometry, token_bytes, preemption, self.counts)
        self._promises = Promises(self._agent, geometry, options, self.counts, self.waits, self._sync_loads.asks)
        self._transfers = Transfers(self._agent, geometry, options, engine_id, self.counts)
        self._keeps = Keeps(self._agent, geometry, self.counts)
        self._publication = self._make_publication(events)
        self._tp_size = tp_size
        self._step_tokens = step_tokens
        self._tracked: dict[str, Tracked] = {}
        self._schedule = SaveSchedule()
        self._revokes: list[int] = []
        self._revoking = False  # the next plan revokes all saves; blocks that were free now might be reused in it
        self._steps = 0
        self._stopped = False  # the agent does not respond
        self._jobs = itertools.count(1)
        self.hit: tuple[str, dict[str, int]] = ("", {})
        """The request that was admitted with a load last, and where its tokens came from."""
        self.failed: Callable[[str, Exception], None] | None = None
        """What handles an error in a hook (boundary)."""
        self.tables = Tables()
        self.blocks: Blocks | None = None
        self.saves: Saves | None = None
        self.loads: Loads | None = None
        self._states: States | None = None
        self._stale_requests: StaleRequests | None = None

    def bind(self, manager: Any) -> None:
        """Take vLLM's KV cache manager, with its block pool."""
        pool = manager.block_pool
        if self.blocks is None:
            deliver = self._options.deliver_percent if self._options.transfers else 0.0
            self.blocks = Blocks(pool, self._options.pin_percent / 100, deliver / 100)
            self.saves = Saves(
                self._geometry, self._world, self.blocks, self.tables,
                watermark=watermark(self._options, self._geometry, self._step_tokens, pool.num_gpu_blocks),
                adapters=self._adapters, following=self._following,
            )  # fmt: skip
            self.loads = Loads(
                self._agent, self._geometry, self._options, self._world, self.blocks, self.counts, self.waits.loaded,
            )  # fmt: skip
            self._states = States(self._geometry, self.blocks) if self._geometry.states else None
            self._stale_requests = StaleRequests(
                self.blocks, self.tables, len(self._geometry.groups), partial_hits=self._geometry.partial_hits
            )
            self.blocks.around_reset(self._guarded(self._before_reset), self._guarded(self._after_reset))
            if self._publication is not None:
                self.saves.batch.tokens = self.loads.tokens = self._publication.tokens
        if self._publication is not None:
            self._publication.form.bind(manager)
        self.tables.bind(manager)

    def use_revocation(self, revoke: Callable[[int], None]) -> None:
        """Take the function that sets a revocation word in all workers at once."""
        if self.saves is not None:
            self.saves.revoke_now = revoke

    def on_new_request(self, request: Any) -> None:
        """Tell the agent which blocks a later look-up will ask for."""
        self._settle_reset()
        tracked = self._track(request)
        self._poll_agent()
        self._stopped = self._stopped and self._agent.pinging()  # it may have answered while no step ran
        if self._options.transfers and (params := getattr(request, "kv_transfer_params", None)):
            self._begin_transfer(tracked, params)
        lookups = self._agent.lookups
        if lookups is not None and self._usable(tracked):
            lookups.probe(tracked, self._own_tokens(tracked, request))

    def matched(self, request: Any, own: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``own`` will be loaded; None if not known yet."""
        self._settle_reset()
        tracked = self._track(request)
        tracked.own = own
        if self._following:
            tracked.found = own
        if not self._usable(tracked):
            if self._stopped:
                self._promises.give_up(tracked)
            return 0, False
        now = time.monotonic()
        tokens = self._promises.promise(tracked, own, now)
        tracked.sync = tokens is not None and self._sync_loads.takes(tracked, tokens, now)
        if tracked.sync and tokens and own + tokens == request.num_tokens:
            tokens -= self._geometry.align  # vLLM computes the last token again only after loads that it waits for
        return tokens, bool(tokens) and not tracked.sync

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Handle a request's admission, with ``external`` tokens to load or none."""
        self._settle_reset()
        tracked = self._track(request)
        if tracked.wanted is not None:
            request.kv_transfer_params["do_remote_prefill"] = False  # it is received once
        if tracked.admitted:  # reset_prefix_cache took its blocks between two steps
            self._lost_blocks(tracked)
        self._sync_loads.lost(tracked)
        if external > 0 and self.loads is not None:
            self._check_stale(tracked, blocks.blocks)
            job = next(self._jobs)
            if tracked.sync:
                self._sync_loads.begin(job, tracked, external)
            self.loads.plan(job, tracked, blocks.blocks, external, tracked.promised)
            peer = tracked.wanted.peer if tracked.wanted is not None else ""
            self.hit = (
                request.request_id,
                sources(tracked.promised, external, from_peer=peer not in ("", self._agent.peer)),
            )
            self._promises.take(tracked)  # its lease is the load's now
            return
        self._promises.forget(tracked)
        self._transfers.deliver(tracked)
        if not tracked.bypass and self._may_save:
            self._check_stale(tracked, blocks.blocks if blocks is not None else ())
            self._admit(tracked)

    def plan(self, output: Any) -> StepPlan:
        """Return the plan of the step that ``output`` describes."""
        if self._was_reset:
            self._settle_reset()  # it precedes this step
        self._steps += 1
        scheduled, preempted = output.num_scheduled_tokens, getattr(output, "preempted_req_ids", None) or ()
        total, agent = getattr(output, "total_num_scheduled_tokens", 0), self._agent
        waiting = self.waiting() or agent.awaited()
        woken = self._publication is not None and not scheduled
        if waiting or woken or agent.session is None or self._steps % LISTEN_STEPS == 0:
            self._poll_agent()
        if preempted and self._stale_requests is not None:
            self._stale_requests.mark_lost()
        for request in preempted:
            # A request that a reset preempted may be admitted again in the same step.
            self._preempted(request, again=request in scheduled)
        if self._stale_requests is not None:
            self._stale_requests.mark_blocks()
        now = time.monotonic()
        self.waits.step(scheduled, total, now)
        self._sync_loads.step(computes=bool(scheduled), now=now)
        plan = StepPlan(idle=not self._tracked or not scheduled, decoding=_decoding(output))
        if self._workers_in_space < self._world:
            plan.generation = self.generations.serial, self.generations.now
        if waiting and self.loads is not None:
            plan.loads, plan.cancels = self.loads.take()
        plan.revokes, self._revokes = self._revokes, []
        self._stopped = plan.stopped = waiting and (self.waiting() or agent.awaited()) and agent.stopped(now)
        if self.saves is not None:
            self._plan_saves(self.saves, plan, output, now, preempted=bool(preempted))
            if self._revoking:
                self._revoking = False
                plan.revokes += self.saves.revoke(offers=True)
                self.saves.clear_left()
            if self._keeps.waiting:
                self._keeps.settle(self.saves)
            if self._transfers.busy():
                self._transfers.settle(self.saves)
                plan.released = self._transfers.released()
        if agent.lookups is not None:
            probed, late = agent.lookups.begin_step(idle=not scheduled)
            self.counts.lookups_late += late
            if probed or late:
                self.waits.answered()
        plan.orders = agent.orders()
        return plan

    def report(self, report: Report) -> None:
        """Handle a report of the workers."""
        if report.news:
            self._agent.hear(report.news)
            self._poll_agent(listen=False)  # while look-ups and leases can still be given back
        if self.saves is None or self.loads is None:
            return
        now = time.monotonic()
        if report.moved:
            self._workers_moved(report.moved)
        if report.adapters:
            self._adapters_reported(report.adapters)
        if report.outcomes:
            self._agent.reported(now)
        for job in report.late:
            self.loads.late(job)
        for job, outcome in report.outcomes.items():
            if not self.saves.report(job, outcome) and (tracked := self.loads.report(job, outcome, now)):
                self._transfers.deliver(tracked)
        self.settle_sync(report, now)
        self._transfers.settle(self.saves)
        self._keeps.settle(self.saves)

    def settle_sync(self, report: Report, now: float) -> None:
        """Handle the end of loads that steps waited for."""
        for tracked, good in self._sync_loads.settle(report, self._world, now):
            if good:
                self._admit(tracked)
            else:
                self._lost_blocks(tracked)

    def take_events(self) -> Sequence[Any]:
        """Return vLLM's KV events of what the agent's memory holds, since the last call."""
        return () if self._publication is None else self._publication.take()

    def finished(self, request: Any, *, normally: bool) -> bool:
        """Handle a request's end; its blocks are free afterwards, except for pinned ones.

        Return whether vLLM has to keep them until a plan releases the request.
        """
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        tracked.over = True
        if not self._tracked:
            now = time.monotonic()
            self.waits.end_step(now)
            self._sync_loads.step(computes=False, now=now)
        self._schedule.remove(tracked)
        self._promises.forget(tracked)
        complete = self._sync_loads.ended(tracked, normally=normally)  # this may hash its blocks
        if self._stale_requests is not None:
            self._stale_requests.mark_blocks()
            self._stale_requests.remove(tracked)
        self._transfers.deliver(tracked)
        tokens = 0
        if tracked.load and not complete and self.loads is not None:
            self.loads.cancel(tracked)
        elif normally and self.saves is not None and self._saving(tracked):
            # The last token was not computed, and async scheduling may have an extra step in
            # flight.
            tokens = min(request.num_computed_tokens, self._limit(request), request.num_tokens - 1)
            if tokens >= tracked.next_tokens or tracked.again:
                self.saves.end(tracked, tokens)
        self._keeps.end(tracked)
        if getattr(request, "lora_request", None) is not None and self._adapters.remove(tracked):
            self.new_weights()
        if self.saves is not None:
            self._keeps.settle(self.saves)
        return tracked.offer is not None and self._transfers.end(tracked, tokens, self.saves if tokens else None)

    def transfer_params(self, request: Any) -> dict[str, Any] | None:
        """Return what a decode engine needs to know about a request that was computed for it."""
        params = self._switches.checked(request)
        if not (self._options.transfers and self._may_save and params.get("do_remote_decode") is True):
            return None
        return self._transfers.params(request, self._tp_size)

    def reset(self) -> None:
        """Handle vLLM's reset of the connector: new weights, or a plain reset if the user says so.

        A plain reset starts a new epoch. If the agent does not answer, the reset precedes its next
        use.
        """
        self._was_reset = False
        if self.generations.after_reset():
            self._move()
            return
        self.new_weights()
        self._agent.reset()

    def before_weights_call(self, call: str) -> None:
        """Handle a call that may change the weights: blocks computed so far belong to the
        old ones.
        """
        if self._moved_at == self._steps and self.generations.now.startswith(PRIVATE):
            return  # no step was planned since the last change: an update takes many calls
        if self.generations.after_call(call):
            self._move()

    def weights_named(self, version: str) -> None:
        """Handle the naming of the current weights' version."""
        self._settle_reset()  # it precedes the name
        if self.generations.after_name(version):
            self._move()

    def reregister(self) -> None:
        """Leave the agent and register again, since the identity has changed but the computation
        has not.
        """
        if self._agent.reregister():
            self._react(SessionChange(ended=True))

    def new_weights(self) -> None:
        """Stop saving what was computed so far, and drop all promises."""
        for tracked in self._tracked.values():
            self._promises.forget(tracked)
            tracked.stale = tracked.stale or tracked.admitted or tracked.load != 0 or tracked.ever_loaded
        if self.blocks is not None and self.saves is not None and self._stale_requests is not None:
            self.blocks.new_weights()
            self._stale_requests.clear()
            for tracked in self._tracked.values():
                if tracked.stale:
                    self._stale_requests.add(tracked)
            self._stale_requests.mark_blocks()  # so that mark_lost knows the others
            self._keeps.clear()
            self.saves.drop()  # else it would be sent under the new epoch
            self.saves.clear_left()
            self._transfers.save_no_more()

    def idle(self) -> bool:
        """Return whether the engine has no request."""
        return not self._tracked

    def pending(self) -> bool:
        """Return whether steps are needed without requests: a report or a lease is outstanding."""
        return self.waiting() or self._transfers.busy() or self._agent.awaits_leases() or self._publishes()

    def counted(self) -> dict[str, int]:
        """Return all counters by name."""
        counted = {field.name: getattr(self.counts, field.name) for field in fields(self.counts)}
        if self.saves is not None:
            counts = self.saves.counts
            counted |= {f"saves_{field.name}": getattr(counts, field.name) for field in fields(counts)}
        return counted

    def retire(self) -> None:
        """Leave the agent for good: nothing is saved or loaded any more. What is in flight ends as
        if the agent had gone, except that ranks which it serves still read: their saves are
        revoked.
        """
        self._may_save = self._may_load = False
        self._agent.close()
        self._react(SessionChange(ended=True))
        if self.saves is not None:
            self._revoking = True
            self._revokes.extend(self.saves.revoke_at_once())

    def retired(self) -> bool:
        """Return whether nothing is in flight after ``retire``."""
        busy = self.waiting() or self._revokes or self._revoking or self._transfers.busy() or self._publishes()
        return not busy

    def close(self) -> None:
        """Leave the agent. Its leases end with the session."""
        if self._publication is not None:
            self._publication.close()
        self._agent.close()

    def _make_publication(self, events: EventsOptions | None) -> Publication | None:
        if events is None:
            return None
        tokens = Tokens(self._geometry, self.counts)
        return Publication(self._agent, tokens, events, Published(events.form, tokens.sizes, self.counts))

    def _publishes(self) -> bool:
        """Return whether there are KV events to publish."""
        return self._publication is not None and self._publication.pending()

    def _move(self) -> None:
        """Switch to another generation: blocks computed so far belong to the last one."""
        self.new_weights()
        self._workers_in_space = 0
        self._moved_at = self._steps
        if self._agent.move():
            self._react(SessionChange(ended=True))

    def _workers_moved(self, serials: Sequence[int]) -> None:
        """Register the scheduler once all workers have switched.

        The agent requires all parts of an engine to be in one space, and hits need all ranks.
        """
        before = self._workers_in_space
        self._workers_in_space += sum(serial == self.generations.serial for serial in serials)
        if before < self._workers_in_space >= self._world:
            self._agent.proceed()

    def _poll_agent(self, *, listen: bool = True) -> None:
        change = self._agent.poll(listen=listen)
        if change is not NO_CHANGE:
            self._react(change)

    def _react(self, change: SessionChange) -> None:
        if self._publication is not None:
            self._publication.follow()
        if change.ended:
            self._schedule.clear()
            self._transfers.drop()
            for tracked in self._tracked.values():
                self._promises.lose(tracked)
        if change.began:
            self._offer_again()
        if change.reset:
            self.new_weights()

    def _offer_again(self) -> None:
        """Offer all blocks again, since a new agent may have none."""
        session = self._agent.session
        if session is None or self.saves is None or self.loads is None:
            return
        self.saves.batch.job_blocks = self.loads.job_blocks = self._agent.job_blocks
        self._schedule.clear()
        for tracked in self._tracked.values():
            tracked.restart_saves()
            if tracked.admitted:
                self._schedule.add(tracked)
        self._transfers.again(time.monotonic())

    def waiting(self) -> bool:
        """Return whether a report of the workers is outstanding."""
        return (self.saves is not None and self.saves.busy()) or (self.loads is not None and self.loads.busy())

    def exclude(self, request_id: str, *, over: bool) -> Tracked | None:
        """Neither save nor load a request any more, after an error in a call about it; forget it
        if it is ``over``. Return its record, if there is one.
        """
        tracked = self._tracked.pop(request_id, None) if over else self._tracked.get(request_id)
        if tracked is None:
            return None
        tracked.bypass, tracked.admitted = True, False
        self._schedule.remove(tracked)
        self._promises.forget(tracked)
        if self.loads is not None:
            self.loads.withdraw(tracked)
        return tracked

    def will_fail(self, job: int, tracked: Tracked, external: int) -> None:
        """Let another job, which will fail, stand for the load that a request's step waits for."""
        self._sync_loads.replace(job, tracked, external)

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            keyed = self._media.request(request)
            self.counts.media_bypassed += keyed is None
            if self._media.newly_ambiguous:
                self._bypass_names(self._media.newly_ambiguous)
            lora = getattr(request, "lora_request", None) is not None
            tracked = Tracked(
                request if lora else keyed or request, keyed is None and not lora, [0] * len(self._geometry.groups),
                self._geometry.hash_tokens, has_states=bool(self._geometry.states),
            )  # fmt: skip
            if lora:
                self._add_adapted(tracked)
            if self._publication is not None and not self._following:
                tracked.events_extra = extra_of(request)
            if self._following and not tracked.bypass and keyable(request):
                tracked.request = Followed(tracked.request, self._geometry.hash_tokens)
            elif self._following:
                tracked.bypass = True
            self._tracked[request.request_id] = tracked
            if params := self._switches.checked(request):
                self._switches.apply(tracked, params)
                if tracked.ttl_ms and self.saves is not None:
                    self.saves.notes = True
        return tracked

    def _add_adapted(self, tracked: Tracked) -> None:
        """Key a request with a LoRA adapter that has arrived, if the adapter's content is known."""
        request = tracked.request
        tracked.unkeyed = True
        # The encoder may have an adapter too, a session's later turns replace hashes, and a request
        # may tell vLLM to load its adapter again in each of its steps.
        tracked.never_keyed = bool(
            self._following or getattr(request, "mm_features", None) or getattr(request, "resumable", False)
            or getattr(request.lora_request, "load_inplace", False)
        )  # fmt: skip
        if self._adapters.add(tracked):
            self.new_weights()
        if self._adapters.mixed(tracked):
            name = request.lora_request.lora_name
            for other in (tracked, *self._tracked.values()):
                lora = getattr(other.request, "lora_request", None)
                if lora is not None and lora.lora_name == name:
                    self._promises.forget(other)
                    unkey(other)
                    other.never_keyed = True
        self._adapters.key(tracked)
        self.counts.adapters_unknown += tracked.unkeyed

    def _adapters_reported(self, some: Sequence[LoadedAdapter]) -> None:
        """Key the requests whose adapters have become known, after the others were unkeyed."""
        changed, known, stale = self._adapters.report(some)
        if stale:
            self.new_weights()
        for tracked in self._tracked.values():
            lora = getattr(tracked.request, "lora_request", None)
            if lora is None:
                continue
            if lora.lora_int_id in changed:
                unkey(tracked)
            if lora.lora_int_id in known and tracked.unkeyed and self._adapters.key(tracked) and tracked.admitted:
                self._schedule.add(tracked)

    def _begin_transfer(self, tracked: Tracked, params: Any) -> None:
        """Open the transfer of a request that has arrived, or note the one that it is to
        receive.
        """
        if params.get("do_remote_decode") is True and self._may_save and not (tracked.bypass or tracked.unkeyed):
            self._transfers.offer(tracked, params, time.monotonic())
        elif params.get("do_remote_prefill") is True and self._may_load:
            tracked.wanted = wanted(params, tracked.request.request_id)
            self.counts.transfers_wanted += tracked.wanted is not None

    def _own_tokens(self, tracked: Tracked, request: Any) -> int:
        """Return how many tokens of a request need not be fetched from another agent, since they
        are in the engine's own cache. vLLM says so only when it schedules the request.
        """
        remote = tracked.wanted is not None and tracked.wanted.peer not in ("", self._agent.peer)
        if not remote or self.blocks is None or len(self._geometry.groups) > 1:
            return 0
        scale, size = self._geometry.scale(0), self._geometry.groups[0].block_tokens
        return self.blocks.cached(request.block_hashes[scale - 1 :: scale], 0) * size

    def _bypass_names(self, names: set[str]) -> None:
        """Stop saving and loading requests with an item of one of these names."""
        for tracked in self._tracked.values():
            if isinstance(tracked.request, Keyed) and tracked.request.names & names:
                self._promises.forget(tracked)
                self._schedule.remove(tracked)
                self.counts.media_bypassed += not tracked.bypass
                tracked.bypass, tracked.admitted = True, False
        names.clear()

    def _usable(self, tracked: Tracked) -> bool:
        return (
            self._may_load
            and self._agent.switches.loads == 1
            and (not self._stopped or tracked.wanted is not None)
            and not (tracked.bypass or tracked.unkeyed or tracked.no_load or tracked.load)
            and not getattr(tracked.request, "skip_reading_prefix_cache", False)
        )

    def _saves_now(self) -> bool:
        """Return whether there is an agent that takes saves from this engine."""
        return self._may_save and self._agent.session is not None and self._agent.switches.saves == 1

    def _saving(self, tracked: Tracked) -> bool:
        awaited = not self._stopped or tracked.offer is not None
        barred = tracked.bypass or tracked.unkeyed or tracked.stale or tracked.no_save
        return self._saves_now() and awaited and not barred

    def _limit(self, request: Any) -> int:
        """Return how many tokens of a request may be saved at all."""
        return int(request.num_tokens if self._options.save_decode else request.num_prompt_tokens)

    def _preempted(self, request: str, *, again: bool) -> None:
        tracked = self._tracked.get(request)
        if tracked is not None and not again:
            self._sync_loads.lost(tracked)
            self._lost_blocks(tracked)

    def _admit(self, tracked: Tracked) -> None:
        """Save the blocks of a request from now on, if it may be saved."""
        if not tracked.bypass and self._may_save and self.saves is not None:
            tracked.admitted = True
            self.saves.batch.begin(tracked)
            self._schedule.add(tracked)

    def _lost_blocks(self, tracked: Tracked) -> None:
        tracked.restart_saves()
        tracked.admitted = tracked.stale = tracked.ever_loaded = False
        self._schedule.remove(tracked)
        if self._stale_requests is not None:
            self._stale_requests.remove(tracked)

    def _check_stale(self, tracked: Tracked, tables: Sequence[Sequence[Any]]) -> None:
        """Note whether an admitted request found blocks of old weights in the engine's own
        cache.
        """
        if self._stale_requests is not None:
            self._stale_requests.admit(tracked, tables)

    def _plan_saves(self, saves: Saves, plan: StepPlan, output: Any, now: float, *, preempted: bool) -> None:
        """Plan the saves of a step. In most steps only the step is counted."""
        saves.begin(now)
        session, scheduled = self._agent.session, output.num_scheduled_tokens
        if session is not None and self._may_save:
            self._schedule.step(scheduled, self._tracked, getattr(output, "total_num_scheduled_tokens", 0))
        if self._transfers.active():
            self._transfers.step(saves, now)
        near = saves.lazy is not None and saves.lazy.due() and session is not None
        if self._states is not None and session is not None and not preempted:
            self._add_states(self._states, saves, output)
        if not (saves.busy() or near or self._schedule.ready()):
            return
        short = preempted or self._stopped or saves.blocks.scarce()
        if short:
            plan.revokes += saves.revoke(in_use=self._stopped or saves.blocks.withheld())
        if session is None:
            saves.drop()
        elif self._may_collect(saves):
            if not short or saves.blocks.max_delivering > 0:
                collect_saves(
                    self._schedule, saves, scheduled, decode=self._options.save_decode, offers_only=short
                )  # fmt: skip
            if near and not short and saves.lazy is not None:
                saves.lazy.collect()
        if session is not None:
            agent = self._agent
            plan.saves = saves.finish(
                self._jobs.__next__, session.boot, session.epoch, agent.space, agent.targets()
            )  # fmt: skip
        plan.revokes += saves.revoke_overdue()

    def _add_states(self, states: States, saves: Saves, output: Any) -> None:
        """Add the states that vLLM hands over in a step, unless blocks are scarce."""
        if not (self._stopped or saves.blocks.scarce()) and self._may_collect(saves):
            handed = getattr(output, "kv_connector_block_state", None)
            states.add(saves.batch, handed, self._tracked, decode=self._options.save_decode)

    def _may_collect(self, saves: Saves) -> bool:
        """Return whether the agent takes blocks, and there is room for some."""
        return self._may_save and self._agent.switches.saves == 1 and saves.ready()

    def _settle_reset(self) -> None:
        """Treat a reset of vLLM's own cache as new weights if no reset of the connector came with
        it.
        """
        if self._was_reset:
            self._was_reset = False
            self.before_weights_call("reset_prefix_cache")

    def _guarded(self, hook: Callable[[], None]) -> Callable[[], None]:
        """Return a hook of vLLM's block pool whose errors go where those of vLLM's calls go."""

        def call() -> None:
            try:
                hook()
            except Exception as error:
                if self.failed is None:
                    raise
                self.failed("reset_prefix_cache", error)

        return call

    def _before_reset(self) -> None:
        """Release all pins of saves, since the prefix cache is about to be reset between two
        steps.
        """
        self._was_reset = self.generations.counts_resets
        if self._stale_requests is not None:
            self._stale_requests.mark_lost()  # vLLM has preempted requests, and the reset may fail
        if self.saves is not None:
            self._revokes += self.saves.revoke_at_once()
            self._transfers.save_no_more()

    def _after_reset(self) -> None:
        """Handle that vLLM has reset its prefix cache: its events say that all blocks are gone."""
        if self.saves is not None and self.saves.lazy is not None:
            self.saves.lazy.clear_unsaved()
        if self._publication is not None:
            self._publication.cleared()


def _decoding(output: Any) -> int:
    """Return the number of a step's requests if each computes its next token and none is new."""
    scheduled, tokens = len(output.num_scheduled_tokens), getattr(output, "total_num_scheduled_tokens", 0)
    if drafts := getattr(output, "scheduled_spec_decode_tokens", None):
        tokens -= sum(map(len, drafts.values()))
    return scheduled if tokens == scheduled and not getattr(output, "scheduled_new_reqs", None) else 0
