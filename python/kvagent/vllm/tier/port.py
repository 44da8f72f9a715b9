"""One of the tier's sessions with the agent, with the memory that it registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from kvagent.vllm.link import Link
from kvagent.vllm.scheduler.agent_session import AgentSession
from kvagent.vllm.tier.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.messages import Done
    from kvagent.registration import Registration
    from kvagent.session import Session
    from kvagent.vllm.scheduler.agent_session import SessionChange
    from kvagent.vllm.tier.options import TierOptions


class Port(AgentSession, Generic[Memory]):
    """A session that is renewed when it ends. Used by one thread.

    The memory is made anew for each session, so what a former agent still writes to is not used
    again.
    """

    def __init__(self, options: TierOptions, owner: str, make: Callable[[], tuple[Registration, Memory]]) -> None:
        self.memory: Memory | None = None
        """That of the session; None without one."""
        self.silent = False
        """Whether the agent does not answer."""
        self._make: Callable[[], tuple[Registration, Memory]] = make
        self._made: list[Memory] = []  # by the link's thread, the last one for the session that it attaches
        self.link = Link(options.socket_dir, owner, self._registration, pool=options.pool)
        super().__init__(self.link, options)

    @property
    def session(self) -> Session | None:
        """Return the session of an agent that answers, or None."""
        return None if self.silent else self._session

    def turn(self, now: float, *, awaited: bool) -> tuple[SessionChange, list[Done]]:
        """Adopt a new session and read messages. Return what has changed, and the reports of jobs.

        ``awaited``: something is expected of the agent.
        """
        change = self.poll()
        done, self.done = self.done, []
        if change.began or done:
            self.liveness.heard(now)
        self.silent = (awaited or self.silent) and self.stopped(now)
        return change, done

    def fileno(self) -> int | None:
        """Return the descriptor of the session, if there is one."""
        return None if self._session is None else self._session.fileno()

    def close(self) -> None:
        """Leave the agent."""
        super().close()
        while self._made:
            self._made.pop().close()

    def _registration(self) -> Registration:
        """Make what an attempt registers. The link's thread calls it, while there is no session."""
        registration, memory = self._make()
        while self._made:
            self._made.pop().close()
        self._made.append(memory)
        return registration

    def _attach(self, session: Session) -> bool:
        self.memory = self._made.pop()
        return super()._attach(session)

    def _close_lookups(self) -> None:
        """Handle the end of the session."""
        super()._close_lookups()
        memory, self.memory, self.silent = self.memory, None, False
        if memory is not None:
            memory.close()
