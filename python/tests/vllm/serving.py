"""An engine in its own process that executes commands: its weights can change while it runs.

Each line on its standard input is JSON, a name and arguments; the answer is a line of JSON that
begins with "=".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvagent.session import Session
from tests.agent import be_patient, eventually
from tests.vllm import engine as real
from tests.vllm.forks import Forked

START_S = 120.0  # for an engine to be registered at its agent


class Commands:
    """The commands, by name."""

    def __init__(self, llm: Any, socket_dir: str) -> None:
        self._llm = llm
        self._connected = socket_dir != "-"
        self._path = Path(socket_dir) / "session.sock"

    def says(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the model's output for prompts of which the engine's own cache has nothing."""
        if self._connected:
            eventually(self._there, "an engine that is registered", START_S)
        assert self._llm.reset_prefix_cache()
        said = real.generate(self._llm, prompts)
        if self._connected:
            real.settle(self._llm)
        return said

    def _there(self) -> bool:
        """Return whether scheduler and worker are at the running agent, after a prompt that fills
        no block.
        """
        real.generate(self._llm, [[5, 6, 7]], 1)
        side, worker = real.sides(self._llm)
        attached = worker._link.current()
        if side.agent.session is None or attached is None:
            return False
        asked = Session.connect(self._path, START_S)
        asked.close()
        return bool(side.agent.session.boot == attached.boot == asked.boot)

    def update(self, model: str) -> None:
        """Change the weights in place, without a reset."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": model})

    def reset(self) -> bool:
        """Reset the caches, including the connector's."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def name(self, version: str) -> None:
        """Name the weights in place."""
        self._llm.update_weight_version(version)


class Serving:
    """Such a process, on the test's side."""

    def __init__(self, model: Path, socket_dir: Path | None, **options: Any) -> None:
        arguments = [str(model), str(socket_dir or "-"), json.dumps(options)]
        self._process = Forked(main, *arguments, VLLM_ENABLE_V1_MULTIPROCESSING="0")

    def ask(self, name: str, *arguments: object) -> Any:
        """Execute a command and return its answer."""
        self._process.say(json.dumps([name, *arguments]))
        return json.loads(self._process.hear("=")[1:])

    def close(self) -> None:
        self._process.close()


def main(model: str, socket_dir: str, options: str) -> None:
    """Run the engine. With "-" as the socket directory it has no connector."""
    be_patient()
    llm = real.make_engine(Path(model), None if socket_dir == "-" else socket_dir, options=json.loads(options))
    commands = Commands(llm, socket_dir)
    for line in sys.stdin:
        name, *given = json.loads(line)
        print("=" + json.dumps(getattr(commands, name)(*given)), flush=True)
