"""Tests that need a GPU, PyTorch and an agent built for GPUs.

Without one of them they are skipped, with the reason.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.agent import BINARY, AgentProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUIRE = "KVAGENT_REQUIRE_GPU"  # set where there is one: then nothing may be left out


def missing() -> str:
    """Return what these tests lack here; empty if nothing."""
    if importlib.util.find_spec("torch") is None:
        return "this Python has no torch"
    import torch

    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if not BINARY.exists():
        return f"{BINARY} is not there"
    told = subprocess.run([str(BINARY), "serve", "--help"], capture_output=True, text=True, check=True).stdout
    return "" if "cuda" in told else f"{BINARY} was built without GPUs"


@pytest.fixture(scope="session", autouse=True)
def a_gpu() -> None:
    if lacking := missing():
        message = f"GPU tests are LEFT OUT: {lacking}"
        pytest.fail(message) if os.environ.get(REQUIRE) else pytest.skip(message)


@pytest.fixture
def gpu_agent() -> Iterator[AgentProcess]:
    """A fresh agent that can reach GPUs."""
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        path = Path(folder) / "run"
        path.mkdir(mode=0o700)
        process = AgentProcess(path, "--device", "cuda")
        yield process
        process.close()
