"""Starts the node's agent where none answers (docs/VLLM.md, "An agent that the engine starts").

Any number of processes may ask at once, and be killed meanwhile: the lock of a file in the socket
directory lets one of them at a time look and start, and an agent refuses a directory that another
one serves. The agent belongs to none of them. It ends by itself some time after its last session.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import subprocess
import sysconfig
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvagent import socketdir
from kvagent.errors import NotStarted, WrongSetting

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK, LOG = "start.lock", "agent.log"
START_S = 30.0  # until it answers, with the wait for others that start one
LOOK_S = 0.02  # between two looks for it
END_IDLE = "15m"  # after the last session
MAX_LOG = 1 << 20  # bytes; a longer log is emptied before the next start
TAIL_BYTES, TAIL_LINES = 4096, 8  # of the log, in an error

_WRONG, _HELD = 2, 3  # exit codes: a setting is not allowed; another agent has the directory
# The agent's parent until it answers, which ends with its exit code. Killed, it leaves the agent
# outside of the engine's process tree, which vLLM kills as a whole.
_SHELL = '"$0" "$@" & wait $!'
_SIZE = re.compile(r"\s*\d+(\.\d+)?\s*([KMGT]iB|B)?\s*", re.ASCII)


def check_pool(pool: str) -> None:
    """Raise WrongSetting unless ``pool`` has the form of the agent's --pool."""
    if not _SIZE.fullmatch(pool):
        raise WrongSetting("pool", f"{pool!r}, allowed is a size such as 64GiB or 512MiB")


def ensure(socket_dir: str, pool: str, cancelled: threading.Event | None = None) -> None:
    """Return once an agent answers in the directory. It is started if there is none, with ``pool``
    as its memory; it has this process's environment otherwise. Raise WrongSetting if the agent
    refuses a setting, OSError if the directory cannot be used, and NotStarted for any other reason,
    after START_S at the latest and soon after ``cancelled`` is set.
    """
    directory = Path(os.path.abspath(socket_dir))  # noqa: PTH100  which resolves no links
    wait = _Wait(cancelled)
    if _answers(directory):
        return
    directory.mkdir(0o700, parents=True, exist_ok=True)
    socketdir.check_owner(str(directory))
    with _locked(directory / LOCK, wait):
        if not _answers(directory):
            _start(directory, pool, wait)


class _Wait:
    """The bound of all that one call waits for."""

    def __init__(self, cancelled: threading.Event | None) -> None:
        self._cancelled = cancelled or threading.Event()
        self._until = time.monotonic() + START_S

    def look(self, awaited: str) -> None:
        """Wait for a moment. Raise NotStarted when it is over."""
        if self._cancelled.wait(LOOK_S):
            raise NotStarted("cancelled")
        if time.monotonic() > self._until:
            raise NotStarted(f"{awaited} for {START_S:.0f} s")


def _answers(directory: Path) -> bool:
    """Return whether a process serves the session socket. One that is stopped, or would refuse this
    process, is no reason to start another.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(directory / "session.sock"))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            pass  # many are about to connect
    return True


@contextlib.contextmanager
def _locked(path: Path, wait: _Wait) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                wait.look(f"another process starts an agent (it holds {path})")
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
        os.close(lock)


def _start(directory: Path, pool: str, wait: _Wait) -> None:
    """Start an agent, and wait until one answers. Another one, which has no lock of ours, may have
    the directory: it answers soon, or it was ending, and one is started again.
    """
    command = [_program(), "serve", "--socket-dir", str(directory), "--pool", pool, "--end-idle", END_IDLE]
    log = os.open(
        directory / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
    )
    try:
        if os.fstat(log).st_size > MAX_LOG:
            os.ftruncate(log, 0)
        while not _run(command, directory, log, wait):
            pass
    finally:
        os.close(log)


def _run(command: list[str], directory: Path, log: int, wait: _Wait) -> bool:
    """Run an agent. Return True once one answers, False if another one has the directory."""
    path = directory / LOG
    begin = os.fstat(log).st_size
    shell = _spawn(command, log)
    try:
        while not _answers(directory):
            wait.look(f"an agent was started, and has not answered (its log is {path})")
            if (code := shell.poll()) == _HELD:
                return False
            if code is not None:
                _ended(code, path, begin)
        return True
    finally:
        shell.kill()
        shell.wait()


def _program() -> str:
    """Return the agent that was installed with this package, or else one on the PATH."""
    scripts = sysconfig.get_path("scripts")
    found = shutil.which("kvagent", path=scripts) or shutil.which("kvagent")
    if found is None:
        raise NotStarted(f"there is no program kvagent, neither in {scripts} nor on the PATH")
    return os.path.abspath(found)  # noqa: PTH100


def _spawn(command: list[str], log: int) -> subprocess.Popen[bytes]:
    """Start a command apart from this process: its process group, its terminal, its descriptors,
    and what belongs to this engine alone, which are its GPUs and its processors.
    """
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    bound = os.sched_getaffinity(0)  # of this thread, which the new process would inherit
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", _SHELL, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
            env=environment, start_new_session=True,
        )  # fmt: skip
    finally:
        os.sched_setaffinity(0, bound)


def _ended(code: int, log: Path, begin: int) -> NoReturn:
    """Raise the error of an agent that ended, with what it has logged since. Go's runtime has the
    exit code of a wrong setting too, but not its line.
    """
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begin, size - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    said = [line.removeprefix("kvagent: ") for line in lines if line.startswith("kvagent: ")]
    if code == _WRONG and said:
        raise WrongSetting("agent", "; ".join(["start", *said]))
    raise NotStarted("\n  ".join([f"the agent ended at once, with {code}; {log} ends with", *lines[-TAIL_LINES:]]))
