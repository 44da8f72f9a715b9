"""The scheduler's session with the agent: its start and end, resets, switches and liveness.

A stopped agent keeps its sockets but says nothing. It is pinged only after some silence, and judged
only after pending messages were read, so an engine whose own steps take long, or that was stopped
itself, does not mistake its agent for a stopped one.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvagent import messages as m
from kvagent.errors import Busy, KVAgentError, SessionBroken, SessionEnded
from kvagent.limits import MAX_JOB_BLOCKS
from kvagent.vllm.scheduler.loads import Lookups

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.session import Session
    from kvagent.vllm.link import Link
    from kvagent.vllm.options import Constants
    from kvagent.vllm.plan import Report, StepPlan

    _Message = TypeVar("_Message", bound=m.Message)

ASK_S = 0.25  # silence before a ping
SILENT_S = 0.75  # an unanswered ping of this age: the agent is considered stopped until it answers
RESET_S = 5.0  # timeout of a reset
FIRST_EPOCH = 1  # the epoch of a space that was never reset since the agent's start

log = logging.getLogger("vllm.kvagent")


class SessionChange(NamedTuple):
    """The changes since the last poll, in this order."""

    ended: bool = False
    """The session ended: its promises and look-ups are void."""
    began: bool = False
    """There is a new session, whose agent may have no blocks."""
    reset: bool = False
    """Another engine reset the space, perhaps while there was no session."""


NO_CHANGE = SessionChange()


class AgentSession:
    """The session. ``lookups`` exists as long as the session does."""

    def __init__(self, link: Link, options: Constants) -> None:
        self.lookups: Lookups | None = None
        self.switches = m.Switches(1, 1)
        self.silent = False
        """Whether it was found to be ``stopped``, and has not answered since."""
        self.messages: list[m.Message] = []
        """What the session was sent besides, and was not taken."""
        self._heard_at = 0.0  # when the agent last sent something, or was pinged
        self._link = link
        self._options = options
        self._session: Session | None = None
        self._left = False  # one has ended, which poll has not returned
        self._boot = b""  # the boot ID of the last agent
        self._epoch = 0  # its last known epoch
        self._reset_pending = False  # a reset that the agent missed precedes all else in the next session
        self._moved = False  # moved to another space since the last session

    @property
    def session(self) -> Session | None:
        """Return the session, or None."""
        return self._session

    @property
    def space(self) -> bytes:
        """Return the space of the registration; empty without a session."""
        return b"" if self._session is None else self._session.registered.space

    @property
    def peer(self) -> str:
        """Return host:port where other agents reach this one; empty if they cannot."""
        return "" if self._session is None else self._session.limits.peer

    @property
    def job_blocks(self) -> int:
        """Return the most blocks that a job may have."""
        limit = self._session and self._session.limits.max_job_blocks
        return min(limit or MAX_JOB_BLOCKS, MAX_JOB_BLOCKS)

    def targets(self, lease: int = 0) -> tuple[Any, ...]:  # noqa: ARG002
        """Return what a job is for at other agents, if the session has more than one."""
        return ()

    def tell(self, plan: StepPlan) -> None:
        """Add to a plan what is to be done at other agents."""

    def hear(self, report: Report) -> bool:  # noqa: ARG002
        """Take the news from other agents. Return whether there were some."""
        return False

    def heard(self, now: float) -> None:
        """Note that the agent has sent something: its workers have reported jobs."""
        self._heard_at = now

    def awaits_leases(self) -> bool:
        """Return whether leases may soon come that are to be released."""
        return self.lookups is not None and self.lookups.awaits_leases()

    def poll(self, *, listen: bool = True) -> SessionChange:
        """Adopt a new session and read messages; without ``listen``, these may be left for the next
        call. Does not wait, except for a pending reset.
        """
        current = self._link.current()
        if current is self._session and not self._left and (current is None or not listen or current.quiet()):
            return NO_CHANGE  # the usual case
        began = reset = False
        if current is not self._session:
            self._detach()
            if current is not None:
                reset = self._missed_reset(current)
                began = self._attach(current)
        if self._session is not None:
            try:
                for event in self._session.poll():
                    if isinstance(event, m.Epoch):
                        reset |= event.epoch > self._epoch  # else this engine's own reset
                        self._epoch = max(self._epoch, event.epoch)
                    elif isinstance(event, m.Switches):
                        self.switches = event
                    elif isinstance(event, (m.BlockEvents, m.Hinted, m.Done)):
                        self.messages.append(event)
            except (SessionEnded, SessionBroken):
                self._detach()
                began = False
        ended, self._left = self._left, False
        return SessionChange(ended, began, reset) if ended or began or reset else NO_CHANGE

    def take(self, kind: type[_Message]) -> list[_Message]:
        """Return the messages of a kind since the last call."""
        found = [one for one in self.messages if isinstance(one, kind)]
        if found:
            self.messages = [one for one in self.messages if not isinstance(one, kind)]
        return found

    def unread(self) -> bool:
        """Return whether the next poll has something to read or send, or a session to adopt."""
        current = self._link.current()
        return current is not self._session or (current is not None and (current.unread() or current.sendable()))

    def awaited(self) -> bool:
        """Return whether an answer is expected from the agent: to a look-up, or to a ping."""
        return self.pinging() or (self.lookups is not None and self.lookups.outstanding())

    def pinging(self) -> bool:
        """Return whether a ping is unanswered."""
        return self._session is not None and self._session.pinging

    def stopped(self, now: float) -> bool:
        """Return whether the agent does not answer though its sockets exist. Called in every step
        in which the engine waits for it, after ``poll``.
        """
        if self._session is None:
            return False
        if self._session.pinging:
            return now - self._heard_at > SILENT_S
        if now - self._heard_at > ASK_S:
            self._heard_at = now
            with contextlib.suppress(Busy, SessionBroken, SessionEnded):  # the next poll reports it
                self._session.start_ping()
        return False

    def release(self, lease: int, boot: bytes = b"") -> None:
        """Release a lease, if the agent is still the one of that ``boot``. If the message cannot be
        sent, the lease ends with the session.
        """
        if self._session is not None and boot in (b"", self._session.boot):
            with contextlib.suppress(Busy, SessionEnded, SessionBroken):
                self._session.release([lease])

    def send(self, message: m.Message) -> bool:
        """Send a message without waiting. Return whether it was sent."""
        if self._session is not None:
            with contextlib.suppress(Busy, SessionEnded, SessionBroken):
                self._session.send(message)
                return True
        return False

    def reset(self) -> None:
        """Start a new epoch. If the agent does not answer, the next session begins with that."""
        self._reset_pending = True
        if self._session is not None:
            try:
                self._epoch = self._session.reset(RESET_S)
                self._reset_pending = False
            except (KVAgentError, OSError) as error:
                log.warning("reset: %s; the next session repeats it", error)
                self._detach()

    def move(self) -> None:
        """Leave the space, and drop a pending reset of it; ``proceed`` allows the session in the
        next one.
        """
        self._reset_pending = False
        self.reregister(hold=True)

    def proceed(self) -> None:
        """Allow the next registration, since all ranks move too."""
        self._link.proceed()

    def reregister(self, *, hold: bool = False) -> None:
        """End the session; the next one registers the present identity, with ``hold`` not before
        ``proceed``.
        """
        self._moved = True
        self._leave(partial(self._link.renew, hold=hold))

    def begin_anew(self) -> None:
        """End the session and its leases; the next one has the same registration."""
        self._leave(self._link.renew)

    def close(self) -> None:
        """Leave the agent. Its leases end with the session."""
        self._leave(self._link.close)

    def _leave(self, take: Callable[[], Session | None]) -> None:
        """Close the session, and the one that ``take`` takes from the link, usually the same."""
        session, self._session = self._session, None
        self._left |= session is not None
        self._close_lookups()
        for one in {id(one): one for one in (session, take())}.values():
            if one is not None:
                one.close()  # a scheduler has no memory that needs a fence

    def _detach(self) -> None:
        """Leave a session that has ended or is useless."""
        if self._session is not None:
            self._leave(partial(self._link.lost, self._session))

    def _missed_reset(self, session: Session) -> bool:
        """Return whether the space was reset since the last session, or since the agent's start."""
        if self._moved:  # no block of this engine was computed in that space
            return False
        return session.registered.epoch > (self._epoch if self._boot == session.boot else FIRST_EPOCH)

    def _attach(self, session: Session) -> bool:
        self._session = session
        self._moved = False
        self._boot, self._epoch = session.boot, session.registered.epoch
        if self._reset_pending:
            AgentSession.reset(self)
            if self._reset_pending:
                return False
        self.switches = m.Switches(1, 1)
        self._heard_at = 0.0
        self.lookups = Lookups(session, self._options.lookup_wait_ms / 1e3, self._options.lookup_age_ms / 1e3)
        return True

    def _close_lookups(self) -> None:
        self.messages.clear()
        if self.lookups is not None:
            self.lookups.close()
            self.lookups = None
