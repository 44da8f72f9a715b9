"""The helper of the Mooncake tier, with a fake client: a dictionary that reads and writes the same
memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent import fields, mooncake
from kvagent.errors import Malformed

if TYPE_CHECKING:
    from collections.abc import Iterator

BOUNCE, ARENA = 1 << 20, 2 << 20
SETTINGS = ["127.0.0.1", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", "127.0.0.1:1", 2, 4]


class Dictionary:
    """Behaves like Mooncake's client, including its oddities."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.closed = threading.Event()
        self.registered: list[int] = []

    def setup(self, *_: object) -> int:
        return 0

    def register_buffer(self, _pointer: int, size: int) -> int:
        self.registered.append(size)
        return 0

    def get_hostname(self) -> str:
        return "127.0.0.1:1"

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.values) for key in keys]

    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], _config: object
    ) -> list[int]:
        for n, key in enumerate(keys):
            value = b"".join(ctypes.string_at(p, s) for p, s in zip(pointers[n], sizes[n], strict=True))
            self.values.setdefault(key, value)
        return [0] * len(keys)

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        return [self._get(key, pointers[n], sizes[n]) for n, key in enumerate(keys)]

    def _get(self, key: str, pointers: list[int], sizes: list[int]) -> int:
        value = self.values.get(key)
        if value is None:
            return -704
        if len(value) != sum(sizes):
            return -600 if len(value) > sum(sizes) else -800
        at = 0
        for pointer, size in zip(pointers, sizes, strict=True):
            ctypes.memmove(pointer, value[at : at + size], size)
            at += size
        return len(value)

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return [0 if force and self.values.pop(key, None) is not None else -704 for key in keys]

    def get_size(self, key: str) -> int:
        return len(self.values[key]) if key in self.values else -704

    def close(self) -> int:
        self.closed.set()
        return 0


class Agent:
    """The other end of the socket, and the memory."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.bounce, self.arena = (self._memory(size) for size in (BOUNCE, ARENA))

    def _memory(self, size: int) -> tuple[int, mmap.mmap]:
        fd = os.memfd_create("test")
        os.ftruncate(fd, size)
        return fd, mmap.mmap(fd, size)

    def frame(self, value: object) -> bytes:
        data = fields.pack(value)
        return struct.pack(">I", len(data)) + data

    def greet(self, first: object) -> Any:
        socket.send_fds(self.sock, [self.frame(first)], [self.bounce[0], self.arena[0]])
        return self.receive()

    def ask(self, *request: object) -> Any:
        self.sock.sendall(self.frame(list(request)))
        return self.receive()

    def receive(self) -> Any:
        (length,) = struct.unpack(">I", self.sock.recv(4, socket.MSG_WAITALL))
        return fields.unpack(self.sock.recv(length, socket.MSG_WAITALL))


@contextmanager
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Agent, Dictionary]]:
    client = Dictionary()
    module = SimpleNamespace(ReplicateConfig=SimpleNamespace)
    monkeypatch.setattr(mooncake, "new_client", lambda: (client, module))
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=mooncake.serve, args=(theirs,))
    thread.start()
    with ours, theirs:
        ours.settimeout(10)
        yield Agent(ours), client
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive()


def test_values_go_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch) as (agent, client):
        assert agent.greet([2, SETTINGS, BOUNCE, ARENA]) == [2, "", "127.0.0.1:1"]
        assert client.registered == [BOUNCE, ARENA]
        agent.bounce[1][4096:4099] = b"abc"
        agent.arena[1][100:110] = b"0123456789"
        items = [["k", 1, 100, 10], ["e", 0, 4096, 3]]
        assert agent.ask(1, mooncake.PUT, items) == [1, [0, 0]]
        assert client.values == {"k": b"0123456789", "e": b"abc"}
        assert agent.ask(2, mooncake.PUT, items) == [2, [1, 1]]
        wanted = [["k", 1, 500, 10], ["k", 1, 600, 9], ["k", 1, 700, 11], ["no", 0, 4096, 5]]
        assert agent.ask(3, mooncake.GET, wanted) == [3, [10, -600, -600, -704]]
        assert agent.arena[1][500:510] == b"0123456789"
        assert agent.ask(4, mooncake.EXISTS, ["k", "no"]) == [4, [1, 0]]
        assert agent.ask(5, mooncake.DELETE, ["k", "no"]) == [5, [10, -704]]
        assert agent.ask(6, mooncake.EXISTS, ["k"]) == [6, [0]]
    assert client.closed.is_set()


@pytest.mark.parametrize(
    "body",
    [
        [["k", 1, ARENA - 9, 10]],
        [["k", 0, -1, 1]],
        [["k", 2, 0, 1]],
        [["", 0, 0, 1]],
        [["k", 0, 0]],
        [[7, 0, 0, 1]],
        [["k", 0, 0, 1]] * (mooncake.MAX_KEYS + 1),
        "k",
    ],
)
def test_what_lies_outside_is_refused(body: object) -> None:
    areas = []
    for size in (BOUNCE, ARENA):
        fd = os.memfd_create("test")
        os.ftruncate(fd, size)
        areas.append(mooncake.Area(fd, size))
    values = mooncake.Values(Dictionary(), None, areas)
    with pytest.raises(Malformed):
        values.do(mooncake.GET, body)


@pytest.mark.parametrize(
    "first",
    [[1, SETTINGS, BOUNCE, ARENA], [2, SETTINGS[:-1], BOUNCE, ARENA], [2, [*SETTINGS[:-1], 0], BOUNCE, ARENA], 7],
)
def test_a_wrong_first_frame_is_answered(monkeypatch: pytest.MonkeyPatch, first: object) -> None:
    with served(monkeypatch) as (agent, _):
        version, reason, name = agent.greet(first)
        assert (version, name) == (mooncake.VERSION, "")
        assert "Malformed" in reason


def test_a_request_is_read_strictly() -> None:
    for request in ([1, 5, []], [1, 1], ["1", 1, []], 7):
        with pytest.raises(Malformed):
            mooncake.read_request(request)


def test_check_names_what_to_install() -> None:
    script = "import sys; sys.modules['mooncake'] = None; from kvagent.mooncake import check; check()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "pip install mooncake-transfer-engine" in done.stderr
