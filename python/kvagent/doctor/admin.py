"""Asks the agent's admin socket, which speaks HTTP."""

from __future__ import annotations

import http.client
import json
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 2.0
MAX_BYTES = 16 << 20  # of an answer


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("kvagent", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connects."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def status(path: Path) -> dict[str, Any]:
    """The agent's /status. OSError, http.client.HTTPException or ValueError if there is none to be had."""
    connection = _Connection(path)
    try:
        connection.request("GET", "/status")
        answer = connection.getresponse()
        body = answer.read(MAX_BYTES)
        if answer.status != http.client.OK:
            raise ValueError(f"/status is answered by {answer.status}")
    finally:
        connection.close()
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("/status is no JSON object")  # noqa: TRY004  it is the agent's answer that is wrong
    return found
