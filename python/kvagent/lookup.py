"""The look-up client: asks an agent how much of a prompt it has, with or without waiting, in
kvagent's own form: one msgpack array each way (docs/PROTOCOL.md, section 2.1).

An answer takes microseconds, but an agent may be slow, stopped or gone: every wait is bounded.
Answers do not identify their question, so each outstanding one has a REQ socket of its own, which
is used again only if its answer arrived. A late answer may carry a lease, and shows that the agent
lives: ``late_answers`` returns what arrives at the sockets of abandoned questions.

When the session ends, close the client and create another for the next session: a question that
still waits in the socket would reach the agent's successor, for which the session's number means
nothing or something else.
"""

import contextlib
import math
import time
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from os import PathLike
from typing import Annotated

import zmq

from kvagent.errors import Busy, Malformed, TimedOut
from kvagent.fields import Record, binary, pack, string, uint, unpack
from kvagent.limits import MAX_GROUPS, MAX_HASH, MAX_PEER_ADDRESS, MAX_TRANSFER_NAME
from kvagent.messages import ID, U8, U32, U64, Flag

VERSION = 3
MAX_HASHES = 65536
OWN_SPACE = bytes(16)
"""Stands for the space of the look-up socket itself."""


class Want(IntEnum):
    """The purpose of a look-up."""

    PROBE = 0
    RESERVE = 1
    READY = 2
    """Reserve, and say whether the blocks can be loaded at once."""


class LookupStatus(IntEnum):
    """The result of a look-up."""

    HIT = 0
    PENDING = 1
    OFF = 2
    NOT_REGISTERED = 3
    MALFORMED = 4
    OVERLOADED = 5
    NO_SESSION = 6
    LEASE_CAP = 7
    READY = 8
    """As HIT, and all blocks are in the agent's memory as they were saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Asks how much of a prompt is stored. ``hashes`` are joined; ``deadline_us`` 0 is the default.
    ``transfer`` names the transfer whose blocks these are, or is empty; ``peer`` is the address of
    the agent that has it, empty for this agent and the shared tiers; ``early`` is 1 if it may not
    have been offered yet.
    """

    version: Annotated[int, uint(VERSION, VERSION)] = VERSION
    space: ID = OWN_SPACE
    session: U64 = 0
    want: Annotated[int, uint(Want.PROBE, Want.READY)] = Want.PROBE
    tokens: U32
    hbm_tokens: U32 = 0
    deadline_us: U32 = 0
    groups: Annotated[bytes, binary(0, MAX_GROUPS)] = b""
    hash_len: Annotated[int, uint(0, MAX_HASH)]
    hashes: Annotated[bytes, binary(0, MAX_HASHES * MAX_HASH)]
    transfer: Annotated[bytes, binary(0, MAX_TRANSFER_NAME)] = b""
    peer: Annotated[str, string(0, MAX_PEER_ADDRESS)] = ""
    early: Flag = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """``tokens`` of the prompt, from token 0, are stored; ``lease`` pins them unless it is 0. Of
    them, ``disk`` are being fetched from the node's own tiers and ``shared`` from shared ones.
    """

    version: Annotated[int, uint(VERSION, VERSION)]
    status: U8
    tokens: U32
    lease: U64
    boot: ID
    disk: U32 = 0
    shared: U32 = 0


REQUEST_FORM, ANSWER_FORM = Record(Request), Record(Answer)


def encode_request(request: Request) -> bytes:
    """Return the frame of a request. Malformed unless the hashes are whole, and not too many."""
    values = REQUEST_FORM.write(request, "Request")
    size, most = len(request.hashes), MAX_HASHES * request.hash_len
    if size > most or (size and size % request.hash_len):
        raise Malformed(f"Request.hashes: {size} bytes, allowed are multiples of {request.hash_len} up to {most}")
    return pack(values)


MAX_OUTSTANDING = 64  # outstanding questions of one client
MAX_LATE = 64  # abandoned questions whose answers are still read
LATE_S = 2.0  # how long they are worth a step of an engine that has nothing else to do
_MAX_ANSWER_BYTES = 4096


@dataclass(eq=False, slots=True)
class Ticket:
    """A question, until ``deadline`` (of time.monotonic); abandoned, the end of LATE_S."""

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
        """Ask without waiting; poll the ticket, or abandon it. Busy if it cannot be sent now."""
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
        """Abandon a question. If its answer may carry a lease, late_answers returns it."""
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
        """Return the answers that came after their question was abandoned, for their leases."""
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
    answer: Answer = ANSWER_FORM.read(unpack(frames[0]), "Answer")
    return answer
