"""Frames and descriptors over a non-blocking Unix stream socket."""

from __future__ import annotations

import array
import select
import socket
from collections import deque
from typing import TYPE_CHECKING

from kvagent.errors import Busy, Malformed
from kvagent.limits import MAX_FRAME
from kvagent.wire import HEADER_BYTES, body_length, decode, encode, frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.messages import Message

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
