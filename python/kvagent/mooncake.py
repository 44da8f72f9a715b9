"""The helper of the agent's Mooncake tier: a process that owns Mooncake's client and ends with the
agent.

``python -m kvagent.mooncake check`` reports missing packages. The agent starts ``python -m
kvagent.mooncake serve FD`` with a connected Unix socket. A frame is its length (4 bytes,
big-endian) and one canonical msgpack array:

    agent   [1, settings, bounce bytes, arena bytes]   an SCM_RIGHTS descriptor per non-empty area
    helper  [1, error or "", name of the client]
    agent   [id, PUT or GET, [[key, header, area, offset, length], ...]]
    agent   [id, EXISTS or DELETE, [key, ...]]
    helper  [id, [code, ...]]                          in any order

A value is 32 bytes at ``header`` of the bounce area, and ``length`` bytes at ``offset`` of area 0
(bounce) or 1 (arena). Both areas are mapped and registered with the client, which reads and writes
them in place. A code of PUT is 0 (stored), 1 (existed before) or Mooncake's error; of GET the bytes
read, or an error; of EXISTS 1, 0 or an error; of DELETE the bytes removed, or an error.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from kvagent import canonical
from kvagent.errors import Malformed

VERSION = 2
MAX_FRAME = 1 << 20  # bytes
MAX_KEYS = 128  # of one request
MAX_KEY = 512  # bytes
MAX_THREADS = 64  # of each kind
HEADER = 32  # bytes
BOUNCE, ARENA = 0, 1
PUT, GET, EXISTS, DELETE = 1, 2, 3, 4

WRONG_LENGTH = -600
TRANSFER_FAILED = -800

PIP = "pip install mooncake-transfer-engine (without CUDA: mooncake-transfer-engine-non-cuda)"
APT = "apt-get install libibverbs1 libnuma1 libcurl4"


class Client(Protocol):
    """The part of ``mooncake.store.MooncakeDistributedStore`` in use.

    Pointers are addresses in this process.
    """

    def setup(
        self, host: str, metadata: str, segment: int, local: int, protocol: str, devices: str, master: str
    ) -> int:
        """Connect; return 0 or an error."""

    def register_buffer(self, pointer: int, size: int) -> int:
        """Allow values in this memory; return 0 or an error."""

    def get_hostname(self) -> str:
        """Return the name of the client's segment."""

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Return 1, 0 or an error for each."""

    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], config: object
    ) -> list[int]:
        """Return 0 or an error for each; 0 also for what existed before."""

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """Return bytes or an error for each."""

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        """Return 0 or an error for each."""

    def get_size(self, key: str) -> int:
        """Return bytes or an error."""

    def close(self) -> int:
        """Leave; the master forgets the segment."""


@dataclass(frozen=True)
class Settings:
    """The settings in the agent's first frame. Sizes are bytes, times milliseconds."""

    host: str
    metadata: str
    segment: int
    local: int
    protocol: str
    devices: str
    master: str
    replicas: int
    threads: int  # per kind: values, questions

    @classmethod
    def read(cls, fields: object) -> Settings:
        """Return the settings, or raise Malformed if a field is missing or out of range."""
        if not isinstance(fields, list) or len(fields) != 9:
            raise Malformed("settings: an array of 9 is wanted")
        kinds = (str, str, int, int, str, str, str, int, int)
        for n, (field, kind) in enumerate(zip(fields, kinds, strict=True)):
            if type(field) is not kind or (isinstance(field, int) and field < 0):
                raise Malformed(f"settings: field {n} is no {kind.__name__} of 0 or more")
        settings = cls(*fields)
        if not 1 <= settings.threads <= MAX_THREADS:
            raise Malformed(f"settings: 1 to {MAX_THREADS} threads are wanted")
        return settings


class Area:
    """Memory shared by the agent, mapped for the lifetime of the process."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(fd, size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        os.close(fd)

    def pointer(self, offset: object, length: object) -> int:
        """Return the address of a range, which must lie inside."""
        if not isinstance(offset, int) or not isinstance(length, int) or min(offset, length) < 0:
            raise Malformed(f"offset {offset}, length {length}: numbers of 0 or more are wanted")
        if offset + length > self.size:
            raise Malformed(f"offset {offset}, length {length}: not inside of {self.size} bytes")
        return self.base + offset


def read_keys(value: object) -> list[str]:
    """Return the keys of a request."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_KEYS:
        raise Malformed(f"keys: an array of 1 to {MAX_KEYS} is wanted")
    for key in value:
        if type(key) is not str or not 1 <= len(key) <= MAX_KEY:
            raise Malformed(f"key: a text of 1 to {MAX_KEY} bytes is wanted")
    return value


class Values:
    """Executes requests with the client."""

    def __init__(self, client: Client, config: object, areas: list[Area]) -> None:
        self._client = client
        self._config = config
        self._areas = areas

    def do(self, operation: int, body: object) -> list[int]:
        """Return the codes of a request, one per key."""
        if operation == EXISTS:
            keys = read_keys(body)
            codes = self._client.batch_is_exist(keys)
        elif operation == DELETE:
            keys = read_keys(body)
            codes = self._delete(keys)
        else:
            keys, pointers, sizes = self._places(body)
            codes = (self._put if operation == PUT else self._get)(keys, pointers, sizes)
        if len(codes) != len(keys):  # the batch failed as a whole
            codes = [codes[0] if codes and codes[0] < 0 else -1] * len(keys)
        return codes

    def _places(self, body: object) -> tuple[list[str], list[list[int]], list[list[int]]]:
        if not isinstance(body, list) or not all(isinstance(item, list) and len(item) == 5 for item in body):
            raise Malformed("values: an array of arrays of 5 is wanted")
        pointers, sizes = [], []
        for _, header, area, offset, length in body:
            if area not in (BOUNCE, ARENA) or area >= len(self._areas):
                raise Malformed(f"area {area} is not there")
            data = self._areas[area].pointer(offset, length)
            pointers.append([self._areas[BOUNCE].pointer(header, HEADER), data][: 1 + (length > 0)])
            sizes.append([HEADER, length][: 1 + (length > 0)])
        return read_keys([item[0] for item in body]), pointers, sizes

    def _put(self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Store values; existing keys are detected first, since Mooncake returns 0 for them."""
        codes = self._client.batch_is_exist(keys)
        absent = [n for n, code in enumerate(codes) if code == 0]
        if len(codes) != len(keys) or not absent:
            return codes
        stored = self._client.batch_put_from_multi_buffers(
            [keys[n] for n in absent], [pointers[n] for n in absent], [sizes[n] for n in absent], self._config
        )
        if len(stored) != len(absent):
            return stored
        for n, code in zip(absent, stored, strict=True):
            codes[n] = code
        return codes

    def _get(self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """A value shorter than was asked for fails like a transfer: its size tells them apart."""
        codes = self._client.batch_get_into_multi_buffers(keys, pointers, sizes)
        for n, code in enumerate(codes):
            if code == TRANSFER_FAILED and 0 <= self._client.get_size(keys[n]) != sum(sizes[n]):
                codes[n] = WRONG_LENGTH
        return codes

    def _delete(self, keys: list[str]) -> list[int]:
        sizes = [self._client.get_size(key) for key in keys]
        codes = self._client.batch_remove(keys, True)
        return [max(sizes[n], 0) if code == 0 else code for n, code in enumerate(codes)]


class Frames:
    """The agent's socket. One thread receives; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def receive_first(self) -> tuple[Any, list[int]]:
        """Return the first frame and its descriptors."""
        head, fds, _, _ = socket.recv_fds(self._sock, 4, 2)
        return self._body(head + self._exactly(4 - len(head))), fds

    def receive(self) -> Any:
        """Return the next frame. EOFError when the agent is gone."""
        return self._body(self._exactly(4))

    def _body(self, head: bytes) -> Any:
        (length,) = struct.unpack(">I", head)
        if length > MAX_FRAME:
            raise Malformed(f"frame of {length} bytes, at most {MAX_FRAME} are allowed")
        return canonical.unpack(self._exactly(length))

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = self._sock.recv(length - len(data))
            if not part:
                raise EOFError("the agent is gone")
            data += part
        return bytes(data)

    def send(self, value: object) -> None:
        """Send one frame."""
        data = canonical.pack(value)
        with self._sending:
            self._sock.sendall(struct.pack(">I", len(data)) + data)


def new_client() -> tuple[Client, Any]:
    """Return Mooncake's client, and its module."""
    import mooncake.store  # this module is importable without it

    return mooncake.store.MooncakeDistributedStore(), mooncake.store


def replication(module: Any, settings: Settings) -> object:
    """Return the configuration of replicas."""
    config = module.ReplicateConfig()
    config.replica_num = settings.replicas
    return config


def start(first: object, fds: list[int]) -> tuple[Client, Values, Settings]:
    """Set up the client by the agent's first frame. OSError if Mooncake refuses."""
    if not isinstance(first, list) or len(first) != 4 or first[0] != VERSION:
        raise Malformed(f"first frame: [{VERSION}, settings, bounce bytes, arena bytes] is wanted")
    settings = Settings.read(first[1])
    sizes = [size for size in first[2:] if size != 0]
    if len(sizes) != len(fds) or not all(type(size) is int and size > 0 for size in sizes):
        raise Malformed(f"first frame: {len(fds)} descriptors for areas of {sizes} bytes")
    areas = [Area(fd, size) for fd, size in zip(fds, sizes, strict=True)]
    client, module = new_client()
    code = client.setup(
        settings.host,
        settings.metadata,
        settings.segment,
        settings.local,
        settings.protocol,
        settings.devices,
        settings.master,
    )
    if code != 0:
        raise OSError(f"Mooncake's setup failed with code {code}: protocol, device, master or metadata server")
    for area in areas:
        if code := client.register_buffer(area.base, area.size):
            raise OSError(f"registering {area.size} bytes failed with code {code} (rdma: see ulimit -l)")
    return client, Values(client, replication(module, settings), areas), settings


def serve(sock: socket.socket) -> None:
    """Execute the agent's requests until it is gone."""
    frames = Frames(sock)
    first, fds = frames.receive_first()
    try:
        client, values, settings = start(first, fds)
    except (Malformed, OSError, ImportError, ValueError, TypeError, RuntimeError) as error:
        frames.send([VERSION, f"{type(error).__name__}: {error}"[:1000], ""])
        return
    frames.send([VERSION, "", client.get_hostname()])
    # Questions have their own threads: slow transfers of values must not delay them.
    pools = {kind: ThreadPoolExecutor(settings.threads, thread_name_prefix=kind) for kind in ("values", "questions")}

    def answer(identity: int, operation: int, body: object) -> None:
        try:
            frames.send([identity, values.do(operation, body)])
        except BrokenPipeError:
            pass  # the agent is gone, which the receiving thread sees
        except BaseException as error:  # noqa: BLE001 - nothing is right any more: the agent starts another
            quit_now(f"request {identity}: {error!r}")

    try:
        while True:
            identity, operation, body = read_request(frames.receive())
            kind = "values" if operation in (PUT, GET) else "questions"
            pools[kind].submit(answer, identity, operation, body)
    except (EOFError, ConnectionResetError):
        client.close()  # so that the master forgets the segment at once


def read_request(request: object) -> tuple[int, int, object]:
    """Return the parts of a request."""
    if (
        not isinstance(request, list)
        or len(request) != 3
        or type(request[0]) is not int
        or request[1] not in (PUT, GET, EXISTS, DELETE)
    ):
        raise Malformed("request: [id, operation, keys or values] is wanted")
    return request[0], request[1], request[2]


def quit_now(text: str) -> None:
    """End the process without waiting for threads that may hang."""
    print(f"kvagent.mooncake: {text}"[:1000], file=sys.stderr, flush=True)  # noqa: T201
    os._exit(3)


def check() -> None:
    """Exit with the names of missing packages, if any."""
    try:
        new_client()
    except ModuleNotFoundError as error:
        sys.exit(f"kvagent.mooncake: {sys.executable}: {error}: {PIP}")
    except ImportError as error:
        sys.exit(f"kvagent.mooncake: {sys.executable}: {error}: {APT}")


def main(arguments: list[str]) -> None:
    """Run the command line: check, or serve FD."""
    if arguments == ["check"]:
        check()
    elif len(arguments) == 2 and arguments[0] == "serve" and arguments[1].isdigit():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            serve(socket.socket(fileno=int(arguments[1])))
        except (EOFError, Malformed, OSError) as error:
            quit_now(str(error))
        os._exit(0)
    else:
        sys.exit("usage: python -m kvagent.mooncake check | serve FD")


if __name__ == "__main__":
    main(sys.argv[1:])
