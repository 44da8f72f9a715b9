"""Processes that start an engine, forked from a server that has imported vLLM: importing takes
longer than all else that a process with a tiny engine does.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import TYPE_CHECKING

from tests.pd import nursery

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

MODULES = (
    "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.opt", "torch._dynamo", "kvagent.vllm.connector", "tests.vllm.engine", "pytest",
)  # fmt: skip


ENDS_S = 600.0  # for the end of a process that has been told to end, of a second or two


class Forked:
    """A process that calls a function, with pipes for its standard input and output.

    The processes that vLLM starts in it are forked too. It has this process's standard error.
    """

    def __init__(self, function: Callable[..., object], *arguments: str, **environment: str) -> None:
        """``environment``: variables besides those of this process."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(MODULES))
        into, say = context.Pipe(duplex=False)
        hear, out = context.Pipe(duplex=False)
        call = (function, arguments, dict(os.environ) | environment, into, out)
        self._process = context.Process(target=_call, args=call, daemon=False)
        with into, out, say, hear:
            self._process.start()
            self._stdin, self.stdout = os.fdopen(os.dup(say.fileno()), "w"), os.fdopen(os.dup(hear.fileno()))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        self._stdin.write(line + "\n")
        self._stdin.flush()

    def hear(self, begins: str) -> str:
        """Return the next line of its output with this prefix."""
        for line in self.stdout:
            if line.startswith(begins):
                return line
        raise AssertionError(f"the process ended with {self.wait()}")

    def end(self) -> int:
        """Close its standard input, and return its exit status."""
        self._stdin.close()
        return self.wait()

    def wait(self) -> int:
        """Return its exit status. It is killed if it does not end."""
        self._process.join(ENDS_S)
        if self._process.exitcode is None:
            self.kill()
            self._process.join()
            raise AssertionError(f"the process did not end within {ENDS_S:.0f} s")
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Kill it, unless it has ended."""
        self.kill()
        self.wait()
        self._stdin.close()
        self.stdout.close()


def _call(
    function: Callable[..., object], arguments: tuple[str, ...], environment: dict[str, str], into: Connection,
    out: Connection,
) -> None:  # fmt: skip
    """Call a function in a process that was forked for it."""
    os.environ.clear()
    os.environ.update(environment)
    for pipe, fd in ((into, 0), (out, 1)):
        os.dup2(pipe.fileno(), fd)
        pipe.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115  until the end
    nursery.install()
    function(*arguments)
