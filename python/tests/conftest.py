from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.agent import BINARY, AgentProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUIRE = "KVAGENT_REQUIRE_AGENT"  # set by make: the tests with the real agent may not be left out


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    """A fresh agent."""
    if not BINARY.exists():
        message = f"{BINARY} is not there: run `make build`; tests with the real agent are LEFT OUT"
        pytest.fail(message) if os.environ.get(REQUIRE) else pytest.skip(message)
    # Not tmp_path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        path = Path(folder) / "run"
        path.mkdir(mode=0o700)
        process = AgentProcess(path)
        yield process
        process.close()
