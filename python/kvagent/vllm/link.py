"""Keeps a session with the agent: connects and registers in a thread of its own, whenever the last one ended.

The engine's thread never waits: it asks ``current``, and says ``lost`` when a session has ended. While there is no
agent it costs one attribute.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvagent.errors import KVAgentError, Refused
from kvagent.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.messages import Registered
    from kvagent.registration import Registration

CONNECT_S = 2.0  # for connecting, and for the answer to HELLO
REGISTER_S = 30.0
PAUSE_FIRST_S = 0.05  # between tries; doubled up to the last
PAUSE_LAST_S = 0.5
PAUSE_REFUSED_S = 5.0  # the same where the agent says no: what it refuses seldom changes
LISTEN_STEPS = 4  # steps; the agent is listened to in one of so many where nothing is to come from it
MOVE_S = 30.0  # after renew, for which a refusal is no surprise: other parts of the engine may be on their way
JOIN_S = 5.0  # for the thread at the end

log = logging.getLogger("kvagent.vllm")


@dataclass(eq=False, slots=True)
class Attachment:
    """A registered session. The engine's thread owns it."""

    session: Session
    registered: Registered


class Link:
    """See the module."""

    def __init__(self, socket_dir: str, owner: str, registration: Callable[[], Registration]) -> None:
        self._path = Path(socket_dir) / "session.sock"
        self._owner = owner
        self._registration = registration
        self._current: Attachment | None = None
        self._wanted = threading.Event()
        self._ready = threading.Event()
        self._closed = threading.Event()
        self._last_log = ""
        self._refused = False  # the last try
        self._lock = threading.Lock()
        self._serial = 0  # of renewals; with _current and _held under the lock where the thread writes
        self._held = False
        self._moving_until = 0.0
        self._wanted.set()
        self._thread = threading.Thread(target=self._run, name=f"kvagent {owner}", daemon=True)
        self._thread.start()

    def current(self) -> Attachment | None:
        """The session, if there is one."""
        return self._current

    def wait(self, timeout_s: float) -> Attachment | None:
        """Waits for a session if an agent's socket is there; for the start of an engine."""
        if self._path.exists():
            self._ready.wait(timeout_s)
        return self._current

    def lost(self, attachment: Attachment) -> None:
        """The session has ended, or is of no use any more: another one is wanted. The session stays the caller's."""
        if self._current is attachment:
            self._current = None
            self._ready.clear()
            self._log_once(
                logging.WARNING, f"{self._owner}: the agent at {self._path} is gone; prompts are computed meanwhile"
            )
            self._wanted.set()

    def renew(self, *, hold: bool = False) -> Attachment | None:
        """Another registration is wanted, which differs from the last; with ``hold`` not before ``go``.

        The session, which is the caller's to leave, was registered by the last one. None registered by it comes.
        """
        with self._lock:
            last, self._current = self._current, None
            self._serial += 1
            self._held |= hold
        self._ready.clear()
        self._moving_until = time.monotonic() + MOVE_S
        self._wanted.set()
        return last

    def proceed(self) -> None:
        """See renew."""
        self._moving_until = time.monotonic() + MOVE_S
        self._held = False
        self._wanted.set()

    @property
    def busy(self) -> bool:
        """Whether, after ``close``, the thread is still there: it may be in the middle of a registration."""
        return self._thread.is_alive()

    def close(self) -> Attachment | None:
        """Ends the thread and gives the session, if there is one, to be closed by the caller."""
        self._closed.set()
        self._wanted.set()
        self._thread.join(JOIN_S)
        last, self._current = self._current, None
        return last

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._closed.is_set():
                return
            self._wanted.clear()
            pause = PAUSE_FIRST_S
            while self._missing() and not self._attach():
                self._closed.wait(pause)
                soon = not self._refused or time.monotonic() < self._moving_until
                pause = min(2 * pause, PAUSE_LAST_S if soon else PAUSE_REFUSED_S)

    def _missing(self) -> bool:
        """Whether a session is to be made. ``go`` or ``renew`` may have been called beside a try that succeeded."""
        return not (self._closed.is_set() or self._held or self._current is not None)

    def _attach(self) -> bool:
        session: Session | None = None
        serial = self._serial  # before the registration is made
        try:
            session = Session.connect(self._path, CONNECT_S)
            registered = session.register(self._registration(), REGISTER_S)
        except (OSError, KVAgentError) as error:
            if session is not None:
                session.close()
            reason = "no agent" if isinstance(error, (FileNotFoundError, ConnectionRefusedError)) else str(error)
            self._refused = isinstance(error, Refused)
            moving = time.monotonic() < self._moving_until
            level = logging.ERROR if self._refused and not moving else logging.WARNING
            self._log_once(level, f"{self._owner}: {reason} at {self._path}; prompts are computed, connecting goes on")
            return False
        with self._lock:
            if serial != self._serial:  # it was renewed meanwhile; nothing was ever said in this session
                session.close()
                return False
            self._current = Attachment(session, registered)
        self._ready.set()
        self._log_once(logging.INFO, f"{self._owner}: registered at {self._path}, space {registered.space.hex()}")
        return True

    def _log_once(self, level: int, text: str) -> None:
        """Logs a change of state, once."""
        if text != self._last_log:
            self._last_log = text
            log.log(level, "%s", text)
