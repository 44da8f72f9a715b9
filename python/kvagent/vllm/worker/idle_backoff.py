"""Keeps an engine without requests from spinning while something is under way that takes long.

vLLM steps as long as a connector says that something is to be reported, or to be given back. While a request is there
a step does not wait.
Without one, the worker waits in it for a message of the agent, longer each time in which none came, never longer than
LAST_MS: that is also the longest that a new request is kept waiting.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

FREE_STEPS = 8  # idle steps in a row that do not wait
MAX_WAIT_MS = 10


class IdleBackoff:
    """See the module."""

    def __init__(self) -> None:
        self._idle = 0

    @property
    def active(self) -> bool:
        """Whether the time to wait has come."""
        return self._idle > FREE_STEPS

    def step(self, *, idle: bool) -> None:
        """Begins a step, in which the engine has no request, or has."""
        self._idle = self._idle + 1 if idle else 0

    def reset(self) -> None:
        """The agent said something."""
        self._idle = min(self._idle, FREE_STEPS)

    def wait(self, descriptors: Iterable[int]) -> bool:
        """Waits, if the time for it has come, until one of them can be read. Whether that may be."""
        if not self.active:
            return False
        poller = select.poll()
        for fd in descriptors:
            poller.register(fd, select.POLLIN)
        return bool(poller.poll(min(1 << min(self._idle - FREE_STEPS - 1, 8), MAX_WAIT_MS)))
