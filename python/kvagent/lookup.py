"""The look-up client: asks an agent how much of a prompt it has, with or without waiting.

An answer costs microseconds, but an agent may be slow, stopped or gone: every wait is bounded, and a socket whose
answer did not come in time is never used for another question. Each question under way has a REQ socket of its own,
since answers name no question; sockets whose answer came are used again.

An answer that comes too late may carry a lease. Its socket is kept for a while to read it, and ``late_leases`` tells
the number, to be released in the session.

When the session ends, close the client and make another for the next session: a question that still waits in the
socket would reach the agent's successor, to which the session's number means nothing, or someone else.
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

MAX_OUTSTANDING = 64  # questions under way in one client
MAX_LATE = 64  # given-up questions whose answers are still awaited
LATE_S = 2.0  # for how long
_MAX_ANSWER_BYTES = 4096


@dataclass(eq=False, slots=True)
class Ticket:
    """A question under way. Given up after ``deadline`` (of time.monotonic)."""

    socket: zmq.Socket[bytes] | None
    deadline: float
    leases: bool
    """Whether its answer may carry a lease."""


class LookupClient:
    """Asks at one look-up socket. Not for use by several threads at once. ``close`` ends it."""

    def __init__(self, path: str | PathLike[str], timeout_s: float = 0.005) -> None:
        """``timeout_s`` is how long a question waits for its answer unless it says otherwise."""
        self.endpoint = f"ipc://{path}"
        self.timeout_s = timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._idle: list[zmq.Socket[bytes]] = []
        self._out = 0
        self._late: deque[Ticket] = deque()

    def lookup(self, request: Request, timeout_s: float | None = None) -> Answer:
        """Asks and waits. TimedOut if no answer came; Malformed if something came that is none."""
        ticket = self.submit(request, timeout_s)
        while (answer := self.poll(ticket, ticket.deadline - time.monotonic())) is None:
            pass
        return answer

    def submit(self, request: Request, timeout_s: float | None = None) -> Ticket:
        """Asks without waiting; the ticket is polled to its end, or abandoned. Busy if too many are under way."""
        frame = encode_request(request)
        if self._out >= MAX_OUTSTANDING:
            raise Busy(f"{self._out} look-ups are under way")
        socket = self._idle.pop() if self._idle else self._connect()
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            socket.close(0)
            raise Busy("the look-up socket takes nothing") from None
        self._out += 1
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        return Ticket(socket, time.monotonic() + wait_s, leases=request.want == Want.RESERVE)

    def poll(self, ticket: Ticket, wait_s: float = 0.0) -> Answer | None:
        """The answer, or None as long as it may still come. TimedOut once it may not: the ticket is then over.

        Waits for at most ``wait_s``, rounded up to milliseconds.
        """
        if ticket.socket is None:
            raise ValueError("the ticket is over")
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
        """Gives a question up. If its answer may carry a lease it is still read when it comes; see late_leases."""
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
    def late(self) -> int:
        """Given-up questions whose answers are still awaited: late_leases is to be called until there are none."""
        return len(self._late)

    def late_leases(self) -> list[int]:
        """The leases of answers that came after their question was given up, to be released. Each is told once."""
        leases: list[int] = []
        for _ in range(len(self._late)):
            ticket = self._late.popleft()
            frames = _receive(ticket.socket) if ticket.socket is not None else None
            if frames is None and time.monotonic() < ticket.deadline:
                self._late.append(ticket)
                continue
            if frames is not None:
                with contextlib.suppress(Malformed):
                    leases.append(_answer(frames).lease)
            self._drop(ticket)
        return [lease for lease in leases if lease != 0]

    def close(self) -> None:
        """Ends the client; tickets under way are over. Does not wait."""
        self._context.destroy(linger=0)
        self._idle.clear()
        self._late.clear()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ANSWER_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.connect(self.endpoint)
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
