"""Loads in flight: their jobs and pinned destinations, until every worker has reported them.

A load that was given up at its deadline is still in flight: only its report is a fence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.limits import MAX_JOB_BLOCKS, MAX_SECTIONS
from kvagent.packing import Packed, packed, section
from kvagent.vllm.plan import LoadJob
from kvagent.vllm.scheduler.requests import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvagent.vllm.counters import Counts
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.options import Options
    from kvagent.vllm.scheduler.agent_session import AgentSession
    from kvagent.vllm.scheduler.requests import Blocks, Tracked
    from kvagent.vllm.scheduler.saves import Named


@dataclass(eq=False, slots=True)
class _Load:
    """A load in flight."""

    tracked: Tracked
    blocks: list[Any]
    tokens: int
    lease: int
    boot: bytes
    cancelled: bool = False


@dataclass(slots=True)
class _Run:
    """Consecutive blocks of one group, beginning with the request's block ``first``."""

    group: int
    first: int
    hashes: list[bytes]
    blocks: list[Any]


class Loads:
    """The loads. ``planned`` and ``_cancels`` wait for the next step's plan."""

    def __init__(
        self, agent: AgentSession, geometry: Geometry, options: Options, blocks: Blocks, counts: Counts
    ) -> None:
        self.job_blocks = MAX_JOB_BLOCKS
        """The most blocks that the agent accepts in one job."""
        self.planned: list[LoadJob] = []
        self.taken: list[LoadJob] = []  # by the last plan
        self._cancels: list[int] = []
        self._agent = agent
        self._geometry = geometry
        self._deadline_s = options.load_deadline_ms / 1e3
        self._blocks = blocks
        self._counts = counts
        self._inflight: dict[int, _Load] = {}
        self.named: list[Named] = []
        """Are told which blocks of a request are to be loaded: group, first block, and number."""

    def busy(self) -> bool:
        """Return whether loads are in flight or wait to be sent."""
        return bool(self._inflight or self._cancels or self.planned)

    def take(self) -> tuple[list[LoadJob], list[int]]:
        """Return the loads to start and those to cancel in the next step."""
        taken = self.taken, _ = self.planned, self._cancels
        self.planned, self._cancels = [], []
        return taken

    def plan(
        self, job: int, tracked: Tracked, tables: Sequence[Sequence[Any]], external: int, *, waits: bool = False
    ) -> None:
        """Plan the load of promised tokens; ``waits``: its step waits for it.

        It must be reported, so it is planned even if the promise is gone.
        """
        own, promise = tracked.own, tracked.asking.promised
        runs = list(self._runs(tracked, tables, own, own + external))
        blocks = [block for run in runs for block in run.blocks]
        for named in self.named:
            for run in runs:
                named(tracked, run.group, run.first, len(run.hashes))
        session = self._agent.session
        boot = session.boot if session and self._complete(tables, own + external) else b""
        lease = promise.lease if promise else 0
        ids = b"".join(block.block_id.to_bytes(4, "little") for block in blocks)
        epoch = session.epoch if session else 0
        parts = tuple(self._parts(runs, tracked.request.block_hashes))
        name, space = tracked.request.request_id, self._agent.space
        elsewhere = self._agent.targets(lease) if boot else ()
        load = LoadJob(
            job, boot, epoch, name, lease, self._deadline_s, parts, ids, space, waits, tracked.depends, elsewhere
        )  # fmt: skip
        self._blocks.pin(blocks, load=True)
        self._inflight[job] = _Load(tracked, blocks, external, lease, boot)
        self._counts.loads += 1
        self._counts.tokens_promised += external
        tracked.load, tracked.loaded, tracked.phase = job, (own, own + external), Phase.LOADED
        self.planned.append(load)

    def withdraw(self, tracked: Tracked) -> None:
        """Forget the loads of a request that no plan has yet."""
        for load in [one for one in self.planned if self._inflight[one.job].tracked is tracked]:
            self.planned.remove(load)
            self._blocks.unpin(self._inflight.pop(load.job).blocks, load=True)
            if load.lease and load.boot:
                self._agent.release(load.lease, load.boot)
            tracked.load = 0

    def cancel(self, tracked: Tracked) -> None:
        """Cancel the load of a request that has ended; the load ends with the workers' report."""
        self._inflight[tracked.load].cancelled = True
        self._cancels.append(tracked.load)

    def late(self, job: int) -> None:
        """Handle a load given up at its deadline. Several workers may report that."""
        load = self._inflight.get(job)
        if load is not None and load.tracked.load == job:
            self._counts.loads_late += 1
            load.tracked.asking.most = 0
            load.tracked.load = 0

    def report(self, job: int, statuses: bytes) -> None:
        """Handle the end of a job in all workers, if it is a load."""
        load = self._inflight.pop(job, None)
        if load is None:
            return
        self._blocks.unpin(load.blocks, load=True)
        if load.lease and load.boot:
            self._agent.release(load.lease, load.boot)
        if load.tracked.load == job:
            load.tracked.load = 0
        if not any(statuses):
            self._counts.tokens_loaded += load.tokens
        elif not load.cancelled:
            self._counts.loads_failed += 1
            load.tracked.asking.most = 0
            load.tracked.loaded = (0, 0)

    def _complete(self, tables: Sequence[Sequence[Any]], end: int) -> bool:
        """Return whether the states at ``end`` have blocks to be loaded into. Without one of them
        the load has to fail: the rest would be taken for all that the request needs.
        """
        for group in self._geometry.states:
            last, rest = divmod(end, self._geometry.groups[group].block_tokens)
            table = tables[group]
            if rest or not 0 < last <= len(table) or table[last - 1].is_null:
                return False
        return True

    def _runs(self, tracked: Tracked, tables: Sequence[Sequence[Any]], begin: int, end: int) -> Iterator[_Run]:
        """Yield the destination blocks of the tokens from begin to end, by group, without null
        blocks.
        """
        hashes = tracked.request.block_hashes
        for group, spec in enumerate(self._geometry.groups):
            scale = self._geometry.scale(group)
            run: _Run | None = None
            first, last = begin // spec.block_tokens, min(end // spec.block_tokens, len(tables[group]))
            if group in self._geometry.states:
                first = end // spec.block_tokens - 1  # the state at the end is all that is needed
            for i in range(first, last):
                block = tables[group][i]
                if block.is_null or (run is not None and len(run.blocks) >= self.job_blocks):
                    if run is not None:
                        yield run
                    run = None
                if not block.is_null:
                    run = run or _Run(group, i, [], [])
                    run.hashes.append(hashes[(i + 1) * scale - 1])
                    run.blocks.append(block)
            if run is not None:
                yield run

    def _parts(self, runs: Sequence[_Run], hashes: Sequence[bytes]) -> Iterator[Packed]:
        """Yield the runs, cut into jobs that a session accepts."""
        sections: list[bytes] = []
        blocks = 0
        for run in runs:
            if sections and (len(sections) >= MAX_SECTIONS or blocks + len(run.blocks) > self.job_blocks):
                yield packed(sections, blocks)
                sections, blocks = [], 0
            scale = self._geometry.scale(run.group)
            parent = hashes[run.first * scale - 1] if run.first else b""
            sections.append(section(run.group, parent, run.hashes, [block.block_id for block in run.blocks]))
            blocks += len(run.blocks)
        if sections:
            yield packed(sections, blocks)
