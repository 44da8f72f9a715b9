"""Loads that a step waits for: the requests that they are for compute in the same step.

They are sent before the step's kernels are launched and name the step before it, whose kernels may
still write to their destination. The worker waits until they are over, at most sync_wait_ms for all
of a step. What has not arrived by then is reported in the same pass as blocks that failed to load,
so that vLLM discards what the step computes from them (scheduler.sync_loads).

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

    def heard(self) -> None:
        """Record a message of the agent, or the end of its session."""
        self._silent = False

    def run(self, loads: Sequence[LoadJob], step: int, *, stopped: bool) -> float:
        """Send the loads and wait for them. Return the time it took, in seconds.

        ``step``: the one before the step that waits. ``stopped``: the agent does not respond.
        """
        begin = time.monotonic()
        sent = not (stopped or self._silent)
        for load in loads:
            self._submit(load, step if sent else None)
        left = self._pending(load.job for load in loads)
        deadline = begin + self._wait_s
        while left and (wait_s := deadline - time.monotonic()) > 0:
            self._wait(wait_s)
            self._poll()
            left = self._pending(left)
        for job in left:
            self._give_up(job)
        self._silent = self._silent or bool(left)
        return time.monotonic() - begin

    def _wait(self, wait_s: float) -> None:
        poller = select.poll()
        for fd in self._descriptors():
            poller.register(fd, select.POLLIN)
        poller.poll(math.ceil(wait_s * 1e3))
