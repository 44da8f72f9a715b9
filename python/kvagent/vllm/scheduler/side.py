"""The scheduler's side: what the agent has of a prompt, which blocks a step saves and loads, what
is pinned.

vLLM's scheduler calls it from one thread. It blocks only, and briefly, for the answers to look-ups
(loads) and to resets. It uses only attributes of vLLM's objects and imports no vllm.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from kvagent.vllm.counters import Counts
from kvagent.vllm.hooks import Guest, Joined, Reset
from kvagent.vllm.internals import around
from kvagent.vllm.link import LISTEN_STEPS
from kvagent.vllm.plan import StepPlan
from kvagent.vllm.scheduler.agent_session import NO_CHANGE
from kvagent.vllm.scheduler.loads import Loads
from kvagent.vllm.scheduler.requests import Blocks, Phase, StaleRequests, Tracked, arrived
from kvagent.vllm.weight_changes import LOADED, PRIVATE, Generations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.link import Link
    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import Outcome, Report
    from kvagent.vllm.scheduler.saves import Named

KEYED = ("lora_request", "mm_features")
"""The attributes of a vLLM request on which its blocks depend by more than vLLM's hashes say."""

DOUBT_STEPS = 16  # more than are in flight at once


class SchedulerSide:
    """The scheduler's side. ``manager``: vLLM's KV cache manager, with its block pool."""

    def __init__(
        self, options: Options, geometry: Geometry, world: int, link: Link, manager: Any, *, saves: bool,
        generations: Generations | None = None, joined: Joined | None = None,
    ) -> None:  # fmt: skip
        """``saves``: whether the engine may save. ``joined``: the guests."""
        joined = joined or Joined()
        self.guests = joined.guests
        self.generations = generations or Generations(LOADED, options)
        self.counts = Counts()
        self.options = options
        self.geometry = geometry
        self.agent = joined.session(link, options)
        self.waiting_loads = joined.waits
        self.requests: dict[str, Tracked] = {}
        """Those that have not ended, by name."""
        self.hit: tuple[str, dict[str, int]] = ("", {})
        """The request that was admitted with a load last, and where its tokens came from."""
        self.failed: Callable[[str, Exception], None] | None = None
        """What handles an error in a hook of vLLM's block pool (boundary)."""
        self.take_events: Callable[[], Sequence[Any]] = tuple
        """Returns vLLM's KV events of what the agent's memory holds, since the last call."""
        self.blocks = Blocks(manager, options.pin_percent / 100)
        self.saves = joined.saves(geometry, self.blocks, self.counts)
        self.loads = Loads(self.agent, geometry, options, self.blocks, self.counts, joined.waits.may)
        named: list[Named] = [guest.named for guest in self.guests if type(guest).named is not Guest.named]
        self.saves.named = self.loads.named = named
        self._world = world
        self._outcomes: dict[int, Outcome] = {}  # of jobs that not all workers have reported
        self._may_save = saves
        self._answered = joined.answered
        self._stale = StaleRequests(self.blocks, len(geometry.groups))
        self._jobs = itertools.count(1)
        self._revokes: list[int] = []
        self._held: list[Any] = []  # blocks of these: the next step may not reuse them, as vLLM zeroes them first
        self._admitted: dict[Tracked, bool] = {}  # for the next step, without a load; whether it was looked up
        self._doubted = 0  # the last step whose blocks may come from another connector's load that fails
        self._steps = 0
        self._was_reset = False  # vLLM reset its own cache, and no call has followed yet
        self._moved_at = -1  # the step after which the generation last changed
        after, before = self._guarded(self._after_reset), self._guarded(self._before_reset)
        around(self.blocks.pool, "reset_prefix_cache", after, before)
        for guest in self.guests:
            guest.begin(self, manager)

    def on_new_request(self, request: Any) -> None:
        """Tell the agent which blocks a later look-up will ask for."""
        self._settle_reset()
        tracked = self._track(request)
        self._poll_agent()
        self.agent.silent = self.agent.silent and self.agent.pinging()  # it may have answered while no step ran
        self.loads.probe(tracked)

    def matched(self, request: Any, own: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``own`` will be loaded; None if not known yet."""
        self._settle_reset()
        tracked = self._track(request)
        tracked.own, tracked.looked_up = own, True
        tokens = self.loads.promise(tracked, own, time.monotonic())
        promised = tracked.asking.promised
        ready = bool(tokens) and promised is not None and promised.ready
        tracked.waits = ready and self.waiting_loads.may(tracked, tokens or 0)
        if tracked.waits and tokens and own + tokens == request.num_tokens:
            tokens -= self.geometry.align  # vLLM computes the last token again only after loads that it waits for
        return tokens, bool(tokens) and not tracked.waits

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Handle a request's admission, with ``external`` tokens to load or none."""
        self._settle_reset()
        tracked = self._track(request)
        anew, tracked.looked_up = tracked.looked_up, False
        # Either reset_prefix_cache took its blocks between two steps, or a load brought none.
        if tracked.phase == Phase.RUNNING or (anew and tracked.phase != Phase.NONE):
            self._lost_blocks(tracked)
        self.waiting_loads.lost(tracked)
        if external > 0:
            self._stale.admit(tracked, blocks.blocks)
            job = next(self._jobs)
            if tracked.waits:
                self.waiting_loads.start(job, tracked, external)
            self.hit = request.request_id, self.loads.plan(job, tracked, blocks.blocks, external)
            return
        self.loads.forget(tracked)
        if self._may_save:
            self._admitted[tracked] = anew
            self._stale.admit(tracked, blocks.blocks if blocks is not None else ())
            self.saves.admit(tracked)

    def plan(self, output: Any) -> StepPlan:
        """Return the plan of the step that ``output`` describes."""
        if self._was_reset:
            self._settle_reset()  # it precedes this step
        self._steps += 1
        scheduled, preempted = output.num_scheduled_tokens, output.preempted_req_ids or ()
        agent = self.agent
        waiting = self.waiting() or agent.awaited()
        woken = not scheduled and self.take_events is not tuple
        if waiting or woken or agent.session is None or self._steps % LISTEN_STEPS == 0:
            self._poll_agent()
        self._stale.mark_blocks()
        for request in preempted:  # one that a reset preempted may have been admitted again
            tracked = self.requests.get(request)
            if tracked is not None and request not in scheduled and (tracked.waits or not tracked.load):
                self.waiting_loads.lost(tracked)
                self._lost_blocks(tracked)
        for tracked, anew in self._admitted.items():
            # Another connector may load blocks, which count as computed. Once they are there, the
            # request is admitted again. A step that waits for that may fail: what it computes is
            # saved at the end of its requests, and so is what uses their blocks before the outcome
            # is known.
            request = tracked.request
            if anew and request.num_computed_tokens > tracked.own:
                self._doubted = self._steps + DOUBT_STEPS
            if request.request_id not in scheduled or (request.num_computed_tokens and self._steps <= self._doubted):
                tracked.phase = Phase.LOADED
                self.saves.schedule.remove(tracked)
        self._admitted.clear()
        now = time.monotonic()
        plan = StepPlan(
            idle=not self.requests or not scheduled, decoding=_decoding(output),
            generation=(self.generations.serial, self.generations.now),
        )  # fmt: skip
        if self._moved_at == self._steps - 1:
            agent.proceed()  # with this plan the workers leave the last space too, in which all have to be at once
        if waiting:
            plan.loads, plan.cancels = self.loads.take()
        if self._revokes:
            plan.revokes = self.take_revokes()
        agent.silent = plan.stopped = waiting and (self.waiting() or agent.awaited()) and agent.stopped(now)
        self.saves.begin(now)
        for guest in self.guests:
            guest.planned(plan, output, now)
        self._plan_saves(plan, output)
        if agent.lookups is not None:
            probed, late = agent.lookups.begin_step(idle=not scheduled)
            self.counts.lookups_late += late
            if probed or late:
                self.loads.waits.in_vain = 0
        agent.tell(plan)
        return plan

    def report(self, report: Report) -> None:
        """Handle a report of the workers."""
        if report.news and self.agent.hear(report):
            self._poll_agent(listen=False)  # while look-ups and leases can still be given back
        now = time.monotonic()
        if report.outcomes:
            self.agent.heard(now)
        for job in report.late:
            self.loads.late(job)
        self.settle(report)
        over, self.saves.over = self.saves.over, []
        for guest in self.guests:
            guest.heard(report, over, now)

    def settle(self, report: Report) -> None:
        """Handle the ends of jobs, each in one or more workers."""
        for job, outcome in report.outcomes.items():
            whole = outcome.join(self._outcomes.pop(job)) if job in self._outcomes else outcome
            if whole.ranks < self._world:
                self._outcomes[job] = whole
            elif not self.saves.report(job, whole.statuses):
                self.loads.report(job, whole.statuses)
        for tracked, good in self.waiting_loads.settle(report, self._world):
            if not good:
                self._lost_blocks(tracked)
            elif self._may_save:
                self.saves.admit(tracked)

    def finished(self, request: Any, *, normally: bool) -> dict[str, Any] | None:
        """Handle a request's end; its blocks are free afterwards, except for pinned ones. Return
        what the answer to it says, such as what a decode engine needs to know.
        """
        tracked, params = self.requests.pop(request.request_id, None), dict[str, Any]()
        if tracked is None:
            return None
        self.saves.schedule.remove(tracked)
        self.loads.forget(tracked)
        complete = self.waiting_loads.over(tracked, normally=normally)  # this may hash its blocks
        self._stale.mark_blocks()
        self._stale.remove(tracked)
        if tracked.load and not complete:
            self.loads.cancel(tracked)
        elif normally and self.takes and tracked.saved and (not self.agent.silent or tracked.awaited):
            # The last token was not computed, and with async scheduling a step may be in flight.
            tokens = min(request.num_computed_tokens, tracked.saving.most, request.num_tokens - 1)
            if tokens >= tracked.saving.next_tokens or tracked.saving.again:
                self.saves.end(tracked, tokens)
        for guest in self.guests:
            params |= guest.ended(tracked) or {}
        return params if params and normally else None

    def reset(self) -> bool:
        """Handle vLLM's reset of the connector: new weights, or a plain reset if the user says so,
        which starts a new epoch. If the agent does not answer, that precedes its next use. So it
        always succeeds: a failure would keep vLLM from sleeping or pausing.
        """
        self._was_reset = False
        if self.generations.after_reset():
            self._move()
        else:
            self.new_weights()
            self.agent.reset()
        return True

    def before_weights_call(self, call: str) -> None:
        """Handle a call that may change the weights: blocks computed so far are of the old ones."""
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
        """Register again, since the identity has changed but the computation has not."""
        self.agent.reregister()
        self._poll_agent(listen=False)

    def new_weights(self) -> None:
        """Stop saving what was computed so far, and drop all promises."""
        self.blocks.new_weights()
        self._stale = StaleRequests(self.blocks, len(self.geometry.groups))
        for tracked in self.requests.values():
            self.loads.forget(tracked)
            if tracked.stale or tracked.phase != Phase.NONE:
                self._stale.add(tracked)
        self._stale.mark_blocks()  # those without a hash are seen
        self.saves.new_weights()
        self._tell(Reset.WEIGHTS)

    def bar(self, tracked: Tracked, reason: str) -> None:
        """Neither save nor load a request, for one more reason."""
        self.loads.forget(tracked)
        self.saves.schedule.remove(tracked)
        tracked.barred.add(reason)

    def unbar(self, tracked: Tracked, reason: str) -> None:
        """Save and load a request again, unless there are other reasons against it."""
        tracked.barred.discard(reason)
        self.saves.schedule.add(tracked)

    def waiting(self) -> bool:
        """Return whether a report of the workers is outstanding."""
        return self.saves.busy() or self.loads.busy()

    def pending(self) -> bool:
        """Return whether steps are needed without requests: a report or a lease is outstanding."""
        busy = self.waiting() or self.agent.awaits_leases()
        return busy or any(guest.busy() for guest in self.guests)

    def exclude(self, request_id: str, *, over: bool) -> Tracked | None:
        """Neither save nor load a request any more, after an error in a call about it; forget it
        if it is ``over``. Return its record, if there is one.
        """
        tracked = self.requests.pop(request_id, None) if over else self.requests.get(request_id)
        if tracked is not None:
            self.bar(tracked, "error")
            self.loads.withdraw(tracked)
        return tracked

    def take_revokes(self) -> list[int]:
        """Return the saves that resets revoked between two steps. Their blocks are free then."""
        held, self._held = self._held, []
        self.blocks.pool.free_blocks(reversed(held))
        revokes, self._revokes = self._revokes, []
        return revokes

    def close(self) -> None:
        """Leave the agent. Its leases end with the session."""
        for guest in self.guests:
            guest.close()
        self.agent.close()

    def _move(self) -> None:
        """Switch to another generation: blocks computed so far belong to the last one."""
        self.new_weights()
        self._moved_at = self._steps
        self.agent.move()
        self._poll_agent(listen=False)

    def _poll_agent(self, *, listen: bool = True) -> None:
        """Adopt a new session and its end, and read what the agent has sent."""
        change = self.agent.poll(listen=listen)
        if change is NO_CHANGE:
            return
        if change.ended:
            for tracked in self.requests.values():
                self.loads.lose(tracked)
            self._tell(Reset.ENDED)
        if change.began and self.agent.session is not None:
            self.saves.job_blocks = self.loads.job_blocks = self.agent.job_blocks
            for tracked in self.requests.values():  # a new agent may have no blocks
                tracked.restart_saves()
                self.saves.schedule.add(tracked)
            self._tell(Reset.BEGAN)
        if change.reset:
            self.new_weights()

    def _tell(self, what: Reset) -> None:
        for guest in self.guests:
            guest.reset(what)

    def _track(self, request: Any) -> Tracked:
        found = self.requests.get(request.request_id)
        if found is None:
            found = arrived(request, len(self.geometry.groups), self.geometry.hash_tokens)
            found.barred.update(name for name in KEYED if getattr(request, name) and name not in self._answered)
            if not self.options.save_decode:
                found.saving.most = int(request.num_prompt_tokens)
            self.requests[request.request_id] = found
            for guest in self.guests:
                guest.seen(found)
        return found

    @property
    def takes(self) -> bool:
        """Whether there is an agent that takes saves."""
        return self._may_save and self.agent.session is not None and self.agent.switches.saves == 1

    def _lost_blocks(self, tracked: Tracked) -> None:
        tracked.restart_saves()
        tracked.phase, tracked.stale = Phase.NONE, False
        self.saves.schedule.remove(tracked)
        self._stale.remove(tracked)

    def _plan_saves(self, plan: StepPlan, output: Any) -> None:
        """Plan the saves of a step. In most steps only the step is counted."""
        saves, session = self.saves, self.agent.session
        if session is not None and self._may_save:
            saves.schedule.step(output.num_scheduled_tokens, self.requests, output.total_num_scheduled_tokens)
        due = saves.due() and session is not None
        if not (saves.busy() or due or saves.schedule.ready()):
            return
        short = bool(output.preempted_req_ids) or self.agent.silent or self.blocks.scarce()
        if short:
            plan.revokes += saves.revoke(in_use=self.agent.silent or self.blocks.withheld())
        if self.takes and saves.ready():
            full = short or saves.room() <= 0
            saves.look(output.num_scheduled_tokens, short=full)
            if due and not full:
                saves.collect()
        plan.saves = saves.finish(self._jobs.__next__, self.agent)
        plan.revokes += saves.revoke_overdue()

    def _settle_reset(self) -> None:
        """Treat a reset of vLLM's own cache as new weights if none of the connector followed."""
        if self._was_reset:
            self._was_reset = False
            self.before_weights_call("reset_prefix_cache")

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return a hook of vLLM's block pool whose errors go where those of vLLM's calls go."""

        def call(*result: Any) -> None:
            try:
                hook(*result)
            except Exception as error:
                if self.failed is None:
                    raise
                self.failed("reset_prefix_cache", error)

        return call

    def _before_reset(self) -> None:
        """Release all pins of saves: the prefix cache is about to be reset, between two steps."""
        self._was_reset = self.generations.counts_resets
        self._stale.mark_blocks()  # vLLM has preempted requests, and the reset may fail
        self.saves.drop()
        self._revokes = self.take_revokes() + self.saves.revoke(awaited=True)

    def _after_reset(self, succeeded: bool) -> None:
        """Handle that vLLM has reset its prefix cache: its events say that all blocks are gone."""
        self._held = self.saves.blocks_of(self._revokes)
        self.blocks.pool.touch(self._held)
        if succeeded:
            self.saves.clear()
            self._tell(Reset.CACHE)


def _decoding(output: Any) -> int:
    """Return the number of a step's requests if each computes its next token and none is new."""
    scheduled, tokens = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
    if drafts := output.scheduled_spec_decode_tokens:
        tokens -= sum(map(len, drafts.values()))
    return scheduled if tokens == scheduled and not output.scheduled_new_reqs else 0
