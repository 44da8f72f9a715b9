"""A store of Mooncake's for tests."""

from __future__ import annotations

import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.agent import START_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent import AgentProcess

PROGRAM = "mooncake_master"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def program() -> str:
    found = shutil.which(PROGRAM)
    assert found is not None, f"{PROGRAM} is not in PATH: scripts/env mooncake brings it"
    return found


def interpreter() -> Path:
    """Return the Python that has Mooncake's client and its transfer engine."""
    return Path(program()).resolve().parent / "python"


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """Run a store that has no memory but what its users give, and return its URL."""
    port = free_port()
    command = [program(), "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"]
    command += [f"--metrics_port={free_port()}", "--rpc_thread_num=2"]
    with (folder / "master.log").open("ab") as log:
        master = subprocess.Popen(command, stdout=log, stderr=log)

    def listens() -> bool:
        assert master.poll() is None, "the master ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return False
        return True

    try:
        eventually(listens, "a master that listens", START_S)
        yield f"mooncake://127.0.0.1:{port}?python={interpreter()}"
    finally:
        master.kill()
        master.wait()


def flags(url: str, number: int, state: Path) -> list[str]:
    """Return the flags of one of some agents with a store; the first one gives it memory."""
    return ["--tier", url + ("&segment=64MiB" if number == 0 else ""), "--tier-state", str(state)]


def connected(agent: AgentProcess) -> bool:
    """Return whether an agent's helper has connected."""
    (tier,) = agent.status()["tiers"]["list"]
    return bool(tier["store"]["state"] == "ok")
