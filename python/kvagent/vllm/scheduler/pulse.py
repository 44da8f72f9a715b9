"""Whether an agent that holds the engine's blocks still runs: one that was stopped keeps its sockets, and says nothing.

It is asked only where nothing was heard of it for a while, and judged only after what it said was read: so an engine
whose own steps take long, or that was stopped itself, does not take its agent for a stopped one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvagent.errors import Busy, SessionBroken, SessionEnded

if TYPE_CHECKING:
    from kvagent.session import Session

ASK_S = 0.25  # without a word of the agent, and it is asked
SILENT_S = 0.75  # without an answer, and it is taken for stopped, until it answers


class Pulse:
    """That of one session."""

    def __init__(self) -> None:
        self._since = 0.0  # when it was last heard of, or asked

    def heard(self, now: float) -> None:
        """The agent did something."""
        self._since = now

    def stopped(self, session: Session, now: float) -> bool:
        """Whether it does not answer. Called in every step in which that matters, behind a poll of the session."""
        if session.knocking:
            return now - self._since > SILENT_S
        if now - self._since > ASK_S:
            self._since = now
            with contextlib.suppress(Busy, SessionBroken, SessionEnded):  # the next poll shows it
                session.knock()
        return False
