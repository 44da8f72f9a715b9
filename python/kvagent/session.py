"""The session client: registers an engine's memory with an agent and gives it jobs (docs/PROTOCOL.md, section 3).

A session belongs to one thread, and ends with its socket. What an engine does in its step (save, load, cancel,
release, poll) never waits: a message that the socket does not take now waits in a bounded buffer, beyond which Busy is
raised and nothing is sent. Setting up (connect, register, reset, ping, unregister) waits for its answer, bounded.

SessionEnded says that the agent's end of the socket is gone, which is a fence: no byte of this session's memory is
touched any more. ``close`` proves nothing of that kind; ``drain`` waits for it. The agent, for its part, takes the end
of the engine's side as its fence: a process that is forked off and touches the same memory has to keep its copy of the
descriptor.
"""

from __future__ import annotations

import itertools
import select
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from kvagent import messages as m
from kvagent.errors import Busy, Malformed, Refused, SessionBroken, SessionEnded, TimedOut
from kvagent.limits import MAX_RELEASES
from kvagent.packing import Packed
from kvagent.registration import Registration, parts
from kvagent.stream import FrameStream
from kvagent.wire import encode, frame, load_frame, save_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

SOFTWARE = "kvagent-python"
MAX_EVENTS_PER_POLL = 1024
MAX_EVENTS_KEPT = 65536  # while an answer is waited for; more ends the session

Event = m.Done | m.Cancelled | m.Epoch | m.Switches
_Answer = TypeVar("_Answer", m.Registered, m.Unregistered, m.ResetDone, m.EventsMade, m.Pong)


class Session:
    """One session with an agent. Made by ``connect``."""

    def __init__(self, stream: FrameStream, welcome: m.Welcome) -> None:
        self.version = welcome.version
        self.boot = welcome.boot
        """Changes with each start of the agent."""
        self.number = welcome.session
        """Names this session in look-ups that reserve."""
        self.limits = welcome
        self.epoch = 0
        """The space's weights epoch as last told, from REGISTERED on. A job is stamped with the one that its blocks
        were computed in, which may be an older one by now."""
        self.registered: m.Registered | None = None
        self._stream = stream
        self._jobs: dict[int, int] = {}  # blocks of each job that is not reported
        self._cancels: set[int] = set()
        self._job_numbers = itertools.count(1)
        self._requests = itertools.count(1)
        self._events: deque[Event] = deque()
        self._awaited = 0  # the request whose answer is waited for
        self._pinged = 0  # the PING of knock that is not answered yet
        self._reply: m.Message | None = None
        self._error: m.Error | None = None
        self._broken: Malformed | None = None

    @classmethod
    def connect(
        cls, path: str | PathLike[str], timeout_s: float = 1.0, versions: tuple[int, int] = (m.MIN_VERSION, m.VERSION)
    ) -> Session:
        """Connects and says hello. TimedOut, SessionEnded, or OSError if there is no agent."""
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
        stream.version = welcome.version
        return cls(stream, welcome)

    def fileno(self) -> int:
        """For select and for the watch of others; readable when ``poll`` has something to do."""
        return self._stream.fileno()

    @property
    def ended(self) -> bool:
        """Whether the agent's end was seen to be gone, or this one was closed."""
        return self._stream.ended

    @property
    def jobs(self) -> tuple[int, ...]:
        """The jobs that are not reported yet."""
        return tuple(self._jobs)

    def register(self, registration: Registration, timeout_s: float = 30.0) -> m.Registered:
        """Announces memory and geometry, once per session. Refused with the agent's text.

        After any other failure the session is of no use: nothing more is sent.
        """
        deadline = time.monotonic() + timeout_s
        req = next(self._requests)
        try:
            for message, fds in registration.messages(req):
                self._send_waiting(message, deadline, fds)
            answer = self._answer(req, m.Registered, deadline)
        except BaseException:
            self._stream.shutdown_writing()  # nothing may name descriptors that the caller closes
            raise
        if answer.status != m.RegStatus.DONE:
            raise Refused("register", answer.status, answer.text)
        self.registered = answer
        self._set_epoch(answer.epoch)
        return answer

    def unregister(self, timeout_s: float = 30.0) -> None:
        """Takes the registration back: afterwards nothing touches its regions any more."""
        answer = self._ask(m.Unregister, m.Unregistered, timeout_s)
        if answer.status != m.RegStatus.DONE:
            raise Refused("unregister", answer.status, answer.text)
        self.registered = None
        self.epoch = 0

    def load_events(self, off: int, count: int, timeout_s: float = 30.0) -> bytes:
        """Has the agent record events behind loads, once per registration (docs/PROTOCOL.md, LOAD_EVENTS).

        ``off`` is where ``count`` words of 8 bytes are in the sync region. Gives the events' IPC handles, joined. An
        agent that does not know the request ends the session.
        """
        answer = self._ask(lambda req: m.LoadEvents(req, off, count), m.EventsMade, timeout_s)
        if answer.status != m.RegStatus.DONE:
            raise Refused("load events", answer.status, answer.text)
        return answer.handles

    def reset(self, timeout_s: float = 5.0) -> int:
        """Starts a new weights epoch: nothing stored before is found again. Gives its number."""
        answer = self._ask(m.Reset, m.ResetDone, timeout_s)
        if answer.status != m.RegStatus.DONE:
            raise Refused("reset", answer.status, answer.text)
        self._set_epoch(answer.epoch)
        return answer.epoch

    def _set_epoch(self, epoch: int) -> None:
        """An EPOCH may overtake the answer to a request: the highest counts."""
        self.epoch = max(self.epoch, epoch)

    def ping(self, timeout_s: float = 1.0) -> None:
        """Asks whether the agent still answers."""
        self._ask(m.Ping, m.Pong, timeout_s)

    def start_ping(self) -> None:
        """Asks whether the agent still answers, without waiting for it: see knocking."""
        req = next(self._requests)
        self._send(m.Ping(req))
        self._pinged = req

    @property
    def pinging(self) -> bool:
        """Whether the last knock is not answered, as far as poll has read."""
        return self._pinged != 0

    def save(
        self,
        sections: Sequence[m.Section] | Packed,
        *,
        epoch: int,
        step: int,
        event: int = m.NO_INDEX,
        revoke: int = m.NO_INDEX,
    ) -> int:
        """Stores blocks that ``step`` computed. Gives the job's number, which its Done repeats. Does not wait.

        ``epoch`` is the one in which they were computed. ``revoke`` names a revocation word; version 1 has none.
        """
        job = next(self._job_numbers)
        if isinstance(sections, Packed):
            data = save_frame(job, epoch, step, event, revoke, sections, self.version)
            self._send_job(job, data, sections.blocks)
        else:
            message = m.Save(job, epoch, step, event, revoke, tuple(sections))
            self._send_job(job, frame(encode(message, self.version)), _blocks(sections))
        return job

    def load(
        self, sections: Sequence[m.Section] | Packed, *, epoch: int, step: int, event: int = m.NO_INDEX, lease: int = 0
    ) -> int:
        """Brings blocks, ``step`` being the one in flight. Gives the job's number, as save does. Does not wait."""
        job = next(self._job_numbers)
        if isinstance(sections, Packed):
            self._send_job(job, load_frame(job, epoch, step, event, lease, sections), sections.blocks)
        else:
            message = m.Load(job, epoch, step, event, lease, tuple(sections))
            self._send_job(job, frame(encode(message, self.version)), _blocks(sections))
        return job

    def cork(self) -> None:
        """Has what is sent from here on go out in one piece, with ``let_go``."""
        self._stream.cork()

    def uncork(self) -> None:
        """See hold."""
        self._stream.uncork()

    def cancel(self, job: int) -> None:
        """Asks for a job's end: its Done comes, then Cancelled. Does not wait. Asked twice, it is asked once."""
        if job in self._cancels:
            return
        self._send(m.Cancel(job))
        self._cancels.add(job)

    def release(self, leases: Sequence[int]) -> None:
        """Gives leases back. Does not wait."""
        for part in parts(leases, MAX_RELEASES):
            self._send(m.Release(tuple(part)))

    def quiet(self) -> bool:
        """Whether poll would give nothing now."""
        return not self._events and self._stream.quiet()

    def poll(self) -> list[Event]:
        """What came, at most MAX_EVENTS_PER_POLL, without waiting. SessionEnded once the agent's end is gone.

        Completions that came before the end are given first.
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
        """Says no more and waits for the agent's end: True is a fence. Completions are dropped."""
        deadline = time.monotonic() + timeout_s
        self._stream.shutdown_writing()
        while time.monotonic() < deadline and not self._stream.ended:
            if not self._receive() and not self._stream.ended:
                _readable(self, deadline)
            self._events.clear()
        return self._stream.ended

    def leave(self) -> None:
        """Says no more: the agent ends the session, its jobs too. Does not wait; what it says until then is polled."""
        self._stream.shutdown_writing()

    def close(self) -> None:
        """Closes the socket at once. A second call does nothing."""
        self._stream.close()

    def _send_job(self, job: int, data: bytes, blocks: int) -> None:
        if self.limits.max_queue and len(self._jobs) >= self.limits.max_queue:
            raise Busy(f"{len(self._jobs)} jobs are under way, the agent takes {self.limits.max_queue}")
        self._check_open()
        self._stream.send_frame(data)
        self._jobs[job] = blocks

    def _send(self, message: m.Message, fds: Sequence[int] = ()) -> None:
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
                return self._send(message, fds)
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
        """Waits until the socket has moved on, and takes one message in."""
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
        """Takes one message in; False if none is there. Without ``read`` it is one that was read before."""
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
        elif isinstance(message, m.Switches):
            self._events.append(message)
        elif isinstance(message, m.Error):
            self._error = message
        elif isinstance(message, (m.Registered, m.Unregistered, m.ResetDone, m.EventsMade, m.Pong)):
            if message.req == self._awaited:  # others were given up
                self._reply = message
            elif message.req == self._pinged:
                self._pinged = 0
        else:
            raise Malformed(f"{type(message).__name__} is not the agent's to say")

    def _break(self, error: Malformed) -> None:
        """The agent cannot be understood any more. Its end is awaited, since only that is a fence."""
        if self._broken is None:
            self._broken = error
            self._stream.shutdown_writing()

    def _ended(self) -> SessionEnded:
        if self._error is not None:
            return SessionEnded(self.jobs, self._error.code, self._error.text)
        return SessionEnded(self.jobs)


def _blocks(sections: Sequence[m.Section]) -> int:
    return sum(len(one.blocks) // 4 for one in sections)


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
