"""The session client: registers an engine's memory with an agent and submits jobs
(docs/PROTOCOL.md, section 3).

A session belongs to one thread and ends with its socket. The calls of an engine's step (save, load,
cancel, release, poll) never wait: a message that the socket does not accept yet waits in a bounded
buffer; when that is full, Busy is raised and nothing is sent. The calls of the set-up (connect,
register, reset, ping) wait for their answer, bounded.

SessionEnded means that the agent's end of the socket is gone, which is a fence: this session's
memory is no longer accessed. ``close`` proves no such thing; ``drain`` waits for it. The agent, in
turn, takes the end of the engine's side as its fence: a forked process that uses the same memory
must keep its copy of the descriptor.
"""

from __future__ import annotations

import array
import itertools
import os
import select
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from kvagent import messages as m
from kvagent.errors import Busy, Malformed, Refused, SessionBroken, SessionEnded, TimedOut
from kvagent.limits import MAX_FRAME, MAX_RELEASES
from kvagent.registration import Registration, parts
from kvagent.socketdir import check_owner
from kvagent.wire import HEADER_BYTES, body_length, decode, encode, frame, job_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from kvagent.messages import Message
    from kvagent.wire import Packed


MAX_PENDING_BYTES = 4 << 20  # bytes of unsent frames; beyond it a message is refused
_READ_BYTES = 256 << 10  # of one read


class FrameStream:
    """Sends and receives messages without waiting. Owns the socket. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.ended = False
        """Whether the peer's end is gone and everything that it sent was received."""
        self.pending = 0
        """Bytes that wait to be sent."""
        self.full = False
        """Whether the last read filled its buffer, so that there may be more."""
        self._socket = sock
        self._poller = select.poll()
        self._poller.register(sock.fileno(), select.POLLIN)
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._in = bytearray()
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._open_for_writing = True
        self._held = False

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def quiet(self) -> bool:
        """Return whether there is nothing to send or receive, and no end of file.

        Cheaper than a failing read.
        """
        return not (self.pending or self.unread())

    def unread(self) -> bool:
        """Return whether there is something to receive, or the end of file. The beginning of a
        frame is nothing yet.
        """
        return bool((self._in and self._whole()) or self.ended or self._poller.poll(0))

    def sendable(self) -> bool:
        """Return whether something waits to be sent and the socket accepts some of it, or never
        will.
        """
        if not self.pending:
            return False
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLOUT)
        return bool(poller.poll(0))

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message; see send_frame."""
        self.send_frame(frame(encode(message)), fds)

    def send_frame(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame, or what the socket accepts of it; ``flush`` sends the rest.

        Busy if too much is pending.

        The descriptors must stay open until ``pending`` is 0.
        """
        if self.pending and self.pending + len(data) > MAX_PENDING_BYTES:
            raise Busy(f"{self.pending} bytes wait to be sent, at most {MAX_PENDING_BYTES}")
        sent = 0 if self.pending or self._held else self._write(data, fds)
        if sent < len(data):
            self._out.append((memoryview(data)[sent:], () if sent else tuple(fds)))
            self.pending += len(data) - sent
            self.flush()

    def flush(self) -> None:
        """Send pending bytes as far as the socket accepts them."""
        while self._out and self._open_for_writing and not self._held:
            data, fds = self._out[0]
            sent = self._write(data, fds)
            self.pending -= sent
            if sent == len(data):
                self._out.popleft()
            elif sent == 0:
                break
            else:
                self._out[0] = (data[sent:], ())  # descriptors were sent with the first byte
        if not self._open_for_writing:
            self._out.clear()
            self.pending = 0

    def cork(self) -> None:
        """Gather frames until ``uncork`` sends them at once, which wakes the peer only once."""
        self._held = True

    def uncork(self) -> None:
        """Send the gathered frames."""
        self._held = False
        if len(self._out) > 1 and not any(fds for _, fds in self._out):
            self._out = deque([(memoryview(b"".join(data for data, _ in self._out)), ())])
        self.flush()

    def receive(self, *, read: bool = True) -> Message | None:
        """Return the next message, or None if it is incomplete. Malformed if it is invalid.

        Without ``read``, only messages that were read before are returned.
        """
        body = self._next_body()
        while body is None and read and not self.ended and self._fill():
            body = self._next_body()
            read = self.full
        return None if body is None else decode(body)

    def discard(self) -> None:
        """Drop all received bytes; ``ended`` shows the end of file."""
        self._in.clear()
        while not self.ended and self._fill():
            self._in.clear()

    def shutdown_writing(self) -> None:
        """Tell the peer that nothing more is sent. Pending bytes are dropped; receiving goes on."""
        self._open_for_writing = False
        self.flush()
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the peer is gone, which receiving will show

    def close(self) -> None:
        """Close the socket. Repeated calls do nothing."""
        self._out.clear()
        self.pending = 0
        self.ended = True
        self._socket.close()

    def _write(self, data: bytes | memoryview, fds: Sequence[int] = ()) -> int:
        """Return how many bytes the socket accepted; none once the peer is gone."""
        if not self._open_for_writing:
            return 0
        try:
            return self._socket.sendmsg([data], _rights(fds)) if fds else self._socket.send(data)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            # Bytes that the peer sent before it ended can still be received, and then its end.
            self._open_for_writing = False
            return 0

    def _whole(self) -> bool:
        """Return whether a frame was read, or what cannot become one."""
        have = len(self._in)
        try:
            return have >= HEADER_BYTES and have >= HEADER_BYTES + body_length(self._in[:HEADER_BYTES])
        except Malformed:
            return True

    def _next_body(self) -> bytes | None:
        have = len(self._in)
        if have < HEADER_BYTES:
            return None
        end = HEADER_BYTES + body_length(self._in[:HEADER_BYTES])
        if have < end:
            return None
        body = bytes(self._in[HEADER_BYTES:end])
        del self._in[:end]
        return body

    def _fill(self) -> bool:
        """Read available bytes. Return False if there are none."""
        room = min(HEADER_BYTES + MAX_FRAME - len(self._in), _READ_BYTES)
        try:
            size = self._socket.recv_into(self._buffer, room)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            size = 0
        if not size:
            self.ended = True
            return False
        self.full = size == room
        self._in += self._buffer[:size]
        return True


def _rights(fds: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


SOFTWARE = "kvagent-python"
MAX_EVENTS_PER_POLL = 1024
MAX_EVENTS_KEPT = 65536  # while an answer is awaited; more end the session

Event = m.Done | m.Cancelled | m.Epoch | m.Switches | m.BlockEvents | m.Hinted
_Answer = TypeVar("_Answer", m.Registered, m.ResetDone, m.Pong)


class Session:
    """One session with an agent, made by ``connect``."""

    def __init__(self, stream: FrameStream, welcome: m.Welcome) -> None:
        self.version = welcome.version
        self.boot = welcome.boot
        """Changes with each start of the agent."""
        self.number = welcome.session
        """Identifies this session in look-ups that reserve."""
        self.limits = welcome
        self.peer = welcome.peer
        """host:port where other agents reach this session's agent; empty if they cannot."""
        self.epoch = 0
        """The space's last known weights epoch, from REGISTERED on. A job carries the epoch in
        which its blocks were computed, which may be an older one.
        """
        self.registered: m.Registered
        self._stream = stream
        self._jobs: dict[int, int] = {}  # number of blocks of each unreported job
        self._cancels: set[int] = set()
        self._job_numbers = itertools.count(1)
        self._requests = itertools.count(1)
        self._events: deque[Event] = deque()
        self._awaited = 0  # the request whose answer is awaited
        self._pinged = 0  # the unanswered PING of start_ping
        self._reply: m.Message | None = None
        self._error: m.Error | None = None
        self._broken: Malformed | None = None

    @classmethod
    def connect(
        cls, path: str | PathLike[str], timeout_s: float = 1.0, versions: tuple[int, int] = (m.MIN_VERSION, m.VERSION)
    ) -> Session:
        """Connect and exchange HELLO.

        Raise TimedOut, SessionEnded, WrongSetting if the directory is not to be trusted, or OSError
        if there is no agent.
        """
        check_owner(os.path.dirname(path))  # noqa: PTH120
        deadline = time.monotonic() + timeout_s
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(str(path))
            stream = FrameStream(sock)
            stream.send(m.Hello(versions[0], versions[1], SOFTWARE))
            welcome = _first_message(stream, deadline)
            if isinstance(welcome, m.Error):
                raise SessionEnded((), welcome.code, welcome.text)
            if not isinstance(welcome, m.Welcome) or not versions[0] <= welcome.version <= versions[1]:
                raise SessionBroken(f"hello was answered by {welcome}")
        except BaseException:
            sock.close()
            raise
        return cls(stream, welcome)

    def fileno(self) -> int:
        """Return the descriptor for select; readable when ``poll`` has something to do."""
        return self._stream.fileno()

    @property
    def ended(self) -> bool:
        """Whether the agent's end is known to be gone, or this one was closed."""
        return self._stream.ended

    @property
    def jobs(self) -> tuple[int, ...]:
        """The unreported jobs."""
        return tuple(self._jobs)

    def register(self, registration: Registration, timeout_s: float = 30.0) -> m.Registered:
        """Register memory and geometry, once per session. Refused carries the agent's text.

        After any other failure the session is unusable: nothing more is sent.
        """
        deadline = time.monotonic() + timeout_s
        req = next(self._requests)
        try:
            for message, fds in registration.messages(req):
                self._send_waiting(message, deadline, fds)
            answer = self._answer(req, m.Registered, deadline)
        except BaseException:
            self._stream.shutdown_writing()  # no message may name descriptors that the caller closes
            raise
        if answer.status != m.RegStatus.DONE:
            raise Refused("register", answer.status, answer.text)
        self.registered = answer
        self._set_epoch(answer.epoch)
        return answer

    def reset(self, timeout_s: float = 5.0) -> int:
        """Start a new weights epoch and return its number: blocks stored before are not found
        again.
        """
        answer = self._ask(m.Reset, m.ResetDone, timeout_s)
        if answer.status != m.RegStatus.DONE:
            raise Refused("reset", answer.status, answer.text)
        self._set_epoch(answer.epoch)
        return answer.epoch

    def _set_epoch(self, epoch: int) -> None:
        """Raise the epoch; an EPOCH may overtake the answer to a request, so the highest counts."""
        self.epoch = max(self.epoch, epoch)

    def ping(self, timeout_s: float = 1.0) -> None:
        """Wait for the agent's answer to a PING."""
        self._ask(m.Ping, m.Pong, timeout_s)

    def start_ping(self) -> None:
        """Send a PING without waiting for its answer; see pinging."""
        req = next(self._requests)
        self.send(m.Ping(req))
        self._pinged = req

    @property
    def pinging(self) -> bool:
        """Whether the last start_ping is unanswered, as far as poll has read."""
        return self._pinged != 0

    def save(
        self, sections: Packed, *, epoch: int, step: int, event: int = m.NO_INDEX, revoke: int = m.NO_INDEX
    ) -> int:
        """Store blocks that ``step`` computes, without waiting. ``epoch`` is the one in which they
        were computed, ``revoke`` names a revocation word.

        Return the job's number, which its Done repeats.
        """
        return self._submit(m.Save, (epoch, step, event, revoke), sections)

    def load(self, sections: Packed, *, epoch: int, step: int, event: int = m.NO_INDEX, lease: int = 0) -> int:
        """Load blocks, without waiting; ``step`` is the one in flight. Return the job's number."""
        return self._submit(m.Load, (epoch, step, event, lease), sections)

    def staged_load(self, sections: Packed, *, epoch: int, step: int, event: int, lease: int, word: int) -> int:
        """Load blocks stage by stage (messages.Stages), without waiting. Return the job's number.

        The word ``word``, which the caller has set to 0, counts the stages that have arrived.
        """
        return self._submit(m.StagedLoad, (epoch, step, event, lease, word), sections)

    def cork(self) -> None:
        """Gather messages until ``uncork`` sends them at once."""
        self._stream.cork()

    def uncork(self) -> None:
        """Send the gathered messages."""
        self._stream.uncork()

    def cancel(self, job: int) -> None:
        """Ask for a job's end, without waiting: its Done follows, then Cancelled.

        Repeated calls do nothing.
        """
        if job in self._cancels:
            return
        self.send(m.Cancel(job))
        self._cancels.add(job)

    def release(self, leases: Sequence[int]) -> None:
        """Release leases, without waiting."""
        for part in parts(leases, MAX_RELEASES):
            self.send(m.Release(tuple(part)))

    def quiet(self) -> bool:
        """Return whether poll has nothing to return now, and nothing waits to be sent."""
        return not self._events and self._stream.quiet()

    def unread(self) -> bool:
        """Return whether poll has something to return, or the session has ended."""
        return bool(self._events) or self._stream.unread()

    def unsent(self) -> bool:
        """Return whether something waits until the agent reads."""
        return self._stream.pending > 0

    def sendable(self) -> bool:
        """Return whether something waits that poll can send now."""
        return self._stream.sendable()

    def poll(self) -> list[Event]:
        """Return received events, at most MAX_EVENTS_PER_POLL, without waiting.

        Raise SessionEnded once the agent's end is gone and all completions before it were returned.
        """
        events: list[Event] = []
        if self._stream.pending:
            self._flush()
        read = True
        while len(events) < MAX_EVENTS_PER_POLL:
            if self._events:
                events.append(self._events.popleft())
            elif self._receive(read=read):
                read = self._stream.full
            else:
                break
        if not events and self._stream.ended:
            raise self._ended()
        return events

    def drain(self, timeout_s: float) -> bool:
        """Stop sending and wait for the agent's end. True is a fence. Completions are dropped."""
        deadline = time.monotonic() + timeout_s
        self._stream.shutdown_writing()
        while time.monotonic() < deadline and not self._stream.ended:
            if not self._receive() and not self._stream.ended:
                _readable(self, deadline)
            self._events.clear()
        return self._stream.ended

    def leave(self) -> None:
        """Stop sending, without waiting: the agent then ends the session and its jobs.

        Poll for its last messages.
        """
        self._stream.shutdown_writing()

    def close(self) -> None:
        """Close the socket at once. Repeated calls do nothing."""
        self._stream.close()

    def _submit(self, kind: type[m.Message], fields: tuple[int, ...], sections: Packed) -> int:
        if self.limits.max_queue and len(self._jobs) >= self.limits.max_queue:
            raise Busy(f"{len(self._jobs)} jobs are in flight, the agent accepts {self.limits.max_queue}")
        self._check_open()
        job = next(self._job_numbers)
        self._stream.send_frame(job_frame(kind, (job, *fields), sections))
        self._jobs[job] = sections.blocks
        return job

    def send(self, message: m.Message, fds: Sequence[int] = ()) -> None:
        """Send a message that has no method of its own, without waiting."""
        self._check_open()
        self._stream.send(message, fds)

    def _check_open(self) -> None:
        if self._broken is not None:
            raise SessionBroken(str(self._broken))
        if self._stream.ended:
            raise self._ended()

    def _send_waiting(self, message: m.Message, deadline: float, fds: Sequence[int] = ()) -> None:
        while True:
            try:
                return self.send(message, fds)
            except Busy:
                self._wait(deadline, writing=True)

    def _ask(self, make: Callable[[int], m.Message], kind: type[_Answer], timeout_s: float) -> _Answer:
        deadline = time.monotonic() + timeout_s
        req = next(self._requests)
        self._send_waiting(make(req), deadline)
        return self._answer(req, kind, deadline)

    def _answer(self, req: int, kind: type[_Answer], deadline: float) -> _Answer:
        self._awaited, self._reply = req, None
        while self._reply is None:
            self._wait(deadline)
        if not isinstance(self._reply, kind):
            raise SessionBroken(f"request {req} was answered by {self._reply}")
        return self._reply

    def _wait(self, deadline: float, *, writing: bool = False) -> None:
        """Wait for progress of the socket, and handle one message."""
        self._flush()
        if time.monotonic() < deadline and self._receive():
            if len(self._events) > MAX_EVENTS_KEPT:
                self._break(Malformed(f"more than {MAX_EVENTS_KEPT} events before an answer"))
            return
        if self._stream.ended:
            raise self._ended()
        if self._broken is not None:
            raise SessionBroken(str(self._broken))
        if not _readable(self, deadline, writing=writing or self._stream.pending > 0):
            raise TimedOut("no answer from the agent")

    def _flush(self) -> None:
        if self._broken is None:
            self._stream.flush()

    def _receive(self, *, read: bool = True) -> bool:
        """Handle one message; return False if there is none.

        Without ``read``, only one that was read before.
        """
        if self._broken is not None:
            self._stream.discard()
            return False
        try:
            message = self._stream.receive(read=read)
            if message is not None:
                self._take(message)
        except Malformed as error:
            self._break(error)
            return False
        return message is not None

    def _take(self, message: m.Message) -> None:
        if isinstance(message, m.Done):
            blocks = self._jobs.get(message.job)
            if blocks is None or blocks != len(message.statuses):
                raise Malformed(f"DONE of job {message.job} with {len(message.statuses)} statuses, expected {blocks}")
            del self._jobs[message.job]
            self._events.append(message)
        elif isinstance(message, m.Cancelled):
            if message.job not in self._cancels or message.job in self._jobs:
                raise Malformed(f"CANCELLED of job {message.job}, which was not cancelled or is not done")
            self._cancels.discard(message.job)
            self._events.append(message)
        elif isinstance(message, m.Epoch):
            self._set_epoch(message.epoch)
            self._events.append(message)
        elif isinstance(message, (m.Switches, m.BlockEvents, m.Hinted)):
            self._events.append(message)
        elif isinstance(message, m.Error):
            self._error = message
        elif isinstance(message, (m.Registered, m.ResetDone, m.Pong)):
            if message.req == self._awaited:  # others belong to abandoned requests
                self._reply = message
            elif message.req == self._pinged:
                self._pinged = 0
        else:
            raise Malformed(f"{type(message).__name__} is not the agent's to say")

    def _break(self, error: Malformed) -> None:
        """Stop sending to an agent that violated the protocol.

        Its end is still awaited: only that is a fence.
        """
        if self._broken is None:
            self._broken = error
            self._stream.shutdown_writing()

    def _ended(self) -> SessionEnded:
        if self._error is not None:
            return SessionEnded(self.jobs, self._error.code, self._error.text)
        return SessionEnded(self.jobs)


def _readable(session: Session | FrameStream, deadline: float, *, writing: bool = False) -> bool:
    poller = select.poll()
    poller.register(session.fileno(), select.POLLIN | (select.POLLOUT if writing else 0))
    left_ms = (deadline - time.monotonic()) * 1000
    return left_ms > 0 and bool(poller.poll(left_ms))


def _first_message(stream: FrameStream, deadline: float) -> m.Message:
    while True:
        message = stream.receive()
        if message is not None:
            return message
        if stream.ended:
            raise SessionEnded(())
        if not _readable(stream, deadline, writing=stream.pending > 0):
            raise TimedOut("no answer to hello")
        stream.flush()
