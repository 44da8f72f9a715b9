"""Keeps an engine without requests from spinning while a job in flight takes long.

vLLM keeps stepping while a connector expects a report or a lease. A step with requests does not
wait. Without requests, the worker waits in each step for a message of the agent, longer each time
none arrived, up to MAX_WAIT_MS, which also bounds the delay of a new request.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

FREE_STEPS = 8  # consecutive idle steps that do not wait
MAX_WAIT_MS = 10


class IdleBackoff:
    """The wait of idle steps."""

    def __init__(self) -> None:
        self._idle = 0

    @property
    def active(self) -> bool:
        """Return whether steps wait now."""
        return self._idle > FREE_STEPS

    def step(self, *, idle: bool) -> None:
        """Begin a step; ``idle``: the engine has no request."""
        self._idle = self._idle + 1 if idle else 0

    def reset(self) -> None:
        """Shorten the wait, since the agent sent a message."""
        self._idle = min(self._idle, FREE_STEPS)

    def wait(self, descriptors: Iterable[int]) -> bool:
        """Wait, if active, until a descriptor is readable. Return whether one is."""
        if not self.active:
            return False
        poller = select.poll()
        for fd in descriptors:
            poller.register(fd, select.POLLIN)
        return bool(poller.poll(min(1 << min(self._idle - FREE_STEPS - 1, 8), MAX_WAIT_MS)))
