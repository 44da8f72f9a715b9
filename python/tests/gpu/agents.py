"""The agent of the kit's engines: killed, and started again with the same pool."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 60.0
STAGE = r'kvagent_transfer_stage_seconds_%s{direction="(\w+)",stage="(\w+)"} (\S+)'


class Agent:
    """The agent of a socket directory, whichever process started it.

    Its pool is a file, which the next one takes over.
    """

    def __init__(self, sockets: str, pool_bytes: int) -> None:
        self.sockets = sockets
        self._file = Path(f"/dev/shm/{Path(sockets).parent.name}.pool")
        self._pool = str(pool_bytes)

    def start(self, pace: str = "auto") -> None:
        """Start it, and wait until it answers. Its log is added to SOCKETS.log."""
        command = ["kvagent", "serve", "--socket-dir", self.sockets, "--pool", self._pool]
        command += ["--dram-path", str(self._file), "--pace", pace]
        with Path(f"{self.sockets}.log").open("ab") as log:
            subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.until("an agent", lambda status: status["ready"])

    def kill(self) -> None:
        """End it by SIGKILL."""
        process = os.pidfd_open(self.status()["pid"])
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], PATIENCE_S)
        os.close(process)

    def status(self) -> dict[str, Any]:
        """Return what it says of itself; empty if it does not answer."""
        command = ["kvagent", "status", "--json", "--socket-dir", self.sockets]
        run = subprocess.run(command, capture_output=True, timeout=PATIENCE_S)
        status: dict[str, Any] = {} if run.returncode else json.loads(run.stdout)
        return status

    def stages(self) -> list[dict[str, Any]]:
        """Return the jobs that copied something so far and their mean time, by stage."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(f"{self.sockets}/admin.sock")
            connection.sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            text = connection.makefile().read()
        sums, jobs = (
            {(way, stage): float(value) for way, stage, value in re.findall(STAGE % kind, text)}
            for kind in ("sum", "count")
        )
        return [
            {"direction": way, "stage": stage, "jobs": int(n), "mean_ms": 1e3 * sums[way, stage] / max(n, 1)}
            for (way, stage), n in jobs.items()
        ]

    def until(self, what: str, holds: Callable[[dict[str, Any]], bool], meanwhile: Callable[[], object] = int) -> None:
        """Wait until its status is as it should be."""
        end = time.monotonic() + PATIENCE_S
        while not ((status := self.status()) and holds(status)):
            if time.monotonic() > end:
                raise AssertionError(f"{what} did not come in {PATIENCE_S} s: its log is {self.sockets}.log")
            meanwhile()
            time.sleep(0.02)

    def forget(self) -> None:
        """Delete its pool."""
        self._file.unlink(missing_ok=True)
