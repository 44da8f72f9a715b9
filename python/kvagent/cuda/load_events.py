"""Loads that a CUDA stream waits for: the agent records events after them, without the engine's
processor.

An event means that a load's bytes have arrived; only DONE means that they were verified. So a
stream's results after the wait are valid only once DONE arrived with OK for each block. If the
agent or its mover dies, the session ends without DONE; the driver then either fires the event or
leaves the stream waiting for ever. An engine that waits this way must therefore watch its stream,
as it does for its collectives, and exit if it is stuck (docs/decisions/2026-11-21-load-events.md).
"""

from __future__ import annotations

import struct
from typing import Protocol

from kvagent.limits import EVENT_HANDLE

WORD = 8  # bytes per event word


class EventDriver(Protocol):
    """The CUDA driver calls in use; events and streams are its handles."""

    def open_event(self, handle: bytes) -> int:
        """Open an event of another process. CudaError if that fails."""

    def wait_event(self, stream: int, event: int) -> None:
        """Make later work on the stream wait for the event's last record."""

    def destroy_event(self, event: int) -> None:
        """Close the event in this process."""


class LoadEvents:
    """The events of one registration, from ``Session.load_events``; ``words`` is its part of the
    sync region.
    """

    def __init__(self, driver: EventDriver, handles: bytes, words: memoryview) -> None:
        self._driver = driver
        self._words = words.cast("B")
        self._events: list[int] = []
        try:
            for at in range(0, len(handles), EVENT_HANDLE):
                self._events.append(driver.open_event(handles[at : at + EVENT_HANDLE]))
        except BaseException:
            self.close()
            raise

    def wait(self, stream: int, job: int) -> bool:
        """Make a stream wait for a load, if its event is recorded.

        False: it is not recorded yet, and a wait would end at once, so none is launched. Repeat
        until it is, or until DONE: the event of a load that failed or had nothing to copy is never
        recorded.
        """
        index = job % len(self._events)
        (recorded,) = struct.unpack_from("@Q", self._words, index * WORD)
        if recorded != job:
            return False
        self._driver.wait_event(stream, self._events[index])
        return True

    def close(self) -> None:
        """Close the events here, before UNREGISTER and before the session is closed."""
        while self._events:
            self._driver.destroy_event(self._events.pop())
