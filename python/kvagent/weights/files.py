"""The files of models, and one digest of all of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvagent.weights.samples import Opened, Unreadable, digests

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
    """A file of a model: its path, and the content name of the hub's cache if it is in that
    cache.
    """

    path: Path
    blob: str


def files(place: Path, *, every: bool = False) -> dict[str, Found]:
    """Return the relevant files of a model's folder, or the one file, by name.

    ``every``: all files but compiled Python. Unreadable: there are too many.
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
    """Return a file.

    The hub's cache names large blobs by SHA-256 of their content, others by git's SHA-1.
    """
    real = path.resolve()
    hubs = path.is_symlink() and real.parent.name == "blobs" and _HUBS.match(real.name)
    return Found(path, real.name if hubs else "")
