"""The real agent in its own process, and an engine in Python that talks to it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from kvagent import messages as m
from kvagent.errors import KVAgentError
from kvagent.registration import Registration, identity_pairs
from kvagent.session import Event, Session
from kvagent.shm import SharedMemory, SyncWords
from kvagent.wire import Packed, packed, section

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BINARY = Path(os.environ.get("KVAGENT_BINARY") or Path(__file__).resolve().parents[2] / "bin" / "kvagent")
KVBENCH = BINARY.with_name("kvbench")  # plays engines
REQUIRE = "KVAGENT_REQUIRE_AGENT"  # set by make: the tests with the real agent may not be left out
PATIENCE_S = 20.0  # for what takes milliseconds on a machine with nothing else to do
START_S = 60.0  # for an agent to start, beside engines that take all processors
# Limits of the product that a machine whose host takes its processors away breaks now and then: a
# second and less.
LIMITS = (
    "kvagent.vllm.scheduler.agent_session.SILENT_S", "kvagent.vllm.worker.side.DRAIN_S", "kvagent.lookup.LATE_S",
    "kvagent.doctor.CONNECT_S", "kvagent.doctor.TIMEOUT_S",
)  # fmt: skip
BLOCK_TOKENS = 16
BLOCKS = 32
BLOCK_BYTES = 4096  # of one layer
LAYERS = 2
IDENTITY = identity_pairs({"model": "test/model", "dtype": "bfloat16", "tenant": ""})

_T = TypeVar("_T")


def need_agent() -> None:
    """Leave the test out, aloud, if the agent was not built."""
    if not BINARY.exists():
        message = f"{BINARY} is not there: run `make build`; tests with the real agent are LEFT OUT"
        pytest.fail(message) if os.environ.get(REQUIRE) else pytest.skip(message)


def be_patient() -> None:
    """Raise the timeouts of the product in this process, as the fixture ``patient`` does for a
    test.
    """
    for limit in LIMITS:
        module, _, name = limit.rpartition(".")
        setattr(importlib.import_module(module), name, PATIENCE_S)


def eventually(check: Callable[[], _T | None], what: str, patience_s: float = PATIENCE_S) -> _T:
    """Return the first true result of ``check``."""
    deadline = time.monotonic() + patience_s
    while not (result := check()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come about within {patience_s} s")
        time.sleep(0.002)
    return result


class AgentProcess:
    """`kvagent serve` in a folder."""

    def __init__(self, folder: Path, *flags: str) -> None:
        need_agent()
        self.folder = folder
        self._command = [str(BINARY), "serve", "--socket-dir", str(folder), "--pool", "64MiB", *flags]
        self._log = (folder.parent / f"{folder.name}.log").open("ab")
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        try:
            eventually(self._answers, "an agent that answers", START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; it said: {Path(self._log.name).read_text()[-2000:]}") from None

    def _answers(self) -> bool:
        assert self.process.poll() is None, "the agent ended"
        with contextlib.suppress(OSError, KVAgentError):
            self.connect().close()
            return True
        return False

    def connect(self) -> Session:
        return Session.connect(self.folder / "session.sock", timeout_s=PATIENCE_S)

    def status(self) -> dict[str, Any]:
        command = [str(BINARY), "status", "--json", "--socket-dir", str(self.folder)]
        status: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=30).stdout)
        return status

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def freeze(self) -> None:
        """Stop the agent, and return when all its threads have stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End the agent as its operator does."""
        self.process.terminate()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.thaw()
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()


class StartedAgents:
    """A socket directory without an agent, in which the product starts some."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        need_agent()
        self.folder = folder / "run"
        self.log = self.folder / "agent.log"
        self.programs = folder / "bin"
        self.programs.mkdir()
        (self.programs / "kvagent").symlink_to(BINARY)
        patch.setattr("sysconfig.get_path", lambda _: str(self.programs))

    def serving(self) -> int:
        """Return the process of the agent that answers; 0: none does."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.connect(str(self.folder / "session.sock"))
            except OSError:
                return 0
            return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])

    def running(self) -> list[int]:
        """Return the processes that serve the directory, or are about to."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_bytes().split(b"\0")
                if command[1:2] == [b"serve"] and os.fsencode(self.folder) in command:
                    found.append(int(process.name))
        return found

    def status(self) -> dict[str, Any]:
        command = [str(BINARY), "status", "--json", "--socket-dir", str(self.folder)]
        status: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=30).stdout)
        return status

    def close(self) -> None:
        """End all of them."""
        for process in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        eventually(lambda: not self.running(), "the end of all agents")


class Words(SyncWords):
    """Words with events that the host fires (docs/PROTOCOL.md)."""

    def __init__(self, events: int = 4, revokes: int = 4, stages: int = 0) -> None:
        super().__init__(revokes, events=events, stages=stages)

    def record(self, event: int) -> int:
        """Record an event again: it has not fired until ``fire`` reaches it."""
        cell = (self.events_off + event * self.cell) // 8
        self._long[cell] += 1
        return self._long[cell]

    def fire(self, event: int) -> None:
        """Fire an event up to its last record."""
        cell = (self.events_off + event * self.cell) // 8
        self._long[cell + 1] = self._long[cell]


class Engine:
    """A scheduler and one worker; its KV cache holds BLOCKS blocks of LAYERS parts each,
    consecutively.
    """

    def __init__(
        self, agent: AgentProcess, instance: str, *, lookup_name: str = "", rank: int = 0, world: int = 1,
        stages: int = 0,
    ) -> None:  # fmt: skip
        self.cache = SharedMemory(LAYERS * BLOCKS * BLOCK_BYTES)
        self.words = Words(stages=stages)
        self.rank = rank
        common: dict[str, Any] = {
            "instance": instance, "identity": IDENTITY, "groups": (m.Group(BLOCK_TOKENS, BLOCKS),),
            "hash_tokens": BLOCK_TOKENS, "world": world, "shards": world,
        }  # fmt: skip
        self.worker = agent.connect()
        self.registered = self.worker.register(
            Registration(
                **common, role=m.Role.WORKER, rank=rank, sync=self.words.sync(0),
                regions=[(self.words.memory.region(0), self.words.memory.fd), (self.cache.region(1), self.cache.fd)],
                held={
                    rank: {0: [m.Segment(1, i * BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES) for i in range(LAYERS)]}
                },
            )
        )  # fmt: skip
        self.scheduler = agent.connect()
        if rank == 0:
            self.scheduler.register(Registration(**common, role=m.Role.SCHEDULER, lookup_name=lookup_name))
        self.step = 0
        self.events: list[Event] = []

    def compute(self, blocks: Sequence[int], salt: int) -> None:
        """Fill blocks with bytes that differ by salt, block and layer, and end a step."""
        for i, block in enumerate(blocks):
            for layer in range(LAYERS):
                self._piece(block, layer)[:] = content(salt, i, layer, self.rank)
        self.step += 1
        self.words.step = self.step

    def holds(self, block: int, salt: int, i: int) -> bool:
        """Return whether a block holds what ``compute`` wrote as its i-th."""
        return all(self._piece(block, layer) == content(salt, i, layer, self.rank) for layer in range(LAYERS))

    def wait(self, kind: type[_T]) -> _T:
        """Return the next event of a kind from the worker's session."""
        return wait(self.worker, kind, self.events)

    def done(self, job: int) -> bytes:
        """Return the statuses of a job."""
        done = self.wait(m.Done)
        assert done.job == job
        return done.statuses

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()
        self.words.close()
        self.cache.close()

    def _piece(self, block: int, layer: int) -> memoryview:
        start = (layer * BLOCKS + block) * BLOCK_BYTES
        return self.cache.view[start : start + BLOCK_BYTES]


def wait(session: Session, kind: type[_T], events: list[Event]) -> _T:
    """Return the next event of a kind, from ``events`` or the session."""

    def look() -> _T | None:
        events.extend(session.poll())
        return next((event for event in events if isinstance(event, kind)), None)

    event = eventually(look, kind.__name__)
    events.remove(event)  # type: ignore[arg-type]
    return event


def run_of(hashes: Sequence[bytes], blocks: Sequence[int]) -> Packed:
    """Return the sections of a job that has one run of blocks."""
    return packed([section(0, b"", hashes, blocks)], len(hashes))


def content(salt: int, i: int, layer: int, rank: int) -> bytes:
    return bytes([salt, i, layer, rank]) * (BLOCK_BYTES // 4)


def chain(name: str, count: int) -> list[bytes]:
    """Return the hashes of a prompt's blocks."""
    return [f"{name}/{i}".encode().ljust(32, b".") for i in range(count)]
