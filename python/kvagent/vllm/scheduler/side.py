"""The scheduler's side: how much of a prompt the agent has, which blocks a step saves and loads, and what is pinned.

It is called by vLLM's scheduler, from one thread, and never waits but for the first answer to a look-up (asking). Of
vLLM's objects it uses attributes only, so it needs no vllm to be imported.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvagent.limits import MAX_JOB_BLOCKS
from kvagent.vllm.counters import Counts
from kvagent.vllm.generation import LOADED, PRIVATE, Generations
from kvagent.vllm.link import LISTEN_STEPS
from kvagent.vllm.plan import StepPlan
from kvagent.vllm.scheduler.agent_session import NO_CHANGE, AgentSession, SessionChange
from kvagent.vllm.scheduler.blocks import Blocks, Tables
from kvagent.vllm.scheduler.loads import Loads
from kvagent.vllm.scheduler.lookups import Promises
from kvagent.vllm.scheduler.media import Keyed, Media
from kvagent.vllm.scheduler.requests import StaleRequests, Tracked
from kvagent.vllm.scheduler.save_schedule import SaveSchedule, collect_saves
from kvagent.vllm.scheduler.saves import Saves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.link import Link
    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import Report


class SchedulerSide:
    """See the module. ``bind`` comes before anything but ``on_new_request`` and ``matched``."""

    def __init__(
        self, options: Options, geometry: Geometry, world: int, link: Link, *, saves: bool, loads: bool,
        whole_failures: bool, generations: Generations | None = None, media: Media | None = None,
        unobserved: bool = False,
    ) -> None:  # fmt: skip
        """``whole_failures``: a load can be reported as failed as a whole (vLLM from 0.30 on).

        ``unheard``: the weights can change though nothing tells of it, so that any reset may be after a change.
        """
        self._unobserved = unobserved
        self._was_reset = False  # vLLM's own cache was, and nothing was asked since
        self.generations = generations or Generations(LOADED, options)
        self._workers_in_space = 0  # workers that have reported the generation
        self._moved_at = -1  # the step after which it was taken
        self.counts = Counts()
        self._options = options
        self._geometry = geometry
        self._world = world
        self._may_save = saves
        self._may_load = loads
        self._whole_failures = whole_failures
        self._media = media or Media(options.media, geometry.hash_tokens)
        self._agent = AgentSession(link, options)
        self._promises = Promises(self._agent, geometry, options, self.counts)
        self._tracked: dict[str, Tracked] = {}
        self._schedule = SaveSchedule()
        self._revokes: list[int] = []
        self._steps = 0
        self._stopped = False  # the agent, so that nothing is to be expected of it
        self._jobs = itertools.count(1)
        self.tables = Tables()
        self.blocks: Blocks | None = None
        self.saves: Saves | None = None
        self._loads: Loads | None = None
        self._stale_requests: StaleRequests | None = None

    def bind(self, pool: Any, manager: Any = None) -> None:
        """Takes vLLM's block pool, and its KV cache manager where there is one to take."""
        if self.blocks is None:
            self.blocks = Blocks(pool, self._options.pin_percent / 100)
            self.saves = Saves(self._geometry, self._world, self.blocks, self.tables, self._schedule)
            self._loads = Loads(self._agent, self._geometry, self._options, self._world, self.blocks, self.counts)
            self._stale_requests = StaleRequests(self.blocks, self.tables, len(self._geometry.groups))
            self.blocks.before_reset(self._before_reset)
        self.tables.bind(pool, manager)

    def use_revocation(self, revoke: Callable[[int], None]) -> None:
        """Takes the way to set a revocation word in all workers at once."""
        if self.saves is not None:
            self.saves.revoke_now = revoke

    def on_new_request(self, request: Any) -> None:
        """Tells the agent what will be asked for."""
        self._settle_reset()
        tracked = self._track(request)
        self._poll_agent()
        lookups = self._agent.lookups
        if lookups is not None and self._usable(tracked) and (hashes := tracked.request.block_hashes):
            lookups.probe(request.num_tokens, hashes)

    def matched(self, request: Any, own: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``own`` will be loaded. None: not known yet."""
        self._settle_reset()
        tracked = self._track(request)
        if not self._usable(tracked) or (own and not self._whole_failures):
            return 0, False
        tokens = self._promises.promise(tracked, own, time.monotonic())
        tracked.own = own
        return tokens, bool(tokens)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The request was let in: with ``external`` tokens to be loaded, or with none."""
        self._settle_reset()
        tracked = self._track(request)
        if tracked.admitted:  # reset_prefix_cache took its blocks away, between two steps
            self._lost_blocks(tracked)
        if external > 0 and self._loads is not None:
            asked = self._promises.take(tracked)
            self._check_stale(tracked, blocks.blocks)
            self._loads.plan(next(self._jobs), tracked, blocks.blocks, external, asked)
            return
        self._promises.forget(tracked)
        if not tracked.bypass and self._may_save:
            self._check_stale(tracked, blocks.blocks if blocks is not None else ())
            tracked.admitted = True
            self._schedule.add(tracked)

    def plan(self, output: Any) -> StepPlan:
        """The plan of the step that ``output`` describes."""
        self._settle_reset()
        self._steps += 1
        waiting = self._waiting()
        self._poll_agent(listen=waiting or self._steps % LISTEN_STEPS == 0)
        preempted = getattr(output, "preempted_req_ids", None) or ()
        for request in preempted:
            # One that a reset preempted may have been let in again in this very step.
            self._preempted(request, again=request in output.num_scheduled_tokens)
        self.tables.take(getattr(output, "kv_connector_block_state", None))
        if self._stale_requests is not None:
            self._stale_requests.mark_blocks()
        now = time.monotonic()
        plan = StepPlan(idle=not self._tracked)
        if self._workers_in_space < self._world:
            plan.generation = self.generations.serial, self.generations.now
        if self._loads is not None and self._loads.busy():
            plan.loads, plan.cancels = self._loads.take()
        plan.revokes, self._revokes = self._revokes, []
        if self.saves is not None:
            self._stopped = plan.stopped = waiting and self._waiting() and self._agent.stopped(now)
            self._plan_saves(self.saves, plan, output, now, preempted=bool(preempted))
        if self._agent.lookups is not None:
            self._agent.lookups.begin_step()
        return plan

    def report(self, report: Report) -> None:
        """Takes the workers' report."""
        if self.saves is None or self._loads is None:
            return
        now = time.monotonic()
        if report.moved:
            self._workers_moved(report.moved)
        if report.outcomes:
            self._agent.liveness.heard(now)
        for job in report.late:
            self._loads.late(job)
        for job, outcome in report.outcomes.items():
            if not self.saves.report(job, outcome):
                self._loads.report(job, outcome, now)

    def finished(self, request: Any, *, normally: bool) -> None:
        """The request is over; its blocks are free when this returns, but for what is pinned."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        tracked.over = True
        self._schedule.remove(tracked)
        self._promises.forget(tracked)
        if self._stale_requests is not None:
            self._stale_requests.mark_blocks()
            self._stale_requests.remove(tracked)
        if tracked.load and self._loads is not None:
            self._loads.cancel(tracked)
        elif normally and self.saves is not None and self._saving(tracked) and self.saves.ready():
            # The last token was never fed, and async scheduling may have a step too many under way.
            tokens = min(request.num_computed_tokens, self._limit(request), request.num_tokens - 1)
            if tokens >= tracked.next_tokens:
                self.saves.batch.add(tracked, tokens)
                self.saves.batch.pin()
        self.tables.forget(request.request_id)

    def reset(self) -> None:
        """Takes vLLM's reset of the connector: new weights, or, if the user says so, a plain one.

        That starts a new epoch. If the agent does not answer, it hears of it before it is used again.
        """
        self._was_reset = False
        if self.generations.after_reset():
            self._move()
            return
        self.new_weights()
        self._agent.reset()

    def before_weights_call(self, call: str) -> None:
        """A call that may change the weights is about to be made: what was computed until now is of the old ones."""
        if self._moved_at == self._steps and self.generations.now.startswith(PRIVATE):
            return  # nothing was computed since the last change: an update takes many calls
        if self.generations.after_call(call):
            self._move()

    def weights_named(self, version: str) -> None:
        """The weights that are in place now have that version."""
        if self.generations.after_name(version):
            self._move()

    def reregister(self) -> None:
        """Leaves the agent and registers again: the identity has changed, but what this engine computes has not."""
        if self._agent.reregister():
            self._react(SessionChange(ended=True))

    def new_weights(self) -> None:
        """What was computed until now is not saved any more, and promises are void."""
        for tracked in self._tracked.values():
            self._promises.forget(tracked)
            tracked.stale = tracked.stale or tracked.admitted or tracked.load != 0 or tracked.ever_loaded
        if self.blocks is not None and self.saves is not None and self._stale_requests is not None:
            self.blocks.new_weights()
            self._stale_requests.clear()
            for tracked in self._tracked.values():
                if tracked.stale:
                    self._stale_requests.add(tracked)
            self.saves.drop()  # it would go out under the new epoch
            self.saves.forget()

    def idle(self) -> bool:
        """Whether the engine has no request."""
        return not self._tracked

    def pending(self) -> bool:
        """Whether steps are needed though no request is there: something is to be reported, or to be given back."""
        lookups = self._agent.lookups
        return self._waiting() or (lookups is not None and lookups.awaits_leases())

    def counted(self) -> dict[str, int]:
        """All counters by name."""
        counted = {field.name: getattr(self.counts, field.name) for field in fields(self.counts)}
        if self.saves is not None:
            counts = self.saves.counts
            counted |= {f"saves_{field.name}": getattr(counts, field.name) for field in fields(counts)}
        return counted

    def close(self) -> None:
        """Leaves the agent. Leases end with the session."""
        self._agent.close()

    def _move(self) -> None:
        """Goes over to another generation: what was computed until now is of the one that is left."""
        self.new_weights()
        self._workers_in_space = 0
        self._moved_at = self._steps
        if self._agent.move():
            self._react(SessionChange(ended=True))

    def _workers_moved(self, serials: Sequence[int]) -> None:
        """Once all have, the scheduler may: the agent takes an engine's parts of one space, and hits need all ranks."""
        before = self._workers_in_space
        self._workers_in_space += sum(serial == self.generations.serial for serial in serials)
        if before < self._workers_in_space >= self._world:
            self._agent.proceed()

    def _poll_agent(self, *, listen: bool = True) -> None:
        change = self._agent.poll(listen=listen)
        if change is not NO_CHANGE:
            self._react(change)

    def _react(self, change: SessionChange) -> None:
        if change.ended:
            self._schedule.clear()
            for tracked in self._tracked.values():
                tracked.promised = tracked.ticket = None
        if change.began:
            self._offer_again()
        if change.reset:
            self.new_weights()

    def _offer_again(self) -> None:
        """A new agent may have nothing: all is offered again."""
        session = self._agent.session
        if session is None or self.saves is None or self._loads is None:
            return
        self.saves.forget()
        self.saves.revocable = session.version > 1
        self.saves.batch.job_blocks = self._loads.job_blocks = min(
            session.limits.max_job_blocks or MAX_JOB_BLOCKS, MAX_JOB_BLOCKS
        )
        self._schedule.clear()
        for tracked in self._tracked.values():
            tracked.restart_saves()
            if tracked.admitted:
                self._schedule.add(tracked)

    def _waiting(self) -> bool:
        """Whether something is to come from the agent."""
        return (self.saves is not None and self.saves.busy()) or (self._loads is not None and self._loads.busy())

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            # A hash holds only the name of a LoRA adapter, not what is in it.
            bypass = getattr(request, "lora_request", None) is not None
            kept = self._media.request(request)
            self.counts.media_bypassed += kept is None
            if self._media.newly_ambiguous:
                self._bypass_names(self._media.newly_ambiguous)
            tracked = Tracked(
                kept or request, bypass or kept is None, [0] * len(self._geometry.groups), self._geometry.hash_tokens
            )
            self._tracked[request.request_id] = tracked
        return tracked

    def _bypass_names(self, names: set[str]) -> None:
        """Neither saves nor loads any more of requests with an item of such a name."""
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
            and not self._stopped
            and not (tracked.bypass or tracked.no_load or tracked.load)
            and not getattr(tracked.request, "skip_reading_prefix_cache", False)
        )

    def _saving(self, tracked: Tracked) -> bool:
        present = self._agent.session is not None and self._agent.switches.saves == 1 and not self._stopped
        return self._may_save and present and not (tracked.bypass or tracked.stale)

    def _limit(self, request: Any) -> int:
        """Tokens of a request that may be saved at all."""
        return int(request.num_tokens if self._options.save_decode else request.num_prompt_tokens)

    def _preempted(self, request: str, *, again: bool) -> None:
        self.tables.forget(request)
        tracked = self._tracked.get(request)
        if tracked is not None and not again:
            self._lost_blocks(tracked)

    def _lost_blocks(self, tracked: Tracked) -> None:
        tracked.restart_saves()
        tracked.admitted = tracked.stale = tracked.ever_loaded = False
        self._schedule.remove(tracked)
        if self._stale_requests is not None:
            self._stale_requests.remove(tracked)

    def _check_stale(self, tracked: Tracked, tables: Sequence[Sequence[Any]]) -> None:
        """Whether a request that is let in found blocks of old weights in the engine's own cache."""
        if self._stale_requests is not None:
            self._stale_requests.admit(tracked, tables)

    def _plan_saves(self, saves: Saves, plan: StepPlan, output: Any, now: float, *, preempted: bool) -> None:
        """Nearly always it has nothing to do but to count the step."""
        saves.begin(now)
        session = self._agent.session
        if session is not None and self._may_save:
            self._schedule.step(
                output.num_scheduled_tokens, self._tracked, getattr(output, "total_num_scheduled_tokens", 0)
            )
        if not (saves.busy() or (session is not None and self._schedule.ready())):
            return
        short = preempted or self._stopped or (self.blocks is not None and self.blocks.scarce())
        if short:
            plan.revokes += saves.revoke()
        if session is None:
            saves.drop()
        elif self._may_save and not short and self._schedule.ready() and self._agent.switches.saves and saves.ready():
            collect_saves(self._schedule, saves, output.num_scheduled_tokens, decode=self._options.save_decode)
        if session is not None:
            plan.saves = saves.finish(self._jobs.__next__, session.boot, session.epoch, self._agent.space)
        plan.revokes += saves.revoke_overdue()

    def _settle_reset(self) -> None:
        """Takes a reset of vLLM's own cache, of which the connector was told nothing more, for one of new weights."""
        if self._was_reset:
            self._was_reset = False
            self.before_weights_call("reset_prefix_cache")

    def _before_reset(self) -> None:
        """The prefix cache is to be reset: only then are all pins of saves given back between two steps."""
        self._was_reset = self._unobserved
        if self.saves is not None:
            self._revokes += self.saves.revoke_at_once()
