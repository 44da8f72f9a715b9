"""Loads that a CUDA stream waits for: events that the agent records behind them, without the engine's processor.

An event says that the bytes of a load have arrived; only DONE says that they verified. So what a stream computes behind
the wait counts when DONE came with OK for each block, and not before. Where the agent or its mover dies, the session
ends and DONE never comes; what the event does then is the driver's choice: it fires, or the stream stands for ever. An
engine that waits this way therefore watches its stream as it does for its collectives, and ends itself when it stands
too long (docs/decisions/2026-11-21-load-events.md).
"""

from __future__ import annotations

import struct
from typing import Protocol

from kvagent.limits import EVENT_HANDLE

WORD = 8  # bytes of the word of an event


class EventDriver(Protocol):
    """What is asked of the CUDA driver; events and streams are its handles."""

    def open_event(self, handle: bytes) -> int:
        """An event of another process. CudaError if it cannot be opened."""

    def wait_event(self, stream: int, event: int) -> None:
        """Lets what is launched on the stream from now on wait for what the event was last recorded behind."""

    def destroy_event(self, event: int) -> None:
        """Ends the event here."""


class LoadEvents:
    """The events of one registration, by ``Session.load_events``; ``words`` is what it named of the sync region."""

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
        """Lets a stream wait for a load, if its event is recorded.

        False: it is not, and a wait would be over at once, so none is launched. Ask again until it is, or DONE says
        what became of the job: a load that failed or had nothing to copy is never recorded.
        """
        index = job % len(self._events)
        (recorded,) = struct.unpack_from("@Q", self._words, index * WORD)
        if recorded != job:
            return False
        self._driver.wait_event(stream, self._events[index])
        return True

    def close(self) -> None:
        """Ends the events here: before UNREGISTER, and before the session is closed."""
        while self._events:
            self._driver.destroy_event(self._events.pop())
