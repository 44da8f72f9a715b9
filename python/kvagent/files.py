"""The files of models, and one digest of all of them that covers every tensor and takes seconds to
compute.

Of weight files the digest reads all bytes if they are few, else samples of every tensor. Samples
lie at a tensor's head, at its tail, and at one pseudo-random position in each stretch between them,
equal for all files of the same structure. SAMPLES * SAMPLE_BYTES are 67 million elements of two
bytes, so a change of a share f of all elements is missed with probability exp(-67e6 * f). A change
of a few rows of one large tensor may be missed. Torch's own files (zip) have a checksum of each
member in their directory, which is read whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


WHOLE_BYTES = 512 << 20  # files are read whole if their total is at most this
WHOLE_FILE_BYTES = 64 << 20  # largest file that is always read whole: configuration and code
SAMPLES = 32768  # of all files together, approximately
SAMPLE_BYTES = 4096  # of each sample: a page
LEAST_SAMPLES = 3  # per tensor
SMALL_BYTES = 16 << 10  # largest tensor that is read whole
HEADER_BYTES = 32 << 20  # largest header of a safetensors file
MAX_TENSORS = 1 << 18  # of one file
DIRECTORY_BYTES = 64 << 20  # largest directory of a zip file
READERS = 16  # threads
_PART_BYTES = 4 << 20  # most bytes of one read
_BATCH = 256  # reads per partial digest


class Unreadable(ValueError):
    """A file is not what its name says, or changed while it was read. The text says why."""


class Span(NamedTuple):
    """A range of a file to sample: a tensor, or everything of unknown structure."""

    offset: int
    bytes: int


class Opened(NamedTuple):
    """A file, by its name in the folder. ``whole``: every byte matters, so it is not sampled."""

    name: str
    fd: int
    bytes: int
    whole: bool = False


def digests(files: Sequence[Opened]) -> list[bytes]:
    """Return the digest of each file: of its content, or of its structure and samples."""
    total = sum(file.bytes for file in files)
    reads: list[list[Span]] = []
    for file in files:
        if file.whole and file.bytes > WHOLE_FILE_BYTES:
            raise Unreadable(f"{file.name}: {file.bytes} bytes, at most {WHOLE_FILE_BYTES} of such a file are read")
        if file.whole or total <= WHOLE_BYTES:
            reads.append(list(_whole(Span(0, file.bytes))))
            continue
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_RANDOM)  # a sample costs one page, without the disk's read-ahead
        reads.append([read for span in spans(file) for read in places(span, max(total // SAMPLES, SAMPLE_BYTES))])
    with ThreadPoolExecutor(READERS, "weights") as pool:
        parts = [
            [pool.submit(_read, file, batch) for batch in _batches(spans)]
            for file, spans in zip(files, reads, strict=True)
        ]
        return [
            hashlib.sha256(b"".join([struct.pack("<Q", file.bytes), *(part.result() for part in some)])).digest()
            for file, some in zip(files, parts, strict=True)
        ]


def spans(file: Opened) -> list[Span]:
    """Return what is to be sampled, the structure of the file first."""
    if file.name.endswith(".safetensors"):
        return _tensors(file)
    directory = _directory(file)
    return [*_whole(directory), Span(0, file.bytes)] if directory else [Span(0, file.bytes)]


def places(span: Span, stretch: int) -> Iterator[Span]:
    """Yield the samples of a span: one per ``stretch`` bytes, at least LEAST_SAMPLES, or all."""
    count = max(-(-span.bytes // stretch), LEAST_SAMPLES)
    if span.bytes <= max(SMALL_BYTES, count * SAMPLE_BYTES):
        yield from _whole(span)
        return
    last = span.bytes - SAMPLE_BYTES
    yield Span(span.offset, SAMPLE_BYTES)
    inner = count - 2
    seed = hashlib.shake_128(struct.pack("<QQ", *span)).digest(8 * inner)
    for i, (word,) in enumerate(struct.iter_unpack("<Q", seed)):
        low, high = last * i // inner, last * (i + 1) // inner
        at = low + word % max(high - low, 1)
        yield Span(span.offset + at, SAMPLE_BYTES)
    yield Span(span.offset + last, SAMPLE_BYTES)


def _whole(span: Span) -> Iterator[Span]:
    for at in range(0, span.bytes, _PART_BYTES):
        yield Span(span.offset + at, min(_PART_BYTES, span.bytes - at))


def _batches(reads: list[Span]) -> Iterator[list[Span]]:
    """Yield the reads in order, in batches that a thread can process at once."""
    batch: list[Span] = []
    size = 0
    for read in reads:
        if len(batch) >= _BATCH or size + read.bytes > _PART_BYTES:
            if batch:
                yield batch
            batch, size = [], 0
        batch.append(read)
        size += read.bytes
    if batch:
        yield batch


def _read(file: Opened, batch: list[Span]) -> bytes:
    digest = hashlib.sha256()
    for span in batch:
        digest.update(struct.pack("<QQ", *span))
        digest.update(_bytes(file, span.offset, span.bytes))
    return digest.digest()


def _bytes(file: Opened, offset: int, size: int) -> bytes:
    data = os.pread(file.fd, size, offset)
    while len(data) < size:
        more = os.pread(file.fd, size - len(data), offset + len(data))
        if not more:
            raise Unreadable(f"{file.name}: it ended at {offset + len(data)} of {file.bytes} bytes while it was read")
        data += more
    return data


def _tensors(file: Opened) -> list[Span]:
    """Return the header and tensors of a safetensors file: u64 length, JSON, data."""
    if file.bytes < 8:
        raise Unreadable(f"{file.name}: {file.bytes} bytes are not a safetensors file")
    (size,) = struct.unpack("<Q", _bytes(file, 0, 8))
    if size > min(HEADER_BYTES, file.bytes - 8):
        raise Unreadable(
            f"{file.name}: a header of {size} bytes, allowed is up to {min(HEADER_BYTES, file.bytes - 8)} bytes"
        )
    try:
        header = json.loads(_bytes(file, 8, size))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{file.name}: its header is not JSON") from error
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise Unreadable(f"{file.name}: its header does not name 0 to {MAX_TENSORS} tensors")
    found = [*_whole(Span(0, 8 + size))]
    data = file.bytes - 8 - size
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        match offsets:
            case [int(begin), int(end)] if 0 <= begin <= end <= data:
                found.append(Span(8 + size + begin, end - begin))
            case _:
                raise Unreadable(f"{file.name}: the data_offsets of {name[:200]!r} are not within its {data} bytes")
    return found


_END = struct.Struct("<4s4H2IH")  # of the central directory, PKWARE's APPNOTE 4.3.16
_LOCATOR = struct.Struct("<4sIQI")  # 4.3.15
_END64 = struct.Struct("<4sQ2H2I4Q")  # 4.3.14
_COMMENT_BYTES = 1 << 16  # longest comment after the end record


def _directory(file: Opened) -> Span | None:
    """Return the directory of a zip file, with the CRC of each member; None if it is none."""
    if _bytes(file, 0, min(4, file.bytes)) != b"PK\3\4":
        return None
    low = max(file.bytes - _END.size - _COMMENT_BYTES, 0)
    tail = _bytes(file, low, file.bytes - low)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        return None
    *_, size, offset, _ = _END.unpack_from(tail, at)
    if 0xFFFFFFFF in (size, offset) and low + at >= _LOCATOR.size:
        mark, _, record, _ = _LOCATOR.unpack(_bytes(file, low + at - _LOCATOR.size, _LOCATOR.size))
        if mark == b"PK\6\7" and record + _END64.size <= file.bytes:
            *_, size, offset = _END64.unpack(_bytes(file, record, _END64.size))
    if offset + size > file.bytes or size > DIRECTORY_BYTES:
        raise Unreadable(
            f"{file.name}: a directory of {size} bytes at {offset}, allowed is up to {DIRECTORY_BYTES} bytes within it"
        )
    return Span(offset, size)


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
DIGESTED = (*WEIGHTS, ".json", ".model", ".txt", ".py")
MAX_FILES = 4096  # of one model
FORMAT = 1  # version of the digest: what is sampled and how it is combined
_BLOB = re.compile(r"[0-9a-f]{64}\Z")
_HUBS = re.compile(r"(?:[0-9a-f]{40}|[0-9a-f]{64})\Z")


class State(NamedTuple):
    """A file's metadata that reflects its content; times in ns. The change time (ctime) of a file
    on a local disk cannot be set back.
    """

    device: int
    inode: int
    bytes: int
    modified: int
    changed: int

    @classmethod
    def of(cls, found: os.stat_result) -> State:
        """Return the state of a stat result."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class Found(NamedTuple):
    """A file of a model: its path, and its name in the hub's cache if it is there."""

    path: Path
    blob: str


def files(place: Path, *, every: bool = False) -> dict[str, Found]:
    """Return the relevant files of a model's folder, or the one file, by name. ``every``: all files
    but compiled Python. Unreadable: there are too many.
    """
    if place.is_file():
        return {place.name: _found(place)}
    found: dict[str, Found] = {}
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(place, followlinks=True):
        here = Path(folder).stat()
        if (here.st_dev, here.st_ino) in seen:
            folders.clear()
            continue
        seen.add((here.st_dev, here.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in names:
            path = Path(folder, name)
            if (every or path.suffix in DIGESTED) and path.is_file():
                found[str(path.relative_to(place))] = _found(path)
        if max(len(found), len(seen)) > MAX_FILES:
            raise Unreadable(f"{place}: more than {MAX_FILES} files or folders")
    return found


def digest(found: Mapping[str, Found], about: Iterable[str], since_ns: int | None) -> str:
    """Return the digest of files by name, and of ``about``, which says how they are read.
    Unreadable: a file changed while it was read, or after ``since_ns``, when it may have been
    loaded. The hub's cache names files by content, so a new file there need not be a changed one.
    """
    with contextlib.ExitStack() as stack:
        opened = [_open(stack, name, one) for name, one in sorted(found.items())]
        before = [State.of(os.fstat(file.fd)) for file in opened]
        for file, state in zip(opened, before, strict=True):
            if since_ns is not None and state.changed >= since_ns and not found[file.name].blob:
                raise Unreadable(f"{file.name}: it was changed since this process started, perhaps after it was loaded")
        content = _content(opened, found)
        if [State.of(os.fstat(file.fd)) for file in opened] != before:
            raise Unreadable("the files changed while they were read")
    return hashlib.sha256("\n".join([*about, content]).encode(errors="surrogatepass")).hexdigest()[:32]


def _content(opened: list[Opened], found: Mapping[str, Found]) -> str:
    whole = hashlib.sha256(str(FORMAT).encode())
    for file, one in zip(opened, digests(opened), strict=True):
        blob = found[file.name].blob
        name = f"{len(file.name)} {file.name} {blob if _BLOB.match(blob) else ''} {file.bytes}"
        whole.update(name.encode(errors="surrogatepass") + b"\0" + one)
    return whole.hexdigest()


def _open(stack: contextlib.ExitStack, name: str, one: Found) -> Opened:
    fd = os.open(one.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    stack.callback(os.close, fd)
    return Opened(name, fd, os.fstat(fd).st_size, whole=not name.endswith(WEIGHTS))


def _found(path: Path) -> Found:
    """Return a file. The hub's cache names blobs by SHA-256 of their content, or git's SHA-1."""
    real = path.resolve()
    hubs = path.is_symlink() and real.parent.name == "blobs" and _HUBS.match(real.name)
    return Found(path, real.name if hubs else "")
