"""An agent that stops in the middle of a load when it is told to (`kvbench hold`)."""

from __future__ import annotations

import select
import subprocess
from typing import TYPE_CHECKING

from tests.agent import KVBENCH, PATIENCE_S, START_S, AgentProcess, eventually

if TYPE_CHECKING:
    from pathlib import Path


class HoldingAgent(AgentProcess):
    """The agent in a folder. Its copies of loads can be held back. ``disk``: a slow one below its
    memory.
    """

    def __init__(self, folder: Path, *disk: str) -> None:
        self._hold = [str(KVBENCH), "hold", str(folder), *disk]
        super().__init__(folder)

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            bufsize=0,
        )  # fmt: skip
        eventually(self._answers, "an agent that answers", START_S)

    _held = False
    """Whether it said that a copy is held, and no call has read that yet."""

    def hold(self, passing: int) -> None:
        """Let so many copies of loads pass, and hold those after them."""
        self._tell(f"hold {passing}")
        self._held = False

    def release(self) -> None:
        """Start the held copies, and hold none any more."""
        self._tell("release")

    def holds(self) -> None:
        """Wait until a copy is held."""
        if not self._held:
            assert self._line() == "held"
        self._held = False

    def kill(self) -> None:
        super().kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def close(self) -> None:
        self.thaw()
        self.kill()
        self._log.close()

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        while (said := self._line()) == "held":
            self._held = True
        assert said == "ok"

    def _line(self) -> str:
        out = self.process.stdout
        assert out is not None
        poller = select.poll()
        poller.register(out, select.POLLIN)
        assert poller.poll(PATIENCE_S * 1e3), "the agent says nothing"
        return out.readline().decode().strip()
