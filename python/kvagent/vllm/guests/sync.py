"""Loads that a step waits for: which ones, and what follows from their outcome.

An asynchronous load costs its request about two steps besides the copy: the load begins after the
step that plans it, and its end is known a step later. A synchronous one costs no step, but all
requests of its step wait for the copy. So it is taken only if

- the agent says that all blocks are in its memory as they were saved (status ready), so that the
  load waits for nothing and can fail only with the agent, and
- it fits in what is left of the step's sync_load_bytes.

Until the outcome is known, the request's blocks are neither hashed nor saved: the step has computed
from bytes that may not have come. The workers report it in the same pass. If the load has failed,
the request is preempted and its output dropped (internals): vLLM would recompute it in place, which
gives wrong tokens where the next step is in flight. Its blocks are withheld from the prefix cache
until its load has succeeded, else other requests would hit them.

A worker sends the loads before the step's kernels are launched. They name the step before it, whose
kernels may still write to their destination. It waits until they are over, or layer by layer until
their stages have arrived, at most sync_wait_ms for all of a step. Blocks that have not arrived by
then are reported in the same pass as failed, so that vLLM discards what the step computes from
them. An agent that let a step wait in vain is not waited for again until it has sent something.

A stage is the part of each block that a staged load copies at once. Each layer that calls the
connector before its attention is a stage of its own, in the order of the layers' numbers. All
others, such as the indexers of sparse attention and the layers of a draft model, which vLLM runs
after the step or not at all, are in the first stage, which the forward pass waits for. A layer that
did not wait may have read bytes that had not arrived. Then the load is reported as failed, and from
then on steps wait for whole loads.
"""

from __future__ import annotations

import logging
import math
import select
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent import messages as m
from kvagent.limits import MAX_SEGMENTS, MAX_STAGES
from kvagent.vllm.geometry import WITHOUT_DRAFTS, Unsupported, group_spec, window
from kvagent.vllm.hooks import Guest, Waits, WorkerGuest
from kvagent.vllm.worker.memory import WHOLE, extents
from kvagent.vllm.worker.side import InflightJob, fail_late

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvagent.session import Session
    from kvagent.shm import SyncWords
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.internals import Scheduler
    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import LoadJob, Report, StepPlan
    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.worker.memory import Extent, Found
    from kvagent.vllm.worker.side import WorkerSide
    from kvagent.wire import Packed


def token_bytes(kv_cache_config: Any) -> float:
    """Return the bytes that a rank has of a token, in all groups, as the scheduler counts them."""
    found = [(group_spec(group.kv_cache_spec), len(group.layer_names)) for group in kv_cache_config.kv_cache_groups]
    return sum(layers * int(spec.page_size_bytes) / int(spec.block_size) for spec, layers in found)


def asynchronous_only(kv_cache_config: Any) -> str:
    """Return why no step may wait for loads of this model, or an empty string."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return "the model has several KV cache groups: vLLM cannot be told which of their blocks failed to load"
    if window(groups[0].kv_cache_spec):
        return "the model's attention has a window"
    if kv_cache_config.needs_kv_cache_zeroing:
        return "vLLM zeroes new blocks in the step that would wait for their load"
    return ""


class SyncLoads(Guest, Waits):
    """The synchronous loads of an engine."""

    def __init__(self, options: Options, geometry: Geometry, token_bytes: float, preemption: Scheduler) -> None:
        """``token_bytes``: what a rank has of a token."""
        self._preemption = preemption
        self._most = options.sync_load_bytes
        self._block_tokens = geometry.groups[0].block_tokens
        self._token_bytes = token_bytes
        self._left = self._most
        self._withheld: dict[Tracked, tuple[int, int]] = {}  # the job, and the blocks that the request had itself

    def may(self, tracked: Tracked, tokens: int) -> bool:
        """Return whether a step may wait for so many tokens of a request: not of one that another
        engine is concerned with.
        """
        concerned = tracked.asking.terms.transfer or tracked.awaited
        return not concerned and tokens * self._token_bytes <= self._left

    def start(self, job: int, tracked: Tracked, tokens: int) -> None:
        """Withhold the blocks of a request that is admitted with such a load, or let another job
        stand for it.
        """
        own = tracked.own // self._block_tokens
        begun = tracked in self._withheld
        self._withheld[tracked] = job, own
        if begun:
            return
        self._preemption.withhold(tracked.request.request_id, own)
        self._left -= int(tokens * self._token_bytes)
        self.side.counts.loads_sync += 1

    def planned(self, plan: StepPlan, output: Any, now: float) -> None:  # noqa: ARG002
        """Let the next step wait for as many bytes again."""
        self._left = self._most

    def lost(self, tracked: Tracked) -> None:
        """Handle the loss of a request's blocks before the outcome of its load is known."""
        if self._withheld.pop(tracked, None) is not None:
            self._preemption.drop_output(tracked.request.request_id)

    def over(self, tracked: Tracked, *, normally: bool) -> bool:
        """Handle a request's end. Return whether that shows that its load has succeeded.

        vLLM delivers no output of a step that reports bad blocks of the request, so a request that
        ends by its output has all of them.
        """
        withheld = self._withheld.pop(tracked, None)
        if withheld is None or not normally:
            return False
        self._preemption.publish(tracked.request.request_id, withheld[1], now=True)
        return True

    def settle(self, report: Report, world: int) -> Iterator[tuple[Tracked, bool]]:
        """Yield the requests whose load is over, and whether it has succeeded. One that failed has
        been preempted.
        """
        for tracked, (job, own) in list(self._withheld.items()):
            outcome, late = report.outcomes.get(job), job in report.late
            if outcome is None and not late:
                continue
            del self._withheld[tracked]
            name = tracked.request.request_id
            if not late and outcome is not None and outcome.ranks == world and not any(outcome.statuses):
                self._preemption.publish(name, own)
                yield tracked, True
                continue
            self.side.counts.loads_sync_failed += 1
            if self._preemption.preempt(name):
                yield tracked, False


_CALLING = ("Attention", "MLAAttention")  # vLLM's classes whose forward calls wait_for_layer_load
_DRAFT_MODEL = "draft_model"  # the speculation method, and the first part of its layers' names

log = logging.getLogger("vllm.kvagent")


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a worker's segments."""

    segments: bytes
    """The stage of each segment, u16 LE, in the order of the registration."""
    needed: Mapping[str, int]
    """By layer that waits: how many stages must have arrived."""
    first: int
    """How many stages must have arrived before the forward pass: 1, or 0 if all layers wait."""
    count: int


def calling_layers(vllm_config: Any) -> frozenset[str]:
    """Return the names of the layers of this process that call wait_for_layer_load in the forward
    pass of a step: none, with a draft model whose layers are named like the model's own.
    """
    method = str(getattr(getattr(vllm_config, "speculative_config", None), "method", None) or "")
    if method and method not in (*WITHOUT_DRAFTS, _DRAFT_MODEL):
        log.warning(
            "layerwise: has no effect with speculative_config.method %s, whose layers cannot be told from the model's: "
            "steps wait for whole loads",
            method,
        )
        return frozenset()
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    return frozenset(
        name
        for name, layer in layers.items()
        if any(cls.__name__ in _CALLING for cls in type(layer).__mro__) and name.split(".")[0] != _DRAFT_MODEL
    )


def staged(
    kv_caches: Mapping[str, Any], groups: Sequence[Sequence[str]], num_blocks: int,
    storages: dict[int, tuple[int, Any]], *, calling: frozenset[str],
) -> Found:  # fmt: skip
    """Return the extents of the only group, cut at the layers, so that a block has the same bytes,
    and their stages. ``calling``: the layers that wait for their part of a load.
    """
    if len(groups) != 1:
        raise Unsupported(f"layerwise: {len(groups)} KV cache groups, allowed is 1")
    missing = [name for name in groups[0] if name not in kv_caches]
    if missing:
        raise Unsupported(f"group 0: layer {missing[0]} has no KV cache here")
    layers = {name: list(extents(name, kv_caches[name], num_blocks, storages)) for name in groups[0]}
    found, stages = stages_of(layers, calling)
    return {WHOLE: {0: found}}, stages


def stages_of(layers: Mapping[str, Sequence[Extent]], calling: frozenset[str]) -> tuple[list[Extent], Stages]:
    """Return the extents of a group's layers in memory order, not merged, and their stages. Layers
    that share memory share the stage of the first of them.
    """
    order = sorted((name for name in layers if name in calling), key=_position)
    first = int(any(name not in calling for name in layers))
    number = {name: first + i for i, name in enumerate(order)}
    stage: dict[Extent, int] = {}
    for name, some in layers.items():
        for extent in some:
            stage[extent] = min(stage.get(extent, MAX_STAGES), number.get(name, 0))
    found = sorted(stage, key=lambda p: (p.storage, p.stride, p.offset))
    count = first + len(order)
    if count > MAX_STAGES or len(found) > MAX_SEGMENTS:
        raise Unsupported(
            f"layerwise: {count} layers in {len(found)} runs, allowed is 1 to {MAX_STAGES} in {MAX_SEGMENTS}: use a "
            "layout with heads outside of tokens, or larger blocks"
        )
    needed = {name: 1 + max(stage[extent] for extent in layers[name]) for name in order}
    return found, Stages(struct.pack(f"<{len(found)}H", *(stage[p] for p in found)), needed, first, count)


def _position(name: str) -> tuple[list[int], str]:
    """Return a layer's place among the others: by the numbers in its name."""
    return [int(part) for part in name.split(".") if part.isdigit()], name


class LayerLoads:
    """The staged loads of a worker."""

    def __init__(self, stages: Stages, words: SyncWords) -> None:
        self._stages = stages
        self._landed = words.landed
        self._off = words.stages_off
        self._free = list(range(len(words.landed)))
        self._words: dict[int, int] = {}  # by load, while it is at the agent
        self._declared: Session | None = None  # to which the stages were declared
        self._expected: set[str] = set()
        self._broken = False

    def send(self, session: Session, load: LoadJob, sections: Packed, *, step: int, event: int) -> int | None:
        """Send a load. Return the job's number in the session, or None if it cannot be staged, as
        one of several parts: then nothing was sent.
        """
        if self._broken or not self._free or len(load.parts) > 1:
            return None
        if self._declared is not session:
            session.send(m.Stages(self._off, len(self._landed), self._stages.segments))
            self._declared = session
        word = self._free[-1]
        self._landed[word] = 0
        number = session.staged_load(sections, epoch=load.epoch, step=step, event=event, lease=load.lease, word=word)
        self._words[load.job] = self._free.pop()
        return number

    def over(self, job: int) -> None:
        """Free the word of a load that is over, so that the agent does not write it any more."""
        if (word := self._words.pop(job, None)) is not None:
            self._free.append(word)

    def begin(self) -> None:
        """Expect all layers of the step to wait."""
        if not self._broken:
            self._expected = set(self._stages.needed)

    def end(self) -> bool:
        """End the step. Return whether all layers that were expected to have waited."""
        missing, self._expected = self._expected, set()
        if missing:
            self._broken = True
            log.error(
                "layerwise: %d layers, such as %s, did not wait for their part of a load: the load is computed, and "
                "from now on steps wait for whole loads",
                len(missing), min(missing),
            )  # fmt: skip
        return not missing

    def waits(self, layer: str) -> bool:
        """Return whether a layer has to wait, and note that it does."""
        if not self._expected:
            return False
        self._expected.discard(layer)
        return True

    def usable(self, job: int, layer: str = "") -> bool:
        """Return whether a layer's part of a load has arrived, or all that no layer waits for."""
        word, stages = self._words.get(job), self._stages
        needed = stages.needed.get(layer, stages.count) if layer else stages.first
        return word is not None and self._landed[word] >= needed


FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 320e-6  # between two looks at words, which nothing announces


class StepWaits(WorkerGuest):
    """The loads that a worker's steps wait for, as a whole or, with ``stages``, layer by layer.
    They are sent first: one that names this step would be in their way.
    """

    def __init__(self, wait_s: float, stages: Stages | None = None) -> None:
        self._wait_s = wait_s
        self._stages = stages
        self._open: list[LoadJob] = []  # the loads that the step in progress waits for, layer by layer
        self._silent = False
        self._waited: list[int] = []  # the step's loads that are neither over nor given up
        self._left_s = 0.0  # how long this step may still wait

    def join(self, side: WorkerSide) -> None:
        """Begin with the side."""
        super().join(side)
        self.layers = None if self._stages is None else LayerLoads(self._stages, side.words)

    def start(self, plan: StepPlan, loads: Sequence[LoadJob]) -> Sequence[LoadJob]:
        """Send the loads that the step waits for, and wait, or let its layers wait."""
        if sync := [load for load in loads if load.sync]:
            self._left_s = self._wait_s
            for load in sync:
                self._submit(load, None if plan.stopped or self._silent else self.side.step - 1)
            self._waited = [load.job for load in sync if load.job in self.side.jobs]
            self.wait(None if self.layers is None else self.layers.usable)
            if self.layers is not None:
                self._open = sync
                if self._waited:
                    self.layers.begin()
        return [load for load in loads if not load.sync]

    def send(self, session: Session, load: LoadJob, sections: Packed, *, step: int, event: int) -> int | None:
        """Send a part of a load by stages."""
        if not load.sync or self.layers is None:
            return None
        return self.layers.send(session, load, sections, step=step, event=event)

    def layer(self, name: str) -> None:
        """Wait for a layer's part of the loads that this step waits for."""
        layers = self.layers
        if layers is not None and layers.waits(name):
            self.wait(lambda job: layers.usable(job, name))

    def heard(self) -> None:
        """Wait for the agent again."""
        self._silent = False

    def over(self, job: int) -> None:
        """Free what counts the stages of a load."""
        if self.layers is not None:
            self.layers.over(job)

    def end(self) -> None:
        """End the step's waiting layer by layer, after its layers."""
        if not self._open or self.layers is None:
            return
        loads, self._open = self._open, []
        self.wait()
        if not self.layers.end():
            for load in loads:
                fail_late(self.side, InflightJob(load, None))

    def wait(self, usable: Callable[[int], bool] | None = None) -> None:
        """Wait until each of the loads is over, or usable. Give up those that are not in time."""
        pause_s = FIRST_PAUSE_S
        left = self._unusable(usable)
        while left and self._left_s > 0:
            begin = time.monotonic()
            if usable is None:
                self._listen()
            else:
                time.sleep(min(pause_s, LONGEST_PAUSE_S))
                pause_s *= 2
            self.side.poll()
            self._left_s -= time.monotonic() - begin
            left = self._unusable(usable)
        for job in left:
            self.side.give_up(job)
            self._waited.remove(job)
            self._silent = True

    def _submit(self, load: LoadJob, step: int | None) -> None:
        """Send a load that names a step; without one it fails at once."""
        if step is None:
            self.side.fail(load)
        else:
            self.side.submit(load, step)

    def _unusable(self, usable: Callable[[int], bool] | None) -> list[int]:
        self._waited = [job for job in self._waited if job in self.side.jobs]
        return [job for job in self._waited if usable is None or not usable(job)]

    def _listen(self) -> None:
        poller = select.poll()
        for fd in self.side.descriptors():
            poller.register(fd, select.POLLIN)
        poller.poll(math.ceil(self._left_s * 1e3))
