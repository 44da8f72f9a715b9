"""The helper of the agent's Mooncake tier: a process that owns Mooncake's client and ends with the
agent.

``python -m kvagent.mooncake check`` reports missing packages. The agent starts ``python -m
kvagent.mooncake serve FD`` with a connected Unix socket. A frame is its length (4 bytes,
big-endian) and one canonical msgpack array:

    agent   [1, settings, bounce bytes, arena bytes]   an SCM_RIGHTS descriptor per non-empty area
    helper  [1, error or "", name of the client]
    agent   [id, PUT or GET, [[key, area, offset, length], ...]]
    agent   [id, EXISTS or DELETE, [key, ...]]
    helper  [id, [code, ...]]                          in any order

A value is ``length`` bytes at ``offset`` of area 0 (bounce) or 1 (arena). Both areas are mapped and
registered with the client, which reads and writes them in place. A code of PUT is 0 (stored), 1
(existed before) or Mooncake's error; of GET the bytes read, or an error; of EXISTS 1, 0 or an
error; of DELETE the bytes removed, or an error.
"""

import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from kvagent.errors import Malformed
from kvagent.fields import Field, Record, array, pack, string, uint, unpack
from kvagent.messages import U64, Flag

VERSION = 2
MAX_FRAME = 1 << 20  # bytes
MAX_KEYS = 128  # of one request
MAX_KEY = 512  # bytes
MAX_THREADS = 64  # of each kind
PUT, GET, EXISTS, DELETE = 1, 2, 3, 4

WRONG_LENGTH = -600
TRANSFER_FAILED = -800

PIP = "pip install mooncake-transfer-engine (without CUDA: mooncake-transfer-engine-non-cuda)"
APT = "apt-get install libibverbs1 libnuma1 libcurl4"

Client = Any
"""``mooncake.store.MooncakeDistributedStore``. Pointers are addresses in this process."""
Text = Annotated[str, string(0, MAX_FRAME)]


@dataclass(frozen=True)
class Settings:
    """The settings in the agent's first frame. Sizes are bytes."""

    host: Text
    metadata: Text
    segment: U64
    local: U64
    protocol: Text
    devices: Text
    master: Text
    replicas: U64
    threads: Annotated[int, uint(1, MAX_THREADS)]  # per kind: values, questions


@dataclass(frozen=True)
class Hello:
    """The agent's first frame. The sizes of the areas are bytes."""

    version: Annotated[int, uint(VERSION, VERSION)]
    settings: Annotated[Settings, Record(Settings)]
    bounce: U64
    arena: U64


@dataclass(frozen=True)
class Value:
    """Where a value is."""

    key: Annotated[str, string(1, MAX_KEY)]
    area: Flag
    offset: U64
    length: U64


_OPERATION = uint(PUT, DELETE)
_HELLO, _KEYS, _VALUES = Record(Hello), array(string(1, MAX_KEY), 1, MAX_KEYS), array(Record(Value), 1, MAX_KEYS)


class Area:
    """Memory shared by the agent, mapped for the lifetime of the process."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(fd, size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        os.close(fd)

    def pointer(self, offset: int, length: int) -> int:
        """Return the address of a range, which must lie inside."""
        if offset + length > self.size:
            raise Malformed(f"offset {offset}, length {length}: not inside of {self.size} bytes")
        return self.base + offset


class Values:
    """Executes requests with the client."""

    def __init__(self, client: Client, config: object, areas: list[Area]) -> None:
        self._client = client
        self._config = config
        self._areas = areas

    def do(self, operation: int, body: object) -> list[int]:
        """Return the codes of a request, one per key."""
        if operation in (PUT, GET):
            keys, pointers, sizes = self._places(body)
            codes: list[int] = (self._put if operation == PUT else self._get)(keys, pointers, sizes)
        else:
            keys = list(_KEYS.read(body, "keys"))
            codes = self._client.batch_is_exist(keys) if operation == EXISTS else self._delete(keys)
        if len(codes) != len(keys):  # the batch failed as a whole
            codes = [codes[0] if codes and codes[0] < 0 else -1] * len(keys)
        return codes

    def _places(self, body: object) -> tuple[list[str], list[list[int]], list[list[int]]]:
        keys, pointers, sizes = [], [], []
        for one in _VALUES.read(body, "values"):
            if one.area >= len(self._areas):
                raise Malformed(f"area {one.area} is not there")
            keys.append(one.key)
            pointers.append([self._areas[one.area].pointer(one.offset, one.length)])
            sizes.append([one.length])
        return keys, pointers, sizes

    def _put(self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Store values; existing keys are detected first, since Mooncake returns 0 for them."""
        codes: list[int] = self._client.batch_is_exist(keys)
        absent = [n for n, code in enumerate(codes) if code == 0]
        if len(codes) != len(keys) or not absent:
            return codes
        stored: list[int] = self._client.batch_put_from_multi_buffers(
            [keys[n] for n in absent], [pointers[n] for n in absent], [sizes[n] for n in absent], self._config
        )
        if len(stored) != len(absent):
            return stored
        for n, code in zip(absent, stored, strict=True):
            codes[n] = code
        return codes

    def _get(self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """A value shorter than was asked for fails like a transfer: its size tells them apart."""
        codes: list[int] = self._client.batch_get_into_multi_buffers(keys, pointers, sizes)
        for n, code in enumerate(codes):
            if code == TRANSFER_FAILED and 0 <= self._client.get_size(keys[n]) != sum(sizes[n]):
                codes[n] = WRONG_LENGTH
        return codes

    def _delete(self, keys: list[str]) -> list[int]:
        sizes = [self._client.get_size(key) for key in keys]
        codes = self._client.batch_remove(keys, True)
        return [max(sizes[n], 0) if code == 0 else code for n, code in enumerate(codes)]


class Helper(NamedTuple):
    """What executes the agent's requests."""

    about: list[object]
    """Of the answer to the first frame, what follows the error."""
    do: Callable[[Any, object], list[int]]
    """Returns the codes of a request, from its operation and its body."""
    pool: Callable[[Any], ThreadPoolExecutor]
    """Returns the threads that execute an operation."""
    close: Callable[[], object]


class Frames:
    """The agent's socket. One thread receives; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def serve(self, start: Callable[[object, list[int]], Helper], refusal: list[object], what: Field) -> None:
        """Execute the agent's requests until it is gone. ``start`` makes the helper of the first
        frame and its descriptors; if it fails, the answer has the reason, and ``refusal`` after it.
        ``what``: the form of an operation.
        """
        head, fds, _, _ = socket.recv_fds(self._sock, 4, 2)
        first = self._body(head + self._exactly(4 - len(head)))
        try:
            helper = start(first, fds)
        except ImportError as error:
            return self._send([VERSION, f"{sys.executable}: {error}: {cure(error)}"[:1000], *refusal])
        except (Malformed, OSError, ValueError, TypeError, RuntimeError) as error:
            return self._send([VERSION, f"{type(error).__name__}: {error}"[:1000], *refusal])
        self._send([VERSION, "", *helper.about])
        try:
            while True:
                identity, operation, body = read_request(self._body(self._exactly(4)), what)
                helper.pool(operation).submit(self._answer, identity, helper.do, operation, body)
        except (EOFError, ConnectionResetError):
            helper.close()

    def _body(self, head: bytes) -> Any:
        (length,) = struct.unpack(">I", head)
        if length > MAX_FRAME:
            raise Malformed(f"frame of {length} bytes, at most {MAX_FRAME} are allowed")
        return unpack(self._exactly(length))

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = self._sock.recv(length - len(data))
            if not part:
                raise EOFError("the agent is gone")
            data += part
        return bytes(data)

    def _send(self, value: object) -> None:
        data = pack(value)
        with self._sending:
            self._sock.sendall(struct.pack(">I", len(data)) + data)

    def _answer(self, identity: int, do: Callable[..., list[int]], *arguments: object) -> None:
        try:
            self._send([identity, do(*arguments)])
        except BrokenPipeError:
            pass  # the agent is gone, which the receiving thread sees
        except BaseException as error:  # noqa: BLE001 - nothing is right any more: the agent starts another
            quit_now(f"request {identity}: {error!r}")


def new_client() -> tuple[Client, Any]:
    """Return Mooncake's client, and its module."""
    import mooncake.store  # this module is importable without it

    return mooncake.store.MooncakeDistributedStore(), mooncake.store


def cure(error: ImportError) -> str:
    """Return what installs what is missing."""
    return PIP if isinstance(error, ModuleNotFoundError) else APT


def start(first: object, fds: list[int]) -> Helper:
    """Set up the client by the agent's first frame. OSError if Mooncake refuses."""
    hello = _HELLO.read(first, "first frame")
    sizes = [size for size in (hello.bounce, hello.arena) if size]
    if len(sizes) != len(fds):
        raise Malformed(f"first frame: {len(fds)} descriptors for areas of {sizes} bytes")
    areas = [Area(fd, size) for fd, size in zip(fds, sizes, strict=True)]
    client, module = new_client()
    settings: Settings = hello.settings
    code = client.setup(
        settings.host, settings.metadata, settings.segment, settings.local, settings.protocol, settings.devices,
        settings.master,
    )  # fmt: skip
    if code != 0:
        raise OSError(f"Mooncake's setup failed with code {code}: protocol, device, master or metadata server")
    for area in areas:
        if code := client.register_buffer(area.base, area.size):
            raise OSError(f"registering {area.size} bytes failed with code {code} (rdma: see ulimit -l)")
    config = module.ReplicateConfig()
    config.replica_num = settings.replicas
    # Questions have their own threads: slow transfers of values must not delay them.
    values, questions = (ThreadPoolExecutor(settings.threads) for _ in range(2))
    return Helper(
        [client.get_hostname()], Values(client, config, areas).do,
        lambda operation: values if operation in (PUT, GET) else questions,
        client.close,  # so that the master forgets the segment at once
    )  # fmt: skip


def serve(sock: socket.socket) -> None:
    """Execute the agent's requests until it is gone."""
    Frames(sock).serve(start, [""], _OPERATION)


def read_request(request: object, what: Field = _OPERATION) -> tuple[int, Any, object]:
    """Return the parts of a request: its ID, its operation, of the form ``what``, and its body."""
    if not isinstance(request, list) or len(request) != 3 or type(request[0]) is not int:
        raise Malformed("request: [id, operation, body] is wanted")
    return request[0], what.read(request[1], "request"), request[2]


def quit_now(text: str) -> None:
    """End the process without waiting for threads that may hang."""
    print(f"{sys.argv[0]}: {text}"[:1000], file=sys.stderr, flush=True)  # noqa: T201
    os._exit(3)


def check() -> None:
    """Exit with the names of missing packages, if any."""
    try:
        new_client()
    except ImportError as error:
        sys.exit(f"kvagent.mooncake: {sys.executable}: {error}: {cure(error)}")


def run(serve: Callable[[socket.socket], None], fd: str) -> None:
    """Serve the agent at a descriptor, and end the process: Mooncake's own end may hang."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(socket.socket(fileno=int(fd)))
    except (EOFError, Malformed, OSError) as error:
        quit_now(str(error))
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Run the command line: check, or serve FD."""
    if arguments == ["check"]:
        check()
    elif len(arguments) == 2 and arguments[0] == "serve" and arguments[1].isdigit():
        run(serve, arguments[1])
    else:
        sys.exit("usage: python -m kvagent.mooncake check | serve FD")


if __name__ == "__main__":
    main(sys.argv[1:])
