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
from kvagent.limits import MAX_RELEASES
from kvagent.registration import Registration, parts
from kvagent.socketdir import check_owner
from kvagent.wire import HEADER_BYTES, body_length, decode, encode, frame, job_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from os import PathLike

    from kvagent.messages import Message
    from kvagent.wire import Packed


MAX_PENDING_BYTES = 4 << 20  # bytes of unsent frames; beyond it a message is refused
_READ_BYTES = 256 << 10  # of one read
SOFTWARE = "kvagent-python"
MAX_EVENTS_KEPT = 65536  # while an answer is awaited; more end the session


class FrameStream:
    """Sends and receives messages without waiting. Owns the socket. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.ended = False
        """Whether the peer's end is gone and everything that it sent was received."""
        self.pending = 0
        """Bytes that wait to be sent."""
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
        """Return whether there is nothing to send or receive. Cheaper than a failing read."""
        return not (self.pending or self.unread())

    def unread(self) -> bool:
        """Return whether there is something to receive, or the end of file."""
        return self.ended or bool(self._poller.poll(0))

    def unsent(self) -> bool:
        """Return whether something waits until the peer reads."""
        return self.pending > 0

    def sendable(self) -> bool:
        """Return whether something waits that the socket accepts some of, or never will."""
        return self.pending > 0 and self.wait(0.0, select.POLLOUT)

    def wait(self, timeout_s: float, events: int = select.POLLIN) -> bool:
        """Wait for the socket. Return whether it is ready."""
        poller = select.poll()
        poller.register(self._socket.fileno(), events)
        return timeout_s >= 0 and bool(poller.poll(timeout_s * 1000))

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message; see send_frame."""
        self.send_frame(frame(encode(message)), fds)

    def send_frame(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame, or what the socket accepts of it; ``flush`` sends the rest. Busy if too
        much is pending. The descriptors must stay open until ``pending`` is 0.
        """
        if self.pending and self.pending + len(data) > MAX_PENDING_BYTES:
            raise Busy(f"{self.pending} bytes wait to be sent, at most {MAX_PENDING_BYTES}")
        self._out.append((memoryview(data), tuple(fds)))
        self.pending += len(data)
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

    def receive(self) -> Iterator[Message]:
        """Read once, and yield the messages that are whole. Malformed if one is invalid."""
        self._fill()
        while len(self._in) >= HEADER_BYTES:
            end = HEADER_BYTES + body_length(self._in[:HEADER_BYTES])
            if len(self._in) < end:
                return
            body = bytes(self._in[HEADER_BYTES:end])
            del self._in[:end]
            yield decode(body)

    def discard(self) -> None:
        """Read once, and drop all received bytes; ``ended`` shows the end of file."""
        self._fill()
        self._in.clear()

    def shutdown_writing(self) -> None:
        """Tell the peer that nothing more is sent: an agent then ends the session and its jobs.
        Pending bytes are dropped; receiving goes on.
        """
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

    def _write(self, data: memoryview, fds: Sequence[int]) -> int:
        """Return how many bytes the socket accepted; none once the peer is gone."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            return self._socket.sendmsg([data], rights) if rights else self._socket.send(data)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            # Bytes that the peer sent before it ended can still be received, and then its end.
            self._open_for_writing = False
            return 0

    def _fill(self) -> None:
        """Read what is there, at most _READ_BYTES."""
        try:
            size = 0 if self.ended else self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        except ConnectionResetError:
            size = 0
        self.ended = not size
        self._in += self._buffer[:size]


Event = m.Done | m.Cancelled | m.Epoch | m.Switches | m.BlockEvents | m.Hinted
_Answer = TypeVar("_Answer", m.Welcome, m.Registered, m.ResetDone, m.Pong)


class Session(FrameStream):
    """One session with an agent, made by ``connect``."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.limits = m.Welcome(m.VERSION, bytes(16), 0)
        """The agent's welcome: the version of the protocol, this session's number in look-ups, and
        where other agents reach this one.
        """
        self.epoch = 0
        """The space's last known epoch; a job carries that in which its blocks were computed."""
        self.registered: m.Registered
        self._jobs: dict[int, int] = {}  # number of blocks of each unreported job
        self._cancels: set[int] = set()
        self._job_numbers = itertools.count(1)
        self._requests = itertools.count(1)
        self._events: list[Event] = []
        self._awaited = 0  # the request whose answer is awaited; HELLO is number 0
        self._pinged = 0  # the unanswered PING of start_ping
        self._reply: m.Message | None = None
        self._error: m.Error | None = None
        self._broken: Malformed | None = None

    @classmethod
    def connect(cls, path: str | PathLike[str], timeout_s: float = 1.0) -> Session:
        """Connect and exchange HELLO. Raise TimedOut, SessionEnded, WrongSetting if the directory
        is not to be trusted, or OSError if there is no agent.
        """
        check_owner(os.path.dirname(path))  # noqa: PTH120
        deadline = time.monotonic() + timeout_s
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(str(path))
            session = cls(sock)
            session.send(m.Hello(m.MIN_VERSION, m.VERSION, SOFTWARE))
            session.limits = session._answer(0, m.Welcome, deadline)
        except BaseException:
            sock.close()
            raise
        return session

    @property
    def boot(self) -> bytes:
        """Changes with each start of the agent."""
        return self.limits.boot

    @property
    def jobs(self) -> tuple[int, ...]:
        """The unreported jobs."""
        return tuple(self._jobs)

    def register(self, registration: Registration, timeout_s: float = 30.0) -> m.Registered:
        """Register memory and geometry, once per session. Refused carries the agent's text. After
        any other failure the session is unusable: nothing more is sent.
        """
        deadline = time.monotonic() + timeout_s
        req = next(self._requests)
        try:
            for message, fds in registration.messages(req):
                self._send_waiting(message, deadline, fds)
            answer = self._answer(req, m.Registered, deadline)
        except BaseException:
            self.shutdown_writing()  # no message may name descriptors that the caller closes
            raise
        if answer.status != m.RegStatus.DONE:
            raise Refused("register", answer.status, answer.text)
        self.registered = answer
        self.epoch = max(self.epoch, answer.epoch)  # an EPOCH may have overtaken the answer
        return answer

    def reset(self, timeout_s: float = 5.0) -> int:
        """Start a new weights epoch and return its number: older blocks are not found again."""
        answer = self._ask(m.Reset, m.ResetDone, timeout_s)
        if answer.status != m.RegStatus.DONE:
            raise Refused("reset", answer.status, answer.text)
        self.epoch = max(self.epoch, answer.epoch)
        return answer.epoch

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
        were computed, ``revoke`` names a revocation word. Return the job's number, which its Done
        repeats.
        """
        return self._submit(m.Save, (epoch, step, event, revoke), sections)

    def load(self, sections: Packed, *, epoch: int, step: int, event: int = m.NO_INDEX, lease: int = 0) -> int:
        """Load blocks, without waiting; ``step`` is the one in flight. Return the job's number."""
        return self._submit(m.Load, (epoch, step, event, lease), sections)

    def staged_load(self, sections: Packed, *, epoch: int, step: int, event: int, lease: int, word: int) -> int:
        """Load stage by stage; the word ``word``, which is 0 before, counts what has arrived."""
        return self._submit(m.StagedLoad, (epoch, step, event, lease, word), sections)

    def cancel(self, job: int) -> None:
        """Ask for a job's end, without waiting: its Done follows, then Cancelled."""
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
        return not self._events and super().quiet()

    def unread(self) -> bool:
        """Return whether poll has something to return, or the session has ended."""
        return bool(self._events) or super().unread()

    def poll(self) -> list[Event]:
        """Return received events, without waiting. Raise SessionEnded once the agent's end is gone
        and all completions before it were returned.
        """
        self.flush()
        self._receive()
        events, self._events = self._events, []
        if not events and self.ended:
            raise self._ended()
        return events

    def drain(self, timeout_s: float) -> bool:
        """Stop sending and wait for the agent's end. True is a fence. Completions are dropped."""
        deadline = time.monotonic() + timeout_s
        self.shutdown_writing()
        while not self.ended and self.wait(deadline - time.monotonic()):
            self._receive()
            self._events.clear()
        return self.ended

    def _submit(self, kind: type[m.Message], fields: tuple[int, ...], sections: Packed) -> int:
        if self.limits.max_queue and len(self._jobs) >= self.limits.max_queue:
            raise Busy(f"{len(self._jobs)} jobs are in flight, the agent accepts {self.limits.max_queue}")
        self._check_open()
        job = next(self._job_numbers)
        self.send_frame(job_frame(kind, (job, *fields), sections))
        self._jobs[job] = sections.blocks
        return job

    def send(self, message: m.Message, fds: Sequence[int] = ()) -> None:
        """Send a message that has no method of its own, without waiting."""
        self._check_open()
        super().send(message, fds)

    def _check_open(self) -> None:
        if self.ended:
            raise self._ended()
        if self._broken is not None:
            raise SessionBroken(str(self._broken))

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
        """Wait for progress of the socket, and handle what came."""
        self.flush()
        if self._receive() and time.monotonic() < deadline:
            if len(self._events) > MAX_EVENTS_KEPT:
                self._break(Malformed(f"more than {MAX_EVENTS_KEPT} events before an answer"))
            return
        self._check_open()
        events = select.POLLIN | (select.POLLOUT if writing or self.pending else 0)
        if not self.wait(deadline - time.monotonic(), events):
            raise TimedOut("no answer from the agent")

    def _receive(self) -> bool:
        """Read once, and handle the messages that came. Return whether there were some."""
        if self._broken is not None:
            self.discard()
            return False
        some = False
        try:
            for message in self.receive():
                self._take(message)
                some = True
        except Malformed as error:
            self._break(error)
        return some

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
            self.epoch = max(self.epoch, message.epoch)
            self._events.append(message)
        elif isinstance(message, (m.Switches, m.BlockEvents, m.Hinted)):
            self._events.append(message)
        elif isinstance(message, m.Error):
            self._error = message
        elif isinstance(message, (m.Welcome, m.Registered, m.ResetDone, m.Pong)):
            req = 0 if isinstance(message, m.Welcome) else message.req
            if req == self._awaited:  # others belong to abandoned requests
                self._reply = message
            elif req == self._pinged:
                self._pinged = 0
        else:
            raise Malformed(f"{type(message).__name__} is not the agent's to say")

    def _break(self, error: Malformed) -> None:
        """Stop sending to an agent that violated the protocol. Its end is still the fence."""
        if self._broken is None:
            self._broken = error
            self.shutdown_writing()

    def _ended(self) -> SessionEnded:
        error = self._error
        return SessionEnded(self.jobs, error.code, error.text) if error is not None else SessionEnded(self.jobs)
