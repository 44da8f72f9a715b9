"""The helper that reads other agents' memory, with a fake engine: arenas in this process, by their
target's name.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import struct
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvagent import fields, mooncake_reads
from kvagent.errors import Malformed
from kvagent.mooncake import read_request

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = Path(__file__).resolve().parents[2] / "testdata" / "wire" / "mooncake_reads.json"
VECTORS: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text())
ARENA = 1 << 20
HELLO = [2, "127.0.0.1", "tcp", "", 2, ARENA]
TARGET, ADDRESS = "node-2:1", 1 << 40


def named(vectors: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", vectors, ids=[vector["name"] for vector in vectors])


@named(VECTORS["frames"])
def test_frame(vector: dict[str, Any]) -> None:
    body = bytes.fromhex(vector["hex"])
    assert fields.unpack(body) == vector["value"]
    assert fields.pack(vector["value"]) == body
    if vector["name"] == "read":
        assert list(read_request(vector["value"], mooncake_reads.TARGET)) == vector["value"]


@named([vector for vector in VECTORS["malformed"] if vector["from"] == "agent"])
def test_malformed_request(vector: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        read_request(fields.unpack(bytes.fromhex(vector["hex"])), mooncake_reads.TARGET)


class Fake:
    """Behaves like Mooncake's engine; the memory of TARGET is a pattern."""

    topology = '{"cpu:0": [[], []]}'
    code = 0

    def __init__(self) -> None:
        self.remote = bytes(range(256)) * 256
        self.registered: list[int] = []

    def initialize(self, *_: str) -> int:
        return self.code

    def get_rpc_port(self) -> int:
        return 15000

    def get_local_topology(self) -> str:
        return self.topology

    def register_memory(self, _pointer: int, size: int) -> int:
        self.registered.append(size)
        return 0

    def batch_transfer_sync_read(
        self, target: str, pointers: list[int], addresses: list[int], lengths: list[int]
    ) -> int:
        for pointer, address, length in zip(pointers, addresses, lengths, strict=True):
            if target != TARGET or not ADDRESS <= address <= ADDRESS + len(self.remote) - length:
                return -1
            ctypes.memmove(pointer, self.remote[address - ADDRESS :][:length], length)
        return 0


class Helper:
    """A helper in a thread, as the agent sees it."""

    def __init__(self, hello: object) -> None:
        self.sock, self.theirs = socket.socketpair()
        fd = os.memfd_create("arena")
        os.ftruncate(fd, ARENA)
        self.arena = mmap.mmap(fd, ARENA)
        socket.send_fds(self.sock, [self._frame(hello)], [fd])
        os.close(fd)
        self.thread = threading.Thread(target=mooncake_reads.serve, args=(self.theirs,))
        self.thread.start()
        self.welcome = self.receive()

    @staticmethod
    def _frame(value: object) -> bytes:
        data = fields.pack(value)
        return struct.pack(">I", len(data)) + data

    def receive(self) -> Any:
        (length,) = struct.unpack(">I", self.sock.recv(4, socket.MSG_WAITALL))
        return fields.unpack(self.sock.recv(length, socket.MSG_WAITALL))

    def ask(self, value: object) -> Any:
        self.sock.sendall(self._frame(value))
        return self.receive()


@contextmanager
def helper(monkeypatch: pytest.MonkeyPatch, engine: Fake, hello: object = HELLO) -> Iterator[Helper]:
    monkeypatch.setattr(mooncake_reads, "new_engine", lambda: engine)
    for name in ("MC_FORCE_TCP", "MC_FORCE_HCA"):
        monkeypatch.delenv(name, raising=False)
    made = Helper(hello)
    try:
        yield made
    finally:
        made.sock.close()
        made.thread.join(10)
        made.theirs.close()
        assert not made.thread.is_alive()


def test_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Fake()
    with helper(monkeypatch, engine) as one:
        assert one.welcome[:3] == [2, "", "127.0.0.1:15000"]
        assert one.welcome[3] > 0
        assert engine.registered == [ARENA]
        assert os.environ["MC_FORCE_TCP"] == "1"
        assert one.ask([7, TARGET, [[4096, ADDRESS + 3, 1000], [0, ADDRESS, 5]]]) == [7, [0]]
        assert one.arena[4096:5096] == engine.remote[3:1003]
        assert one.arena[:6] == engine.remote[:5] + b"\0"
        assert one.ask([8, "elsewhere:1", [[0, ADDRESS, 5]]]) == [8, [-1]]


@pytest.mark.parametrize(
    ("hello", "topology", "code", "reason"),
    [
        ([2, "h", "rdma", "mlx5_9", 2, ARENA], Fake.topology, 0, "no RDMA device mlx5_9"),
        ([2, "h", "rdma", "mlx5_9", 2, ARENA], Fake.topology, -1, "mlx5_9"),
        ([2, "h", "smoke", "", 2, ARENA], Fake.topology, 0, "protocol"),
        ([2, "h", "tcp", "", 0, ARENA], Fake.topology, 0, "first frame.threads: 0"),
        ([1, "h", "tcp", "", 2, ARENA], Fake.topology, 0, "first frame"),
    ],
)  # fmt: skip
def test_refusal(monkeypatch: pytest.MonkeyPatch, hello: object, topology: str, code: int, reason: str) -> None:
    engine = Fake()
    engine.topology, engine.code = topology, code
    with helper(monkeypatch, engine, hello) as one:
        assert reason in one.welcome[1]
        assert one.welcome[2:] == ["", 0]


def test_a_device_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Fake()
    engine.topology = '{"cpu:0": [["mlx5_0"], []]}'
    with helper(monkeypatch, engine, [2, "h", "rdma", "", 2, ARENA]) as one:
        assert one.welcome[1] == ""
        assert os.environ["MC_FORCE_HCA"] == "1"


@pytest.mark.parametrize(
    "pulls", [[], [[0, 0, 1]] * 129, [[0, 1]], [[ARENA, 0, 1]], [[-1, 0, 1]], [[0, -1, 1]], [["0", 0, 1]]]
)  # fmt: skip
def test_pulls_that_are_refused(monkeypatch: pytest.MonkeyPatch, pulls: list[Any]) -> None:
    """They end the helper, whose agent starts another."""
    monkeypatch.setattr(mooncake_reads, "new_engine", Fake)
    fd = os.memfd_create("arena")
    os.ftruncate(fd, ARENA)
    with pytest.raises(Malformed):
        mooncake_reads.Reads(HELLO, [fd]).do(TARGET, pulls)
