"""The client of the agent's admin socket, which speaks HTTP."""

from __future__ import annotations

import http.client
import json
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 2.0
MAX_BYTES = 16 << 20  # of a response


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("kvagent", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def status(path: Path) -> dict[str, Any]:
    """Return the agent's /status, or raise OSError, http.client.HTTPException or ValueError."""
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
        raise ValueError("/status is not a JSON object")  # noqa: TRY004  the agent's answer is wrong, not an argument
    return found
