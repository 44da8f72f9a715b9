"""The package's errors, by what the caller can do about them."""

from __future__ import annotations


class KVAgentError(Exception):
    """The base class of all errors of this package."""


class Malformed(KVAgentError):
    """What the protocol does not allow. The text names the field and what is allowed."""


class WrongSetting(KVAgentError):
    """A setting is not allowed. The text names it and what is allowed."""

    def __init__(self, setting: str, why: str) -> None:
        super().__init__(f"{setting}: {why}")
        self.setting = setting


class NotStarted(KVAgentError):
    """No agent could be started. The same reason has the same first line."""


class TimedOut(KVAgentError):
    """No answer arrived in time."""


class Busy(KVAgentError):
    """A queue is full. Nothing was sent; the caller counts it and continues."""


class Refused(KVAgentError):
    """The agent refused the request."""

    def __init__(self, what: str, status: int, text: str) -> None:
        super().__init__(f"{what}: status {status}: {text}")
        self.status = status
        self.text = text


class SessionBroken(KVAgentError):
    """The agent violated the protocol. Nothing more is sent; its end is still awaited."""


class SessionEnded(KVAgentError):
    """The agent's end of the session socket is gone: it no longer accesses the session's memory.
    ``jobs`` are those without a report; ``code`` and ``text`` are the agent's ERROR, if it sent
    one.
    """

    def __init__(self, jobs: tuple[int, ...], code: int | None = None, text: str = "") -> None:
        reason = "the agent's end is gone" if code is None else f"error {code}: {text}"
        super().__init__(f"session ended: {reason}; {len(jobs)} jobs not reported")
        self.jobs = jobs
        self.code = code
        self.text = text
