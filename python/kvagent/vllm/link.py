"""Maintains a session with the agent: a thread connects and registers whenever the last session
ended.

The engine's thread never waits: it calls ``current``, and ``lost`` when a session has ended.
Without an agent that costs one attribute access.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvagent import starter
from kvagent.errors import KVAgentError, NotStarted, Refused, WrongSetting
from kvagent.messages import Budget
from kvagent.session import Session
from kvagent.vllm.options import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.registration import Registration

CONNECT_S = 2.0  # for connecting and for the answer to HELLO
REGISTER_S = 30.0
PAUSE_FIRST_S = 0.05  # between attempts; doubled up to PAUSE_LAST_S
PAUSE_LAST_S = 0.5
PAUSE_REFUSED_S = 5.0  # the maximum after a refusal, whose reason seldom goes away
LISTEN_STEPS = 4  # the agent is polled in one of this many steps while nothing is expected from it
MOVE_S = 30.0  # after renew: refusals are expected while other parts of the engine still register
JOIN_S = 5.0  # wait for the thread in close

log = logging.getLogger("vllm.kvagent")


def start_agent(socket_dir: str, pool: str) -> None:
    """Wait for an agent at an engine's start, so that its first request can hit. One is started if
    none answers; with an empty ``pool`` nothing is done. Raise OptionError if the agent refuses its
    settings. Whatever else fails, links try again.
    """
    if not pool:
        return
    try:
        with contextlib.suppress(NotStarted, OSError):
            starter.ensure(socket_dir, pool)
    except WrongSetting as error:
        raise OptionError(str(error), error.setting) from None


class Link:
    """A session with the agent that is re-established when lost. The engine's thread owns it."""

    def __init__(
        self, socket_dir: str, owner: str, registration: Callable[[], Registration] | None, budget: int = 0,
        pool: str = "",
    ) -> None:  # fmt: skip
        """``registration``: what is registered; without it there is never a session. ``budget``:
        the bytes of the pool that this worker may hold; 0: any number. ``pool``: the memory of an
        agent that is started where there is none; empty: none is started.
        """
        self._path = Path(socket_dir) / "session.sock"
        self._owner = owner
        self._registration = registration
        self.attached: Callable[[], None] | None = None
        """Called by the link's thread after each registration."""
        self._budget = budget
        self._pool = pool
        self._current: Session | None = None
        self._wanted = threading.Event()
        self._ready = threading.Event()
        self._closed = threading.Event()
        self._last_log = ""
        self._refused = False  # whether the agent refused the last attempt
        self._lock = threading.Lock()
        self._serial = 0  # counts renewals; guarded by the lock, like _current and _held, when the thread writes
        self._held = False
        self._moving_until = 0.0
        self._wanted.set()
        self._thread = threading.Thread(target=self._run, name=f"kvagent {owner}", daemon=True)
        if registration is not None:
            self._thread.start()

    def current(self) -> Session | None:
        """Return the session, or None."""
        return self._current

    def wait(self, timeout_s: float) -> Session | None:
        """Wait for a session if an agent's socket exists. Used at the start of an engine."""
        if self._path.exists():
            self._ready.wait(timeout_s)
        return self._current

    def lost(self, session: Session) -> None:
        """Request another session, since this one has ended. The caller keeps it."""
        if self._current is session:
            self._current = None
            self._ready.clear()
            text = f"{self._owner}: the agent at {self._path} is gone; prompts are computed meanwhile"
            self._log_once(logging.WARNING, text)
            self._wanted.set()

    def renew(self, *, hold: bool = False) -> Session | None:
        """Request a different registration; with ``hold`` not before ``proceed``. Return the
        session of the last registration, which the caller must leave. No other session of it will
        appear.
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
        """Allow the registration that ``renew(hold=True)`` requested."""
        self._moving_until = time.monotonic() + MOVE_S
        self._held = False
        self._wanted.set()

    @property
    def busy(self) -> bool:
        """Whether the thread still runs after ``close``, maybe in the middle of a registration."""
        return self._thread.is_alive()

    def close(self) -> Session | None:
        """Stop the thread and return the session, if any, which the caller must close."""
        self._closed.set()
        self._wanted.set()
        if self._registration is not None:
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
            # proceed and renew may run concurrently with a successful attempt
            while not (self._closed.is_set() or self._held or self._current is not None or self._attach()):
                if self._wanted.wait(pause):
                    break  # another registration, or the end
                soon = not self._refused or time.monotonic() < self._moving_until
                pause = min(2 * pause, PAUSE_LAST_S if soon else PAUSE_REFUSED_S)

    def _attach(self) -> bool:
        session: Session | None = None
        serial = self._serial  # read before the registration is made
        try:
            assert self._registration is not None
            session = self._connect()
            registered = session.register(self._registration(), REGISTER_S)
            if self._budget:  # the agent knows it before anything is saved
                session.send(Budget(self._budget))
                session.ping(REGISTER_S)
                text = f"{self._owner}: may hold {self._budget} bytes of what its engine stores"
                self._log_once(logging.INFO, text)
        except Exception as error:  # noqa: BLE001  whatever it is, the thread goes on
            if session is not None:
                session.close()
            self._explain(error)
            return False
        with self._lock:
            wanted = serial == self._serial and not self._closed.is_set()  # it was not renewed meanwhile
            self._current = session if wanted else None
        if not wanted:
            session.close()
            return False
        self._ready.set()
        if self.attached is not None:
            self.attached()
        self._log_once(logging.INFO, f"{self._owner}: registered at {self._path}, space {registered.space.hex()}")
        return True

    def _explain(self, error: Exception) -> None:
        """Log why an attempt failed. An error of no known kind is a fault of ours."""
        fault = None if isinstance(error, (OSError, KVAgentError)) else error
        refused = isinstance(error, Refused)
        self._refused = refused or fault is not None or isinstance(error, (NotStarted, WrongSetting))
        if self._closed.is_set() and isinstance(error, NotStarted):
            return  # it was cancelled
        absent = isinstance(error, (FileNotFoundError, ConnectionRefusedError))
        reason = "no agent" if absent else str(error) if fault is None else repr(error)
        level = logging.WARNING
        if fault is not None or refused:  # a refusal is expected while other parts of the engine move
            level = logging.INFO if refused and time.monotonic() < self._moving_until else logging.ERROR
        retried = "a start" if self._pool and isinstance(error, NotStarted) else "connecting"
        text = f"{self._owner}, {self._path}: prompts are computed, {retried} is retried: {reason}"
        self._log_once(level, text, fault)

    def _connect(self) -> Session:
        try:
            return Session.connect(self._path, CONNECT_S)
        except (FileNotFoundError, ConnectionRefusedError):
            if not self._pool:
                raise
        starter.ensure(str(self._path.parent), self._pool, self._closed)
        return Session.connect(self._path, CONNECT_S)

    def _log_once(self, level: int, text: str, fault: Exception | None = None) -> None:
        """Log a change of state once, with the trace of a fault. Its first line tells a state."""
        state = text.partition("\n")[0]
        if state != self._last_log:
            self._last_log = state
            log.log(level, "%s", text, exc_info=fault)
