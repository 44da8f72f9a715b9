"""One of the tier's sessions with the agent, with the memory that it registered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvagent.errors import SessionBroken, SessionEnded
from kvagent.vllm.link import Link
from kvagent.vllm.scheduler.agent_session import Liveness

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.registration import Registration
    from kvagent.session import Event, Session
    from kvagent.vllm.tier.options import TierOptions


class Closable(Protocol):
    """Memory of one session."""

    def close(self) -> None:
        """Free it in this process."""


Memory = TypeVar("Memory", bound=Closable)


@dataclass(slots=True)
class Turn:
    """What happened since the last turn, in this order."""

    ended: bool = False
    began: bool = False
    events: list[Event] = field(default_factory=list)


class Port(Generic[Memory]):
    """A session that is renewed when it ends. Used by one thread.

    The memory is made anew for each session, so what a former agent still writes to is not used
    again.
    """

    def __init__(self, options: TierOptions, owner: str, make: Callable[[], tuple[Registration, Memory]]) -> None:
        self._session: Session | None = None
        self.memory: Memory | None = None
        """That of the session; None without one."""
        self.stopped = False
        """Whether the agent does not answer."""
        self._make = make
        self._made: list[Memory] = []  # by the link's thread, the last one for the session that it attaches
        self._liveness = Liveness()
        self.link = Link(options.socket_dir, owner, self._registration, pool=options.pool)

    @property
    def session(self) -> Session | None:
        """The session of an agent that answers, or None."""
        return None if self.stopped else self._session

    def turn(self, now: float, *, awaited: bool) -> Turn:
        """Adopt a new session and read messages.

        ``awaited``: something is expected of the agent.
        """
        turn = Turn()
        current = self.link.current()
        if current is not self._session:
            turn.ended = self._detach()
            if current is not None:
                self._session, self.memory = current, self._made.pop()
                self._liveness, self.stopped, turn.began = Liveness(), False, True
                self._liveness.heard(now)
        if self._session is None:
            return turn
        session = self._session
        try:
            turn.events = session.poll()
        except (SessionEnded, SessionBroken):
            turn.ended = self._detach() or turn.ended
            turn.began = False
            return turn
        if turn.events:
            self._liveness.heard(now)
        self.stopped = (awaited or self.stopped) and self._liveness.stopped(session, now)
        return turn

    def renew(self) -> None:
        """Leave the session for one with the present registration."""
        last = self.link.renew()
        if last is not None and last is not self._session:
            last.close()
        self._close()

    def fileno(self) -> int | None:
        """Return the descriptor of the session, if there is one."""
        return None if self._session is None else self._session.fileno()

    def close(self) -> None:
        """Leave the agent."""
        last = self.link.close()
        if last is not None and last is not self._session:
            last.close()
        self._close()
        while self._made:
            self._made.pop().close()

    def _registration(self) -> Registration:
        """Make what an attempt registers. The link's thread calls it, while there is no session."""
        registration, memory = self._make()
        while self._made:
            self._made.pop().close()
        self._made.append(memory)
        return registration

    def _detach(self) -> bool:
        session = self._session
        if session is None:
            return False
        self._close()
        self.link.lost(session)
        return True

    def _close(self) -> None:
        session, self._session = self._session, None
        memory, self.memory = self.memory, None
        if session is not None:
            session.close()
        if memory is not None:
            memory.close()
        self.stopped = False
