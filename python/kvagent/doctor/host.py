"""Findings on what the agent and the engine share on the host: socket directory, namespaces and
shared memory.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import struct
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from kvagent.doctor import Finding
from kvagent.errors import KVAgentError, SessionEnded
from kvagent.lookup import LookupClient, Request
from kvagent.messages import MIN_VERSION, VERSION
from kvagent.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECT_S = 2.0
SHM = Path("/dev/shm")  # noqa: S108  the host's shared memory, used by torch


def directory(path: Path) -> Iterator[Finding]:
    """Yield whether the directory exists and can be entered."""
    try:
        found = path.stat()
    except PermissionError:
        yield Finding(f"{path} cannot be reached by uid {os.geteuid()}", "let this user enter the folders above it")
        return
    except OSError as error:
        yield Finding(
            f"{path}: {error.strerror}",
            "mount the agent's socket directory here (hostPath, or an emptyDir of one pod), or name it: "
            "socket_dir in kv_connector_extra_config, --socket-dir for this command",
        )
        return
    mode = f"{stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid}, gid {found.st_gid}"
    if os.access(path, os.X_OK):
        yield Finding(f"{path} is there ({mode}); this process is uid {os.geteuid()}, groups {_groups()}")
        return
    yield Finding(
        f"{path} may not be entered ({mode}) by uid {os.geteuid()}, groups {_groups()}",
        f"run the engine as uid {found.st_uid}, or the agent with --socket-group and the pod with that group "
        "in supplementalGroups",
    )


def session(path: Path) -> tuple[list[Finding], bytes]:
    """Return whether the agent accepts a session, and its boot ID if it does."""
    try:
        opened = Session.connect(path, CONNECT_S)
    except SessionEnded as error:
        return [Finding(f"{path}: the agent refuses: {error.text or error}", _refusal_hint(error))], b""
    except (OSError, KVAgentError) as error:
        return [Finding(f"{path}: {said(error)}", hint(error))], b""
    limits = opened.limits
    finding = Finding(
        f"{path} answers: protocol {opened.version} (this package speaks {MIN_VERSION} to {VERSION}), boot "
        f"{opened.boot.hex()}, at most {limits.max_job_blocks} blocks in a job, {limits.lease_bytes} bytes of leases"
    )
    opened.close()
    return [finding], opened.boot


def lookups(path: Path) -> Finding:
    """Return whether look-ups are answered."""
    with closing(LookupClient(path, CONNECT_S)) as client:
        begin = time.monotonic()
        try:
            client.lookup(Request(tokens=0, hash_len=0, hashes=b""))
        except KVAgentError as error:
            return Finding(f"{path}: {error}", "the agent runs but does not answer look-ups: see its log")
    return Finding(f"{path} answers after {(time.monotonic() - begin) * 1e3:.1f} ms")


def namespaces(path: Path) -> Iterator[Finding]:
    """Yield whether the agent is in this process's PID and IPC namespaces, by the kernel's owner of
    its socket.
    """
    pid = _owner(path)
    if pid is None:
        return
    if pid == 0:
        yield Finding(
            "the agent is in another PID namespace",
            "KV caches on a GPU need a common one before Linux 6.5, and where the driver says so: hostPID: true, or "
            "shareProcessNamespace: true in one pod. KV caches in host memory need none",
        )
        return
    yield Finding(f"the agent is process {pid} here: the PID namespace is shared")
    try:
        shared = _ipc_namespace(str(pid)) == _ipc_namespace("self")
    except OSError as error:
        yield Finding(f"whether the IPC namespace is shared cannot be seen from here ({error.strerror})")
        return
    if shared:
        yield Finding("the IPC namespace is shared")
    else:
        yield Finding(
            "the agent is in another IPC namespace",
            "KV caches on a GPU need a common one, or the node's /dev/shm in both pods: hostIPC: true in both, or one "
            "pod for both",
        )


def shared_memory() -> Finding:
    """Return how much memory there is for KV caches in host memory."""
    try:
        free = shutil.disk_usage(SHM).free
    except OSError as error:
        return Finding(f"{SHM}: {error.strerror}", "mount a tmpfs there, for KV caches in host memory")
    return Finding(f"{SHM} has {free >> 20} MiB free: KV caches in host memory have to fit in there")


def _ipc_namespace(process: str) -> Path:
    return Path(f"/proc/{process}/ns/ipc").readlink()


def _owner(path: Path) -> int | None:
    """Return the process that listens there: 0 if it has no ID in this namespace, None if there is
    none.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(str(path))
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
    return int(struct.unpack("3i", credentials)[0])


def _groups() -> str:
    return ", ".join(str(group) for group in sorted({os.getegid(), *os.getgroups()}))


def said(error: Exception) -> str:
    """Return what went wrong with a socket, without its path."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def hint(error: Exception) -> str:
    """Return what to do about an unusable socket."""
    if isinstance(error, FileNotFoundError):
        return "start the agent (kvagent serve --socket-dir ...), or mount the directory that it was given"
    if isinstance(error, ConnectionRefusedError):
        return "the agent that made this socket is gone: start it again"
    if isinstance(error, PermissionError):
        return "run the engine as the agent's user, or the agent with --socket-group and the pod in that group"
    return (
        "the agent is there and does not answer: see its log, and whether it is stopped (state T in ps: kill -CONT; a "
        "debugger, a frozen or throttled cgroup)"
    )


def _refusal_hint(error: SessionEnded) -> str:
    if "version" in error.text:
        return "pip install the kvagent package of the agent's release, or bring the agent to this package's"
    return "let the agent accept this user or group: --socket-group, or the same runAsUser"
