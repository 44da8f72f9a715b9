"""The look-up client: asks an agent how much of a prompt it has, with or without waiting.

An answer takes microseconds, but an agent may be slow, stopped or gone: every wait is bounded, and
a socket whose answer was late is never reused. Answers do not identify their question, so each
outstanding one has a REQ socket of its own; sockets whose answers arrived are reused.

A late answer may carry a lease, and shows that the agent lives. So the socket of an abandoned
question is kept, and ``late_answers`` returns what arrives at it; leases are to be released in the
session.

When the session ends, close the client and create another for the next session: a question that
still waits in the socket would reach the agent's successor, for which the session's number means
nothing or something else.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from kvagent.errors import Busy, Malformed, TimedOut
from kvagent.ownform import Answer, LookupStatus, Request, Want, decode_answer, encode_request

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["Answer", "LookupClient", "LookupStatus", "Request", "Ticket", "Want"]

MAX_OUTSTANDING = 64  # outstanding questions of one client
MAX_LATE = 64  # abandoned questions whose answers are still read
LATE_S = 2.0  # how long they are worth a step of an engine that has nothing else to do
_MAX_ANSWER_BYTES = 4096


@dataclass(eq=False, slots=True)
class Ticket:
    """An outstanding question, abandoned after ``deadline`` (of time.monotonic). Of an abandoned
    one, ``deadline`` is the end of LATE_S.
    """

    socket: zmq.Socket[bytes] | None
    deadline: float
    leases: bool
    """Whether its answer may carry a lease."""


class LookupClient:
    """A client of one look-up socket. Not thread-safe. ``close`` ends it."""

    def __init__(self, path: str | PathLike[str], timeout_s: float = 0.005) -> None:
        """``timeout_s`` is the default time to wait for an answer."""
        self.endpoint = f"ipc://{path}"
        self.timeout_s = timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # from the first question on
        self._idle: list[zmq.Socket[bytes]] = []
        self._out = 0
        self._late: deque[Ticket] = deque()

    def lookup(self, request: Request, timeout_s: float | None = None) -> Answer:
        """Ask and wait. TimedOut if no answer arrived; Malformed if it is invalid."""
        ticket = self.submit(request, timeout_s)
        while (answer := self.poll(ticket, ticket.deadline - time.monotonic())) is None:
            pass
        return answer

    def submit(self, request: Request, timeout_s: float | None = None) -> Ticket:
        """Ask without waiting; poll the ticket to its end, or abandon it. Busy if too many are
        outstanding, or if there can be no socket now.
        """
        frame = encode_request(request)
        if self._out >= MAX_OUTSTANDING:
            raise Busy(f"{self._out} look-ups are in flight")
        try:
            socket = self._idle.pop() if self._idle else self._connect()
        except zmq.ZMQError as error:  # as where this process has no descriptors left
            raise Busy(f"there is no look-up socket: {error}") from None
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            socket.close(0)
            raise Busy(f"the look-up socket accepts nothing: {error}") from None
        self._out += 1
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        return Ticket(socket, time.monotonic() + wait_s, leases=request.want != Want.PROBE)

    def poll(self, ticket: Ticket, wait_s: float = 0.0) -> Answer | None:
        """Return the answer, or None while it may still come. TimedOut when it may not; the ticket
        has then ended. Waits for at most ``wait_s``, rounded up to milliseconds.
        """
        if ticket.socket is None:
            raise ValueError("the ticket has ended")
        if wait_s > 0:
            ticket.socket.poll(math.ceil(wait_s * 1000), zmq.POLLIN)
        frames = _receive(ticket.socket)
        if frames is None:
            if time.monotonic() >= ticket.deadline:
                self.abandon(ticket)
                raise TimedOut(f"no answer from {self.endpoint}")
            return None
        socket, ticket.socket = ticket.socket, None
        self._out -= 1
        try:
            answer = _answer(frames)
        except Malformed:
            socket.close(0)
            raise
        self._idle.append(socket)
        return answer

    def abandon(self, ticket: Ticket) -> None:
        """Abandon a question. If its answer may carry a lease, it is still read on arrival; see
        late_answers.
        """
        if ticket.socket is None:
            return
        self._out -= 1
        late = Ticket(ticket.socket, time.monotonic() + LATE_S, ticket.leases)
        ticket.socket = None
        if late.leases:
            self._late.append(late)
            if len(self._late) > MAX_LATE:
                self._drop(self._late.popleft())
        else:
            self._drop(late)

    @property
    def outstanding(self) -> int:
        """The number of questions that are neither answered nor abandoned."""
        return self._out

    @property
    def late(self) -> int:
        """The number of questions abandoned within LATE_S; call late_answers until it is 0."""
        now = time.monotonic()
        return sum(now < ticket.deadline for ticket in self._late)

    def late_answers(self) -> list[Answer]:
        """Return the answers that arrived after their question was abandoned, each once. The caller
        releases their leases.
        """
        answers: list[Answer] = []
        for _ in range(len(self._late)):
            ticket = self._late.popleft()
            frames = _receive(ticket.socket) if ticket.socket is not None else None
            if frames is None:
                self._late.append(ticket)
                continue
            with contextlib.suppress(Malformed):
                answers.append(_answer(frames))
            self._drop(ticket)
        return answers

    def close(self) -> None:
        """End the client and its tickets, without waiting."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        self._idle.clear()
        self._late.clear()

    def _connect(self) -> zmq.Socket[bytes]:
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(zmq.REQ)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ANSWER_BYTES)
            socket.setsockopt(zmq.RECONNECT_IVL, 10)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            socket.connect(self.endpoint)
        except zmq.ZMQError:
            socket.close(0)
            raise
        return socket

    @staticmethod
    def _drop(ticket: Ticket) -> None:
        if ticket.socket is not None:
            ticket.socket.close(0)
            ticket.socket = None


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _answer(frames: list[bytes]) -> Answer:
    if len(frames) != 1:
        raise Malformed(f"an answer of {len(frames)} frames, allowed is 1")
    return decode_answer(frames[0])
