"""A process with vLLM imported, which forks the processes of tests: `vllm serve`, as its command
line does.

Importing takes longer than all else that an engine does to start, and each engine has three
processes. Each line on stdin is JSON: arguments of `vllm` and the file of its output; the answer is
a line with the process ID, which is also its group's. All end when stdin does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback

from tests.agent import be_patient

MODULES = (
    "vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.openai.completion.api_router", "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.opt", "model_hosting_container_standards.sagemaker",
    "torch._dynamo", "kvagent.vllm.connector",
)  # fmt: skip


def install() -> None:
    """Install the stand-ins for kernels in a process of vLLM, and let it fork others.

    That is vLLM's default; on CPUs it spawns instead, because of OpenMP's threads, of which there
    is one here.
    """
    from vllm.utils import system_utils

    from tests.vllm import kernels

    kernels.install()
    system_utils._maybe_force_spawn = _fork


def _fork() -> None:
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def become(arguments: list[str], log: str) -> None:
    """Run a command of `vllm` in this process, and end it. The processes that it forks are as
    patient with an agent as this one.
    """
    be_patient()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd, to in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (out, 2)):
        os.dup2(fd, to)
    sys.argv = ["vllm", *arguments]
    status = 1
    try:
        importlib.import_module("vllm.entrypoints.cli.main").main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Fork what stdin asks for."""
    for module in MODULES:
        importlib.import_module(module)
    install()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    groups = []
    for line in sys.stdin:
        arguments, log = json.loads(line)
        child = os.fork()
        if child == 0:
            become(arguments, log)
        groups.append(child)
        print(f"={child}", flush=True)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
