"""Loads that a step waits for: the requests that they are for compute in the same step.

They are sent before the step's kernels are launched and name the step before it, whose kernels may
still write to their destination. The worker waits until they are over, or layer by layer until
their stages have arrived (layers), at most sync_wait_ms for all of a step. Blocks that
have not arrived by then are reported in the same pass as failed to load, so that vLLM discards
what the step computes from them (sync.scheduler).

An agent that let a step wait in vain is not waited for again until it has sent something.
"""

from __future__ import annotations

import math
import select
import time
from typing import TYPE_CHECKING

from kvagent.vllm.guests.sync.layers import LayerLoads
from kvagent.vllm.worker.guest import WorkerGuest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.packing import Packed
    from kvagent.session import Session
    from kvagent.vllm.guests.sync.stages import Stages
    from kvagent.vllm.plan import LoadJob, StepPlan
    from kvagent.vllm.worker.side import WorkerSide

FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 320e-6  # between two looks at words, which nothing announces


class StepWaits(WorkerGuest):
    """The loads that a worker's steps wait for, as a whole or, with ``stages``, layer by layer.

    A load that is waited for precedes the step's kernels and names the step before it; it is sent
    first, since one that names this step would be in its way.
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
            self._send(sync, self.side.step - 1, stopped=plan.stopped)
            self.wait(None if self.layers is None else self.layers.usable_before)
            if self.layers is not None:
                self._open = sync
                if self._waited:
                    self.layers.begin()
        return [load for load in loads if not load.sync]

    def send(
        self, session: Session, load: LoadJob, sections: Packed, *, step: int, event: int
    ) -> int | None:  # fmt: skip
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
                self.side.fail_blocks(load)

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

    def _send(self, loads: Sequence[LoadJob], step: int, *, stopped: bool) -> None:
        """Send the loads. ``step``: the one before the step that waits. ``stopped``: the agent does
        not respond.
        """
        self._left_s = self._wait_s
        sent = not (stopped or self._silent)
        for load in loads:
            self._submit(load, step if sent else None)
        self._waited = [load.job for load in loads if load.job in self.side.jobs]

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
