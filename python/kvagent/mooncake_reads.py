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

import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

from kvagent.errors import Malformed
from kvagent.fields import Record, array, string, uint
from kvagent.messages import U64
from kvagent.mooncake import MAX_THREADS, VERSION, Area, Frames, Helper, Text, run

MAX_PULLS = 128  # of one request
MAX_TARGET = 256  # bytes
METADATA = "P2PHANDSHAKE"
PROTOCOLS = ("tcp", "rdma")

Engine = Any
"""``mooncake.engine.TransferEngine``. Pointers are addresses."""


@dataclass(frozen=True)
class Hello:
    """The agent's first frame."""

    version: Annotated[int, uint(VERSION, VERSION)]
    host: Text
    protocol: Text
    devices: Text
    threads: Annotated[int, uint(1, MAX_THREADS)]
    size: Annotated[int, uint(1, 2**64 - 1)]


@dataclass(frozen=True)
class Pull:
    """Where the bytes go and come from."""

    offset: U64
    address: U64
    length: U64


_HELLO, _PULLS, TARGET = Record(Hello), array(Record(Pull), 1, MAX_PULLS), string(1, MAX_TARGET)


def new_engine() -> Engine:
    """Return Mooncake's engine."""
    import mooncake.engine  # this module is importable without it

    return mooncake.engine.TransferEngine()


def has_device(topology: str) -> bool:
    """Return whether some network device is in a topology, by kinds of memory."""
    return any(devices for lists in json.loads(topology).values() for devices in lists)


class Reads:
    """Reads the memory of others into the arena."""

    def __init__(self, first: object, fds: list[int]) -> None:
        """Set up the engine by the agent's first frame. OSError if Mooncake refuses."""
        hello = _HELLO.read(first, "first frame")
        host, protocol, devices, size = hello.host, hello.protocol, hello.devices, hello.size
        if protocol not in PROTOCOLS or len(fds) != 1:
            raise Malformed(f"first frame: one descriptor, and a protocol of {PROTOCOLS} are wanted")
        self.threads = hello.threads
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

    def do(self, target: str, pulls: object) -> list[int]:
        """Return the code of a request."""
        some = _PULLS.read(pulls, "pulls")
        pointers = [self._arena.pointer(one.offset, one.length) for one in some]
        addresses, lengths = [one.address for one in some], [one.length for one in some]
        return [self._engine.batch_transfer_sync_read(target, pointers, addresses, lengths)]


def start(first: object, fds: list[int]) -> Helper:
    """Set up the engine by the agent's first frame."""
    reads = Reads(first, fds)
    pool = ThreadPoolExecutor(reads.threads)
    return Helper([reads.target, reads.base], reads.do, lambda _: pool, lambda: None)


def serve(sock: socket.socket) -> None:
    """Execute the agent's requests until it is gone."""
    Frames(sock).serve(start, ["", 0], TARGET)


def main(arguments: list[str]) -> None:
    """Run the command line: serve FD."""
    if len(arguments) != 2 or arguments[0] != "serve" or not arguments[1].isdigit():
        sys.exit("usage: python -m kvagent.mooncake_reads serve FD")
    run(serve, arguments[1])


if __name__ == "__main__":
    main(sys.argv[1:])
