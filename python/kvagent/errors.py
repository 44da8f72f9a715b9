"""What can go wrong, by what the caller can do about it."""

from __future__ import annotations


class KVAgentError(Exception):
    """The root of all errors of this package."""


class Malformed(KVAgentError):
    """Bytes or values that the protocol does not allow. The text names the field and what is allowed."""


class TimedOut(KVAgentError):
    """No answer came within the time given for it."""


class Busy(KVAgentError):
    """A queue is full. Nothing was sent; the caller counts it and goes on."""


class Refused(KVAgentError):
    """The agent answered, and said no."""

    def __init__(self, what: str, status: int, text: str) -> None:
        super().__init__(f"{what}: status {status}: {text}")
        self.status = status
        self.text = text


class SessionBroken(KVAgentError):
    """The agent said something it may not say. Nothing more is sent; its end of the socket is still to come."""


class SessionEnded(KVAgentError):
    """The agent's end of the session socket is gone: it touches no byte of the session's memory any more.

    ``jobs`` are those that were not reported; ``code`` and ``text`` are the agent's ERROR, if it sent one.
    """

    def __init__(self, jobs: tuple[int, ...], code: int | None = None, text: str = "") -> None:
        reason = "the agent's end is gone" if code is None else f"error {code}: {text}"
        super().__init__(f"session ended: {reason}; {len(jobs)} jobs not reported")
        self.jobs = jobs
        self.code = code
        self.text = text
