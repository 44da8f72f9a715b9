"""The scheduler's session with the agent: taken up when there is one, left when it ends, and what is told in it.

Whether an agent that holds the engine's blocks still runs: one that was stopped keeps its sockets, and says nothing.

It is asked only where nothing was heard of it for a while, and judged only after what it said was read: so an engine
whose own steps take long, or that was stopped itself, does not take its agent for a stopped one.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvagent import messages as m
from kvagent.errors import Busy, KVAgentError, SessionBroken, SessionEnded
from kvagent.vllm.scheduler.lookups import Lookups

if TYPE_CHECKING:
    from kvagent.session import Session
    from kvagent.vllm.link import Attachment, Link
    from kvagent.vllm.options import Options

ASK_S = 0.25  # without a word of the agent, and it is asked
SILENT_S = 0.75  # without an answer, and it is taken for stopped, until it answers


class Liveness:
    """That of one session."""

    def __init__(self) -> None:
        self._since = 0.0  # when it was last heard of, or asked

    def heard(self, now: float) -> None:
        """The agent did something."""
        self._since = now

    def stopped(self, session: Session, now: float) -> bool:
        """Whether it does not answer. Called in every step in which that matters, behind a poll of the session."""
        if session.pinging:
            return now - self._since > SILENT_S
        if now - self._since > ASK_S:
            self._since = now
            with contextlib.suppress(Busy, SessionBroken, SessionEnded):  # the next poll shows it
                session.start_ping()
        return False


RESET_S = 5.0  # for the agent's answer to a reset
FIRST_EPOCH = 1  # of a space that was not reset in this life of the agent

log = logging.getLogger("kvagent.vllm")


@dataclass(frozen=True, slots=True)
class SessionChange:
    """What has changed since the last time, in this order."""

    ended: bool = False
    """The session ended: what was asked in it is void."""
    began: bool = False
    """There is a new one: its agent may have nothing."""
    reset: bool = False
    """Somebody reset the space, perhaps while there was no session."""


NO_CHANGE = SessionChange()


class AgentSession:
    """See the module. ``asker`` is there as long as there is a session."""

    def __init__(self, link: Link, options: Options) -> None:
        self.lookups: Lookups | None = None
        self.switches = m.Switches(1, 1)
        self.liveness = Liveness()
        self._link = link
        self._options = options
        self._attachment: Attachment | None = None
        self._boot = b""  # the agent's life
        self._epoch = 0  # of it, as far as is known
        self._reset_pending = False  # a reset that the agent did not hear: it comes first in the next session
        self._moved = False  # since the last session, to a space of which nothing is known

    @property
    def session(self) -> Session | None:
        """The session, if there is one."""
        return None if self._attachment is None else self._attachment.session

    @property
    def space(self) -> bytes:
        """The space in which this engine is registered; empty without a session."""
        return b"" if self._attachment is None else self._attachment.registered.space

    def poll(self, *, listen: bool = True) -> SessionChange:
        """Takes up a new session, and what the present one has to say. Does not wait, but for a reset that is owed.

        Unless it is to ``listen``, the present one may have something to say that is left for the next time.
        """
        current = self._link.current()
        if current is self._attachment and (current is None or not listen or current.session.quiet()):
            return NO_CHANGE  # nearly always
        ended = began = reset = False
        if current is not self._attachment:
            ended = self._detach()
            if current is not None:
                reset = self._missed_reset(current)
                began = self._attach(current)
        if self._attachment is not None:
            try:
                for event in self._attachment.session.poll():
                    if isinstance(event, m.Epoch):
                        reset |= event.epoch > self._epoch  # else it is what this engine did itself
                        self._epoch = max(self._epoch, event.epoch)
                    elif isinstance(event, m.Switches):
                        self.switches = event
            except (SessionEnded, SessionBroken):
                ended = self._detach()
                began = False
        return SessionChange(ended, began, reset) if ended or began or reset else NO_CHANGE

    def stopped(self, now: float) -> bool:
        """Whether the agent does not answer though its sockets are there. It is asked: only where something waits."""
        return self.session is not None and self.liveness.stopped(self.session, now)

    def release(self, lease: int) -> None:
        """Gives a lease back. If it cannot be said, it ends with the session."""
        if self._attachment is not None:
            with contextlib.suppress(Busy, SessionEnded, SessionBroken):
                self._attachment.session.release([lease])

    def reset(self) -> bool:
        """Starts a new weights epoch. False: the agent did not answer; it hears of it before it is used again."""
        self._reset_pending = True
        if self._attachment is None:
            return True  # nothing is loaded before it is done
        try:
            self._epoch = self._attachment.session.reset(RESET_S)
        except (KVAgentError, OSError) as error:
            log.warning("reset: %s; it is owed", error)
            self._detach()
            return False
        self._reset_pending = False
        return True

    def move(self) -> bool:
        """Leaves the space, for ever or not: the next session is in another one, after ``go``. Whether there was one.

        A reset that is owed was to be of the space that is left.
        """
        self._reset_pending = False
        return self._renew(hold=True)

    def proceed(self) -> None:
        """All ranks have moved too."""
        self._link.proceed()

    def reregister(self) -> bool:
        """Ends the session: the next one begins with what there is to register now. Whether there was one."""
        return self._renew(hold=False)

    def close(self) -> None:
        """Leaves the agent. Leases end with the session."""
        self._detach()
        if last := self._link.close():
            last.session.close()

    def _renew(self, *, hold: bool) -> bool:
        attachment, self._attachment = self._attachment, None
        self._close_lookups()
        last = self._link.renew(hold=hold)
        for one in {id(one): one for one in (attachment, last) if one is not None}.values():
            one.session.close()
        self._moved = True
        return attachment is not None

    def _missed_reset(self, attachment: Attachment) -> bool:
        """Whether somebody reset the space since the session before this one, or since the agent's start."""
        if self._moved:  # nothing that this engine has was computed in that space
            return False
        last = self._epoch if self._boot == attachment.session.boot else FIRST_EPOCH
        return attachment.registered.epoch > last

    def _attach(self, attachment: Attachment) -> bool:
        self._attachment = attachment
        self._moved = False
        self._boot, self._epoch = attachment.session.boot, attachment.registered.epoch
        if self._reset_pending and not self.reset():
            return False
        self.switches = m.Switches(1, 1)
        self.liveness = Liveness()
        self.lookups = Lookups(attachment, self._options.lookup_wait_ms / 1e3, self._options.lookup_age_ms / 1e3)
        return True

    def _detach(self) -> bool:
        attachment, self._attachment = self._attachment, None
        self._close_lookups()
        if attachment is None:
            return False
        self._link.lost(attachment)
        attachment.session.close()  # a scheduler has no memory to be fenced
        return True

    def _close_lookups(self) -> None:
        if self.lookups is not None:
            self.lookups.close()
            self.lookups = None
