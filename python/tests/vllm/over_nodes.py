"""A real engine over two nodes, each of which is played by a process on this machine with an agent
of its own.

Arguments: the node's number, MODEL SOCKET_DIR OPTIONS. Each line on the first one's stdin is what
it is to do, "say" or "settle"; its answer is a line of JSON that begins with "=".
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.vllm import engine as real

if TYPE_CHECKING:
    from collections.abc import Sequence

NODES = 2
PORTS = (20_000, 32_000)  # below those that are given to whoever asks for any


class OverNodes:
    """Such an engine, on the test's side."""

    def __init__(self, model: Path, folders: Sequence[Path], **options: Any) -> None:
        """``options`` are make_engine's."""
        shape = {
            "nnodes": NODES, "master_addr": "127.0.0.1", "master_port": _free(), "distributed_executor_backend": "mp",
        }  # fmt: skip
        environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "tests.vllm.over_nodes", str(node), str(model), str(folder),
                    json.dumps(shape | {"node_rank": node} | options),
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
            )
            for node, folder in enumerate(folders)
        ]  # fmt: skip

    def says(self) -> tuple[list[list[int]], int]:
        """Return the answers to PROMPTS, of which the engine's own cache has nothing, and how many
        tokens were loaded. No save may be in flight.
        """
        said, loaded = self._ask("say")
        return said, loaded

    def settle(self) -> None:
        """Step the engine until no save is in flight."""
        self._ask("settle")

    def close(self) -> None:
        """End the processes and their workers."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.communicate()

    def _ask(self, what: str) -> Any:
        leader = self._processes[0]
        assert leader.stdin is not None
        assert leader.stdout is not None
        leader.stdin.write(f"{what}\n")
        leader.stdin.flush()
        for line in leader.stdout:
            if line.startswith("="):
                return json.loads(line[1:])
        raise AssertionError(f"the engine ended with {leader.wait(60)}")


def _free() -> int:
    """Return a port that nobody has. The kernel gives none of these to others until it is used."""
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def lead(model: Path, socket_dir: str, options: dict[str, Any]) -> None:
    """Run the engine, and do what is asked."""
    llm = real.make_engine(model, socket_dir, **options)
    side = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    for what in sys.stdin:
        answer = None
        if what == "settle\n":
            real.settle(llm)
        else:
            assert llm.reset_prefix_cache()
            before = side.counts.tokens_loaded
            said = real.generate(llm, real.PROMPTS)
            answer = [said, side.counts.tokens_loaded - before]
        print("=" + json.dumps(answer), flush=True)


def follow(model: Path, socket_dir: str, options: dict[str, Any]) -> None:
    """Run the workers of another node, like `vllm serve --headless`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments = EngineArgs(**real.arguments(model, socket_dir, **options))
    MultiprocExecutor(arguments.create_engine_config(headless=True), monitor_workers=False).start_worker_monitor(
        inline=True
    )


def main(node: str, model: str, socket_dir: str, options: str) -> None:
    """Run one node's processes. Workers are forked, so that vLLM is imported once."""
    from tests.pd import nursery
    from tests.vllm import kernels

    kernels.plugin()
    nursery.install()
    kernels.let_stages_receive()
    (follow if int(node) else lead)(Path(model), socket_dir, json.loads(options))


if __name__ == "__mp_main__":  # a worker that such a process spawned
    from tests.vllm import kernels

    kernels.install()

if __name__ == "__main__":
    main(*sys.argv[1:])
