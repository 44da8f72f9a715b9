"""Loads that a step waits for: the requests that they are for compute in the same step.

They are sent before the step's kernels are launched and name the step before it, whose kernels may
still write to their destination. The worker waits until they are over, or layer by layer until
their stages have arrived (layer_loads), at most sync_wait_ms for all of a step. Blocks that
have not arrived by then are reported in the same pass as failed to load, so that vLLM discards
what the step computes from them (scheduler.sync_loads).

An agent that let a step wait in vain is not waited for again until it has sent something.
"""

from __future__ import annotations

import math
import select
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvagent.vllm.plan import LoadJob

FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 320e-6  # between two looks at words, which nothing announces


class SyncLoads:
    """The waiting of a worker's steps.

    ``submit`` sends a load that names a step, or reports its failure at once if the step is None.
    ``poll`` reads messages. ``pending`` returns which of these loads are not over. ``give_up``
    reports a load as failed though it is in flight. ``descriptors`` become readable with a message.
    """

    def __init__(
        self, wait_s: float, *, submit: Callable[[LoadJob, int | None], None], poll: Callable[[], None],
        pending: Callable[[Iterable[int]], list[int]], give_up: Callable[[int], None],
        descriptors: Callable[[], Iterable[int]],
    ) -> None:  # fmt: skip
        self._wait_s = wait_s
        self._submit = submit
        self._poll = poll
        self._pending = pending
        self._give_up = give_up
        self._descriptors = descriptors
        self._silent = False
        self._waited: list[int] = []  # the step's loads that are neither over nor given up
        self._left_s = 0.0  # how long this step may still wait

    def heard(self) -> None:
        """Record a message of the agent, or the end of its session."""
        self._silent = False

    def run(self, loads: Sequence[LoadJob], step: int, *, stopped: bool) -> float:
        """Send the loads and wait for them. Return the time it took, in seconds.

        ``step``: the one before the step that waits. ``stopped``: the agent does not respond.
        """
        begin = time.monotonic()
        self.begin(loads, step, stopped=stopped)
        self.wait()
        return time.monotonic() - begin

    def begin(self, loads: Sequence[LoadJob], step: int, *, stopped: bool) -> None:
        """Send the loads, without waiting."""
        self._left_s = self._wait_s
        sent = not (stopped or self._silent)
        for load in loads:
            self._submit(load, step if sent else None)
        self._waited = self._pending(load.job for load in loads)

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
            self._poll()
            self._left_s -= time.monotonic() - begin
            left = self._unusable(usable)
        for job in left:
            self._give_up(job)
            self._waited.remove(job)
            self._silent = True

    @property
    def waiting(self) -> bool:
        """Whether a load of the step is neither over nor given up."""
        return bool(self._waited)

    @property
    def waited_s(self) -> float:
        """How long the step has waited."""
        return self._wait_s - self._left_s

    def _unusable(self, usable: Callable[[int], bool] | None) -> list[int]:
        self._waited = self._pending(self._waited)
        return [job for job in self._waited if usable is None or not usable(job)]

    def _listen(self) -> None:
        poller = select.poll()
        for fd in self._descriptors():
            poller.register(fd, select.POLLIN)
        poller.poll(math.ceil(self._left_s * 1e3))
