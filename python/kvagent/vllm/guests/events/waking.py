"""Wakes an idle engine when its agent has something to say.

vLLM's engine core steps only while it has requests or its connector has work. Else it sleeps in its
queue of input, and would publish an eviction with the next request. A thread watches the session's
socket meanwhile, without reading from it, and puts vLLM's own WAKEUP into that queue (internals).
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.session import Session


class _Watched(NamedTuple):
    session: Session | None
    timeout_s: float | None
    writes: bool
    """Whether something waits to be sent."""

    def covers(self, other: _Watched) -> bool:
        """Return whether what wakes for the other wakes for this one too, no later."""
        timed = other.timeout_s is None or self.timeout_s is not None
        return self.session is other.session and timed and self.writes >= other.writes


class Waker:
    """Watches a session's socket, once for each call of ``watch``."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        """Wakes the engine. May be called from any thread."""
        self._lock = threading.Lock()
        self._watched: _Watched | None = None
        self._closed = False
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvagent waker", daemon=True)
        self._thread.start()

    def watch(self, session: Session | None, timeout_s: float | None) -> None:
        """Wake the engine once, when the session's socket is readable or has ended, or accepts what
        waits to be sent, or after ``timeout_s``. A further call replaces what is watched.
        """
        watched = _Watched(session, timeout_s, session is not None and session.unsent())
        with self._lock:
            if self._closed or (self._watched is not None and self._watched.covers(watched)):
                return
            self._watched = watched
        self._poke()

    def close(self) -> None:
        """End the thread. Repeated calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._poke()
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _poke(self) -> None:
        try:
            os.write(self._writer, b"\0")
        except BlockingIOError:
            return  # it is full of pokes

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                watched = self._watched
            if self._wait(watched):
                with self._lock:
                    if self._watched is not watched:
                        continue
                    self._watched = None
                self.wake()

    def _wait(self, watched: _Watched | None) -> bool:
        """Return whether the engine is to be woken; False after a poke."""
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        session, timeout_s, writes = watched or _Watched(None, None, writes=False)
        if session is not None and (fd := session.fileno()) >= 0:
            poller.register(fd, select.POLLIN | (select.POLLOUT if writes else 0))
        ready = poller.poll(None if timeout_s is None else timeout_s * 1e3)
        if any(fd == self._reader for fd, _ in ready):
            os.read(self._reader, 4096)
            return False
        return True
