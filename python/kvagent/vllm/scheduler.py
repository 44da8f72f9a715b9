"""The scheduler's side: how much of a prompt the agent has, which blocks a step saves and loads, and what is pinned.

It is called by vLLM's scheduler, from one thread, and never waits but for the first answer to a look-up (asking). Of
vLLM's objects it uses attributes only, so it needs no vllm to be imported.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvagent import messages as m
from kvagent.errors import Busy, KVAgentError, SessionBroken, SessionEnded, TimedOut
from kvagent.lookup import LookupStatus
from kvagent.vllm.asking import Asker
from kvagent.vllm.blocks import Blocks, Tables
from kvagent.vllm.plan import LoadJob, Outcome, Report, StepPlan
from kvagent.vllm.saves import Saves
from kvagent.vllm.tracked import ANSWER_S, Asked, Tracked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.link import Attachment, Link
    from kvagent.vllm.options import Options

RESET_S = 5.0  # for the agent's answer to a reset

log = logging.getLogger("kvagent.vllm")


@dataclass(eq=False, slots=True)
class _Load:
    """A load under way: its destination is pinned until every worker has reported it."""

    tracked: Tracked
    blocks: list[Any]
    hashes: list[bytes]
    tokens: int
    lease: int
    boot: bytes
    outcome: Outcome | None = None
    cancelled: bool = False


@dataclass(slots=True)
class Counts:
    """What the scheduler's side did."""

    lookups: int = 0
    lookups_unanswered: int = 0
    loads: int = 0
    loads_failed: int = 0
    loads_late: int = 0
    tokens_promised: int = 0
    tokens_loaded: int = 0


class SchedulerSide:
    """See the module."""

    def __init__(
        self,
        options: Options,
        geometry: Geometry,
        world: int,
        link: Link,
        *,
        saves: bool,
        loads: bool,
        whole_failures: bool,
    ) -> None:
        """``whole_failures``: a load can be reported as failed as a whole (vLLM from 0.30 on)."""
        self.counts = Counts()
        self._options = options
        self._geometry = geometry
        self._world = world
        self._reset_owed = False  # a reset that the agent did not hear: it comes first in the next session
        self._link = link
        self._may_save = saves
        self._may_load = loads
        self._whole_failures = whole_failures
        self._attachment: Attachment | None = None
        self._asker: Asker | None = None
        self._on = m.Switches(1, 1)
        self._tracked: dict[str, Tracked] = {}
        self._loads: dict[int, _Load] = {}
        self._planned: list[LoadJob] = []
        self._cancels: list[int] = []
        self._revokes: list[int] = []
        self._ended: list[tuple[Tracked, int]] = []
        self._next_job = 0
        self.tables = Tables()
        self.blocks: Blocks | None = None
        self.saves: Saves | None = None

    def bind(self, pool: Any, manager: Any = None) -> None:
        """Takes vLLM's block pool, and its KV cache manager where there is one to take."""
        if self.blocks is None:
            self.blocks = Blocks(pool, self._options.pin_percent / 100)
            self.saves = Saves(self._geometry, self._world, self.blocks, self.tables)
            self.blocks.before_reset(self._before_reset)
        self.tables.bind(pool, manager)

    def use_words(self, revoke: Callable[[int], None]) -> None:
        """Takes the way to set a revocation word in all workers at once."""
        if self.saves is not None:
            self.saves.revoke_now = revoke

    def on_new_request(self, request: Any) -> None:
        """Tells the agent what will be asked for."""
        tracked = self._track(request)
        self._attend()
        if self._asker is not None and self._usable(tracked) and request.block_hashes:
            self._asker.probe(request.num_tokens, request.block_hashes)

    def matched(self, request: Any, own: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``own`` will be loaded. None: not known yet."""
        tracked = self._track(request)
        if not self._usable(tracked) or (own and not self._whole_failures):
            return 0, False
        if self._asker is None or (request.num_tokens - 1) // self._geometry.align * self._geometry.align <= own:
            return 0, False
        now = time.monotonic()
        tracked.own = own
        asked = tracked.asked
        if asked is None or own < asked.own or now - asked.at > ANSWER_S:
            if not self._ask(tracked, own, now):
                return None, False
            asked = tracked.asked
        tokens = self._promise(tracked, asked.tokens if asked else 0, own, now)
        return (tokens, True) if tokens else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The request was let in: with ``external`` tokens to be loaded, or with none."""
        tracked = self._track(request)
        self._drop_ticket(tracked)
        if external <= 0:
            self._forget(tracked)
            return
        asked, tracked.asked = tracked.asked, None
        self._plan_load(tracked, blocks.blocks, tracked.own, external, asked)

    def plan(self, output: Any) -> StepPlan:
        """The plan of the step that ``output`` describes."""
        self._attend()
        now = time.monotonic()
        preempted = getattr(output, "preempted_req_ids", None) or ()
        for request in preempted:
            self.tables.forget(request)
            if tracked := self._tracked.get(request):
                tracked.begin_again()
        self.tables.take(getattr(output, "kv_connector_block_state", None))
        plan = StepPlan(loads=self._planned, cancels=self._cancels, revokes=self._revokes)
        self._planned, self._cancels, self._revokes = [], [], []
        if self.saves is not None and self.blocks is not None:
            short = bool(preempted) or self.blocks.scarce()
            if short and self.saves.busy():
                plan.revokes += self.saves.revoke()
            plan.saves = self._plan_saves(output, now, allowed=not short)
        if self._asker is not None:
            self._asker.new_step()
        return plan

    def report(self, report: Report) -> None:
        """Takes the workers' report."""
        now = time.monotonic()
        for job in report.late:
            if load := self._loads.get(job):
                self.counts.loads_late += 1
                load.tracked.no_load = True
                load.tracked.load = 0
        for job, outcome in report.outcomes.items():
            if self.saves is not None and not self.saves.report(job, outcome, now) and job in self._loads:
                self._load_report(job, outcome, now)

    def finished(self, request: Any, *, normally: bool) -> None:
        """The request is over; its blocks are free when this returns, but for what is pinned."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self._forget(tracked)
        self._drop_ticket(tracked)
        if tracked.load:
            self._loads[tracked.load].cancelled = True
            self._cancels.append(tracked.load)
        elif normally and self._saving(tracked) and self.saves is not None:
            # The last token was never fed, and async scheduling may have a step too many under way.
            tokens = min(request.num_computed_tokens, self._limit(request), request.num_tokens - 1)
            if tokens >= tracked.next_tokens and self.saves.ready():
                self.saves.add(tracked, tokens, time.monotonic())
        self.tables.forget(request.request_id)

    def reset(self) -> bool:
        """Starts a new weights epoch. False: the agent did not answer; it hears of it before it is used again."""
        self.new_weights()
        attachment = self._attachment
        if attachment is None:
            self._reset_owed = True
            return True  # nothing is loaded before it is done
        try:
            attachment.session.reset(RESET_S)
            self._reset_owed = False
        except (KVAgentError, OSError) as error:
            log.warning("reset: %s; it is owed", error)
            self._reset_owed = True
            self._detach()
            return False
        return True

    def new_weights(self) -> None:
        """What was computed until now is not saved any more, and promises are void."""
        for tracked in self._tracked.values():
            self._forget(tracked)
            self._drop_ticket(tracked)
        if self.blocks is not None and self.saves is not None:
            self.blocks.new_weights()
            self.saves.forget()

    def pending(self) -> bool:
        """Whether steps are needed though no request is there: something is still to be reported."""
        return bool(self._loads or self._cancels or self._planned or (self.saves is not None and self.saves.busy()))

    def counted(self) -> dict[str, int]:
        """All counters by name."""
        counted = {field.name: getattr(self.counts, field.name) for field in fields(self.counts)}
        if self.saves is not None:
            counts = self.saves.counts
            counted |= {f"saves_{field.name}": getattr(counts, field.name) for field in fields(counts)}
        return counted

    def close(self) -> None:
        """Leaves the agent. Leases end with the session."""
        self._detach()
        if last := self._link.close():
            last.session.close()

    # Sessions.

    def _attend(self) -> None:
        """Takes up a new session, and what the present one has to say."""
        current = self._link.current()
        if current is not self._attachment:
            self._attach(current)
        if self._attachment is None:
            return
        try:
            for event in self._attachment.session.poll():
                if isinstance(event, m.Epoch):
                    self.new_weights()
                elif isinstance(event, m.Switches):
                    self._on = event
        except (SessionEnded, SessionBroken):
            self._detach()

    def _attach(self, attachment: Attachment | None) -> None:
        self._detach()
        if attachment is None:
            return
        self._attachment = attachment
        if self._reset_owed and not self.reset():
            return
        self._on = m.Switches(1, 1)
        self._asker = Asker(attachment, self._options.lookup_wait_ms / 1e3, self._options.lookup_age_ms / 1e3)
        if self.saves is not None:
            self.saves.forget()
            self.saves.revocable = attachment.session.version > 1
        for tracked in self._tracked.values():  # a new agent may have nothing: all is offered again
            tracked.begin_again()

    def _detach(self) -> None:
        attachment, self._attachment = self._attachment, None
        if self._asker is not None:
            self._asker.close()
            self._asker = None
        for tracked in self._tracked.values():
            tracked.asked = None
            tracked.ticket = None
        if attachment is not None:
            self._link.lost(attachment)
            attachment.session.close()  # a scheduler has no memory to be fenced

    # Look-ups.

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            # A hash holds only the name of a LoRA adapter, not what is in it.
            bypass = getattr(request, "lora_request", None) is not None
            tracked = Tracked(request, bypass, [0] * len(self._geometry.groups), self._geometry.hash_tokens)
            self._tracked[request.request_id] = tracked
        return tracked

    def _usable(self, tracked: Tracked) -> bool:
        return (
            self._may_load
            and self._on.loads == 1
            and not (tracked.bypass or tracked.no_load or tracked.load)
            and not getattr(tracked.request, "skip_reading_prefix_cache", False)
        )

    def _ask(self, tracked: Tracked, own: int, now: float) -> bool:
        """Asks, or looks for the answer to what was asked. False: not known yet."""
        asker, request = self._asker, tracked.request
        if asker is None:
            return True
        first = tracked.ticket is None
        if first:
            self._forget(tracked)
            if asker.silent() or not request.block_hashes:
                return True
            self.counts.lookups += 1
            tracked.ticket = asker.ask(request.num_tokens, own, request.block_hashes)
            if tracked.ticket is None:
                tracked.asked = Asked(0, 0, 0, now)
                return True
        assert tracked.ticket is not None
        try:
            answer = asker.answer(tracked.ticket, first=first)
        except TimedOut:
            self.counts.lookups_unanswered += 1
            tracked.ticket = None
            tracked.asked = Asked(0, 0, 0, now)
            return True
        if answer is None:
            return False
        tracked.ticket = None
        hit = answer.status == LookupStatus.HIT and answer.lease != 0
        tracked.asked = Asked(own, answer.tokens if hit else 0, answer.lease, now)
        return True

    def _promise(self, tracked: Tracked, tokens: int, own: int, now: float) -> int:
        """Cuts an answer: never the last token, whole blocks of every group, nothing behind a key that failed."""
        align = self._geometry.align
        tokens = min(tokens, tracked.request.num_tokens - 1) // align * align
        if tracked.failed:
            size, hashes = self._geometry.hash_tokens, tracked.request.block_hashes
            for i in range(own // size, tokens // size):
                if tracked.failing(hashes[i], now):
                    tokens = i * size // align * align
                    break
        return tokens - own if tokens - own >= self._options.min_load_tokens else 0

    def _forget(self, tracked: Tracked) -> None:
        """Drops an answer and gives its lease back."""
        asked, tracked.asked = tracked.asked, None
        if asked is not None and asked.lease:
            self._release(asked.lease)

    def _drop_ticket(self, tracked: Tracked) -> None:
        if tracked.ticket is not None and self._asker is not None:
            self._asker.abandon(tracked.ticket)
        tracked.ticket = None

    def _release(self, lease: int) -> None:
        if self._attachment is not None:
            with contextlib.suppress(Busy, SessionEnded, SessionBroken):  # it ends with the session
                self._attachment.session.release([lease])

    # Loads.

    def _plan_load(
        self, tracked: Tracked, tables: Sequence[Sequence[Any]], own: int, external: int, asked: Asked | None
    ) -> None:
        """Plans the load of what was promised, though it be less. It must be reported, so it is planned in any case."""
        sections: list[m.Section] = []
        pinned: list[Any] = []
        keys: list[bytes] = []
        hashes = tracked.request.block_hashes
        for group, spec in enumerate(self._geometry.groups):
            scale = self._geometry.scale(group)
            run: list[tuple[bytes, Any]] = []
            first = 0
            end = (own + external) // spec.block_tokens
            for i in range(own // spec.block_tokens, end + 1):
                block = tables[group][i] if i < min(end, len(tables[group])) else None
                if block is not None and not block.is_null:
                    first = i if not run else first
                    run.append((hashes[(i + 1) * scale - 1], block))
                elif run:
                    parent = hashes[first * scale - 1] if first else b""
                    sections.append(
                        m.Section.of(group, [key for key, _ in run], [block.block_id for _, block in run], parent)
                    )
                    keys += [key for key, _ in run]
                    pinned += [block for _, block in run]
                    run = []
        self._next_job += 1
        lease = asked.lease if asked else 0
        session = self._attachment.session if self._attachment else None
        boot = session.boot if session else b""
        if self.blocks is not None:
            self.blocks.pin(pinned, load=True)
        self._loads[self._next_job] = _Load(tracked, pinned, keys, external, lease, boot)
        self.counts.loads += 1
        self.counts.tokens_promised += external
        tracked.load = self._next_job
        tracked.loaded = (own, own + external)
        self._planned.append(
            LoadJob(
                self._next_job, boot, session.epoch if session else 0, tracked.request.request_id, lease,
                self._options.load_deadline_ms / 1e3, tuple(sections),
            )
        )  # fmt: skip

    def _load_report(self, job: int, outcome: Outcome, now: float) -> None:
        load = self._loads[job]
        load.outcome = outcome if load.outcome is None else load.outcome.join(outcome)
        if load.outcome.ranks < self._world:
            return
        del self._loads[job]
        if self.blocks is not None:
            self.blocks.unpin(load.blocks, load=True)
        if self._attachment is not None and load.lease and self._attachment.session.boot == load.boot:
            self._release(load.lease)
        tracked = load.tracked
        if tracked.load == job:
            tracked.load = 0
        failed = [key for key, status in zip(load.hashes, load.outcome.statuses, strict=False) if status != 0]
        if failed and not load.cancelled:
            self.counts.loads_failed += 1
            tracked.fail(failed, now)
            tracked.loaded = (0, 0)
        elif not failed:
            self.counts.tokens_loaded += load.tokens

    # Saves.

    def _saving(self, tracked: Tracked) -> bool:
        return self._may_save and self._on.saves == 1 and self._attachment is not None and not tracked.bypass

    def _limit(self, request: Any) -> int:
        """Tokens of a request that may be saved at all."""
        return int(request.num_tokens if self._options.save_decode else request.num_prompt_tokens)

    def _plan_saves(self, output: Any, now: float, *, allowed: bool) -> list[Any]:
        saves = self.saves
        if saves is None:
            return []
        saves.begin()
        if self._attachment is None:
            saves.drop()
            return []
        if allowed and self._may_save and self._on.saves and saves.ready():
            tracked_of = self._tracked
            for request_id, scheduled in output.num_scheduled_tokens.items():
                tracked = tracked_of.get(request_id)
                # Most requests are sorted out by what is at most computed: this is done for all of them in every step.
                if tracked is None or tracked.request.num_computed_tokens + scheduled < tracked.next_tokens:
                    continue
                if tracked.bypass:
                    continue
                tokens = settled(tracked.request, scheduled)
                if tokens >= tracked.next_tokens:
                    saves.add(tracked, min(tokens, self._limit(tracked.request)), now)
        return saves.finish(self._new_job, self._attachment.session.boot, self._attachment.session.epoch)

    def _new_job(self) -> int:
        self._next_job += 1
        return self._next_job

    def _before_reset(self) -> None:
        """The prefix cache is to be reset: only then are all pins of saves given back between two steps."""
        if self.saves is not None:
            self._revokes += self.saves.revoke_at_once()


def settled(request: Any, scheduled: int) -> int:
    """The tokens whose KV is final once the step that computes ``scheduled`` more has ended.

    Not the placeholders of async scheduling, nor draft tokens: what is behind the known tokens may be taken back.
    """
    tokens: int = request.num_computed_tokens + scheduled - request.num_output_placeholders
    return int(min(tokens, request.num_tokens))
