"""A cache of digests on disk, keyed by the metadata of the files, so that a restart need not read
them again.

A cached digest is used only if nothing can have been written since: the change time (ctime) of a
file on a local disk cannot be set back. An entry is one small file in the user's own cache, which
no other user may write to; a damaged entry counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ENTRIES = 64  # digests
SETTLED_NS = 60_000_000_000
"""A file that changed within this time before it was read may change again unnoticed: twice the
lifetime of dirty pages.
"""
_MAX_BYTES = 256  # of an entry
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay")
"""File systems whose change times come from the kernel; FUSE and NFS report those of their server
or program.

A write through a shared mapping updates the change time once, and only when the page is written
back: never on tmpfs, which is therefore absent.
"""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


class State(NamedTuple):
    """A file's metadata that reflects its content; times in ns."""

    device: int
    inode: int
    bytes: int
    modified: int
    changed: int

    @classmethod
    def of(cls, found: os.stat_result) -> State:
        """Return the state of a stat result."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class DigestCache:
    """The digests in a folder, by default the user's.

    ``boot``: device numbers are valid for one boot.
    """

    def __init__(self, folder: Path | None = None, boot: str | None = None, mounts: str | None = None) -> None:
        self._folder = folder if folder is not None else _users_folder()
        self._boot = boot if boot is not None else _read("/proc/sys/kernel/random/boot_id")
        self._mounts = mounts if mounts is not None else _read("/proc/self/mountinfo")

    def key(self, names: Sequence[str], states: Sequence[State], begun_ns: int) -> str | None:
        """Return the key of a digest of files that were read since ``begun_ns``.

        None: it must not be cached.
        """
        local = {state.device for state in states} <= self._local_devices()
        settled = all(state.changed + SETTLED_NS < begun_ns for state in states)
        if not (self._boot and states and local and settled):
            return None
        parts = json.dumps([self._boot, list(names), [list(state) for state in states]])
        return hashlib.sha256(parts.encode(errors="surrogatepass")).hexdigest()

    def find(self, key: str) -> str | None:
        """Return the digest with this key, or None."""
        try:
            folder = self._open()
        except OSError:
            return None
        try:
            fd = os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            with os.fdopen(fd, "rb") as file:
                if not _own(os.fstat(fd), stat.S_ISREG):
                    return None
                words = file.read(_MAX_BYTES).decode("ascii", "replace").split("\n")
        except OSError:
            return None
        finally:
            os.close(folder)
        good = len(words) == 3 and words[0] == key and _DIGEST.match(words[1]) and not words[2]
        return words[1] if good else None

    def store(self, key: str, digest: str) -> None:
        """Store a digest if possible. The oldest entries are dropped if there are too many."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = self._open()
            try:
                self._write(folder, key, digest)
                self._drop(folder)
            finally:
                os.close(folder)

    def _open(self) -> int:
        """Open the folder if it belongs to the user alone."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not _own(os.fstat(folder), stat.S_ISDIR):
            os.close(folder)
            raise PermissionError(f"{self._folder}: other users may write to it")
        return folder

    def _write(self, folder: int, key: str, digest: str) -> None:
        fd, name = tempfile.mkstemp(dir=self._folder, prefix=".new-")  # 0600
        try:
            with os.fdopen(fd, "w") as file:
                file.write(f"{key}\n{digest}\n")
            os.rename(Path(name).name, key, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(Path(name).name, dir_fd=folder)
            raise

    @staticmethod
    def _drop(folder: int) -> None:
        found = []
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.append((os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns, name))
        for _, name in sorted(found)[:-MAX_ENTRIES]:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)

    def _local_devices(self) -> set[int]:
        """Return the devices of mounted local file systems (proc_pid_mountinfo(5)).

        File systems whose mount has another device number than their files (a btrfs subvolume) are
        not found.
        """
        devices = set()
        for line in self._mounts.splitlines():
            fields, _, kind = line.partition(" - ")
            if kind.split(" ")[0] in _LOCAL and len(words := fields.split(" ")) > 2:
                major, _, minor = words[2].partition(":")
                devices.add(os.makedev(int(major), int(minor)))
        return devices


def now_ns() -> int:
    """Return the time of the clock that stamps files."""
    return time.time_ns()


def _own(found: os.stat_result, kind: object) -> bool:
    return bool(callable(kind) and kind(found.st_mode)) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _users_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if base.startswith("/") else Path("~/.cache").expanduser()) / "kvagent" / "weights"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
