"""Look-ups in the forms of other projects, sent by plain pyzmq to the real agent."""

from __future__ import annotations

import socket
import struct
import subprocess
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import zmq

from kvagent import messages as m
from tests import foreign
from tests.agent import KVBENCH, PATIENCE_S, AgentProcess, Engine, chain, eventually
from tests.test_agent import save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ASCEND = "lookup_rpc_port_0_dp_rank0"
UPSTREAM = f"lookup_rpc_port_0_host_{socket.gethostname()}_dp_rank0"


class Client:
    """A REQ socket like those of the other projects' schedulers."""

    def __init__(self, path: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self._socket.connect(f"ipc://{path}")

    def ask(self, frames: list[bytes]) -> bytes:
        self._socket.send_multipart(frames)
        (answer,) = self._socket.recv_multipart()
        return answer

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def stored() -> list[bytes]:
    return chain("prompt", 6)


@pytest.fixture(params=[ASCEND, UPSTREAM])
def client(agent: AgentProcess, stored: list[bytes], request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of a socket for a space in which the prompt's six blocks are stored."""
    with closing(Engine(agent, "engine", lookup_name=request.param)) as engine:
        assert save(engine, stored, list(range(6)), salt=1) == bytes([m.BlockStatus.OK] * 6)
        with closing(Client(agent.folder / request.param)) as client:
            yield client


ABSENT = b"absent".ljust(32, b".")


@pytest.mark.parametrize("generation", [2, 3, 4])
def test_ascend_store(client: Client, stored: list[bytes], generation: int) -> None:
    def ask(tokens: int, hashes: list[bytes], hbm_tokens: int = 0) -> int:
        groups = [0] if generation > 2 else None
        frames = foreign.ascend(tokens, hashes, groups, hbm_tokens if generation > 3 else None)
        assert len(frames) == generation
        answer = client.ask(frames)
        assert len(answer) == 4
        return int.from_bytes(answer, "big")

    assert ask(96, stored) == 96
    assert ask(100, [*stored, ABSENT]) == 96
    assert ask(96, [*stored[:2], ABSENT, *stored[3:]]) == 32
    assert ask(95, stored) == 80
    assert ask(96, [ABSENT]) == 0
    assert ask(0, []) == 0
    assert ask(96, stored, hbm_tokens=48) == 96


def test_upstream(client: Client, stored: list[bytes]) -> None:
    def ask(tokens: int, hashes: list[bytes]) -> int:
        answer = client.ask(foreign.upstream(tokens, hashes, 32))
        assert len(answer) == 4
        return int.from_bytes(answer, "big")

    assert ask(96, stored) == 96
    assert ask(1000, [*stored, ABSENT]) == 96
    assert ask(96, [*stored[:3], ABSENT]) == 48
    assert ask(96, []) == 0
    assert client.ask([b"reset"]) == b"\x01"
    assert ask(96, stored) == 0


def test_simple(client: Client, stored: list[bytes]) -> None:
    def ask(tokens: int, hashes: list[bytes]) -> int:
        blocks: int = struct.unpack("<Q", client.ask(foreign.simple(tokens, hashes)))[0]
        return blocks

    assert ask(96, stored) == 6
    assert ask(96, [*stored[:4], ABSENT, stored[5]]) == 4
    assert ask(50, stored) == 3
    assert ask(0, []) == 0


@pytest.mark.parametrize(
    ("frames", "answer"),
    [
        ([b""], bytes(4)),
        ([b"reset!"], bytes(4)),
        ([b"\0\0\0\x10"], bytes(4)),
        ([b"\0\0\0\x10", b"not msgpack"], bytes(4)),
        ([b"\0\0\0\x10", b"\xdd\xff\xff\xff\xff"], bytes(4)),
        ([b"\0\0\0\x10", b"\x91\xa2XY"], bytes(4)),
        ([b"\0\0\0\x10", b"\x91\0", b"\0\0\0", b"\x90"], bytes(4)),
        ([b"lookup", b"\0\0\0\x10", b"\0\x20", b"short"], bytes(4)),
        ([b"lookup", b"\0\0\0\x10", b"\0\0", b"x"], bytes(4)),
        ([bytes(8), b"not 32 bytes"], bytes(8)),
        ([bytes(7), bytes(32)], bytes(4)),
    ],
)
def test_nonsense_is_answered_and_stops_nothing(
    client: Client, stored: list[bytes], frames: list[bytes], answer: bytes
) -> None:
    assert client.ask(frames) == answer
    assert client.ask(foreign.upstream(96, stored, 32)) == (96).to_bytes(4, "big")


def test_a_mock_engine_fills_an_agent_for_foreign_clients(agent: AgentProcess, tmp_path: Path) -> None:
    hashes = chain("filled", 5)
    (tmp_path / "hashes").write_text("".join(f"{one.hex()}\n" for one in hashes))
    command = [
        str(KVBENCH), "mock", "--fill", str(tmp_path / "hashes"), "--socket-dir", str(agent.folder),
        "--lookup-name", ASCEND, "--block-size", "128", "--hold",
    ]  # fmt: skip
    with (tmp_path / "mock.log").open("wb") as log:
        mock = subprocess.Popen(command, stdout=log, stderr=log)

    def filled() -> bool:
        assert mock.poll() is None, (tmp_path / "mock.log").read_text()[-2000:]
        return bool(agent.status()["blocks_stored"] == 5)

    try:
        eventually(filled, "five blocks in the pool")
        with closing(Client(agent.folder / ASCEND)) as client:
            assert client.ask(foreign.ascend(640, hashes, [0], 0)) == (640).to_bytes(4, "big")
            assert client.ask(foreign.ascend(640, hashes, None, None)) == (640).to_bytes(4, "big")
            assert client.ask(foreign.upstream(10_000, hashes, 32)) == (640).to_bytes(4, "big")
            assert client.ask(foreign.simple(640, hashes)) == struct.pack("<Q", 5)
    finally:
        mock.kill()
        mock.wait()
