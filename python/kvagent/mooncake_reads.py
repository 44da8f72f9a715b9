"""The helper by which an agent reads the memory of others: a process that owns Mooncake's transfer
engine and ends with the agent.

The agent starts ``python -m kvagent.mooncake_reads serve FD`` with a connected Unix socket. A frame
is its length (4 bytes, big-endian) and one canonical msgpack array:

    agent   [1, host, protocol, devices, threads, arena bytes]   the arena's SCM_RIGHTS descriptor
    helper  [1, error or "", target, address of the arena]
    agent   [id, target, [[offset, address, length], ...]]
    helper  [id, [code]]                                         in any order

The arena is mapped and registered, so that the helpers of other agents can read it at its address,
and this one reads theirs into it: ``length`` bytes at ``address`` of ``target``, to ``offset``. A
code is 0, or Mooncake's error. After an error the engine may still be writing to the arena: only
the end of this process proves that it does not.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from kvagent.errors import Malformed
from kvagent.mooncake import APT, MAX_THREADS, PIP, Area, Frames

VERSION = 2
MAX_PULLS = 128  # of one request
MAX_TARGET = 256  # bytes
METADATA = "P2PHANDSHAKE"
PROTOCOLS = ("tcp", "rdma")


class Engine(Protocol):
    """The part of ``mooncake.engine.TransferEngine`` in use. Pointers are addresses."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        """Begin to listen; return 0 or an error."""

    def get_rpc_port(self) -> int:
        """Return the port by which other engines find this one."""

    def get_local_topology(self) -> str:
        """Return the network devices by kind of memory, as JSON."""

    def register_memory(self, pointer: int, size: int) -> int:
        """Let this memory be read, and be read into; return 0 or an error."""

    def batch_transfer_sync_read(
        self, target: str, pointers: list[int], addresses: list[int], lengths: list[int]
    ) -> int:
        """Read another engine's memory; return 0 or an error."""


def new_engine() -> Engine:
    """Return Mooncake's engine."""
    import mooncake.engine  # this module is importable without it

    made: Engine = mooncake.engine.TransferEngine()
    return made


def has_device(topology: str) -> bool:
    """Return whether some network device is in a topology: kinds of memory, each with two lists of
    devices.
    """
    return any(devices for lists in json.loads(topology).values() for devices in lists)


class Reads:
    """Reads the memory of others into the arena."""

    def __init__(self, first: object, fds: list[int]) -> None:
        """Set up the engine by the agent's first frame. OSError if Mooncake refuses."""
        if not isinstance(first, list) or len(first) != 6 or first[0] != VERSION or len(fds) != 1:
            raise Malformed(f"first frame: [{VERSION}, host, protocol, devices, threads, arena bytes] is wanted")
        _, host, protocol, devices, self.threads, size = first
        if not all(type(text) is str for text in first[1:4]) or protocol not in PROTOCOLS:
            raise Malformed(f"first frame: texts, and a protocol of {PROTOCOLS} are wanted")
        if not all(type(n) is int for n in first[4:]) or not 1 <= self.threads <= MAX_THREADS or size < 1:
            raise Malformed(f"first frame: 1 to {MAX_THREADS} threads and the bytes of the arena are wanted")
        # The engine takes TCP or RDMA by itself, as it finds devices, and says so nowhere.
        os.environ["MC_FORCE_TCP" if protocol == "tcp" else "MC_FORCE_HCA"] = "1"
        self._arena = Area(fds[0], size)
        self._engine = new_engine()
        if code := self._engine.initialize(host, METADATA, protocol, devices):
            raise OSError(f"Mooncake's engine does not start with {protocol} {devices}: code {code}")
        if protocol == "rdma" and not has_device(self._engine.get_local_topology()):
            raise OSError(f"no RDMA device {devices} on this machine")
        if code := self._engine.register_memory(self._arena.base, size):
            raise OSError(f"registering {size} bytes failed with code {code} (rdma: see ulimit -l)")
        self.target = f"{host}:{self._engine.get_rpc_port()}"
        self.base = self._arena.base

    def do(self, target: str, pulls: object) -> int:
        """Return the code of a request."""
        if not isinstance(pulls, list) or not 1 <= len(pulls) <= MAX_PULLS:
            raise Malformed(f"pulls: an array of 1 to {MAX_PULLS} is wanted")
        for pull in pulls:
            if not isinstance(pull, list) or len(pull) != 3 or type(pull[1]) is not int or pull[1] < 0:
                raise Malformed("pull: [offset, address, length] is wanted")
        pointers = [self._arena.pointer(offset, length) for offset, _, length in pulls]
        return self._engine.batch_transfer_sync_read(
            target, pointers, [pull[1] for pull in pulls], [pull[2] for pull in pulls]
        )


def read_request(request: object) -> tuple[int, str, object]:
    """Return the parts of a request."""
    if not isinstance(request, list) or len(request) != 3 or type(request[0]) is not int or type(request[1]) is not str:
        raise Malformed("request: [id, target, pulls] is wanted")
    if not 1 <= len(request[1]) <= MAX_TARGET:
        raise Malformed(f"target: a text of 1 to {MAX_TARGET} bytes is wanted")
    return request[0], request[1], request[2]


def serve(sock: socket.socket) -> None:
    """Execute the agent's requests until it is gone."""
    frames = Frames(sock)
    first, fds = frames.receive_first()
    try:
        reads = Reads(first, fds)
    except ModuleNotFoundError as error:
        return refuse(frames, f"{sys.executable}: {error}: {PIP}")
    except ImportError as error:
        return refuse(frames, f"{sys.executable}: {error}: {APT}")
    except (Malformed, OSError, ValueError, TypeError, RuntimeError) as error:
        return refuse(frames, str(error))
    frames.send([VERSION, "", reads.target, reads.base])
    pool = ThreadPoolExecutor(reads.threads)

    def answer(identity: int, target: str, pulls: object) -> None:
        try:
            frames.send([identity, [reads.do(target, pulls)]])
        except BrokenPipeError:
            pass  # the agent is gone, which the receiving thread sees
        except BaseException as error:  # noqa: BLE001 - nothing is right any more: the agent starts another
            quit_now(f"request {identity}: {error!r}")

    try:
        while True:
            pool.submit(answer, *read_request(frames.receive()))
    except (EOFError, ConnectionResetError):
        pass  # the agent is gone


def refuse(frames: Frames, reason: str) -> None:
    """Tell the agent why this helper ends."""
    frames.send([VERSION, reason[:1000], "", 0])


def quit_now(text: str) -> None:
    """End the process without waiting for threads that may hang."""
    print(f"kvagent.mooncake_reads: {text}"[:1000], file=sys.stderr, flush=True)  # noqa: T201
    os._exit(3)


def main(arguments: list[str]) -> Any:
    """Run the command line: serve FD."""
    if len(arguments) != 2 or arguments[0] != "serve" or not arguments[1].isdigit():
        return "usage: python -m kvagent.mooncake_reads serve FD"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(socket.socket(fileno=int(arguments[1])))
    except (EOFError, Malformed, OSError) as error:
        quit_now(str(error))
    os._exit(0)  # the engine's own end may hang


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
