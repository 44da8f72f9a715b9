"""The core of the connector knows no guest (docs/ARCHITECTURE.md, "Core and guests")."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import kvagent.vllm
from tests.agent import BINARY, need_agent

if TYPE_CHECKING:
    from collections.abc import Iterator

CORE = Path(kvagent.vllm.__file__).parent
GUESTS = ("guests", "tier")
# Tests of the core: they run without any guest.
TESTS = ("test_vllm_schedule.py", "test_vllm_waits.py", "test_vllm_sides.py", "test_vllm_decoding.py")

# A plain engine starts; what a guest would serve is refused by name.
START = """
from types import SimpleNamespace as Of
from kvagent.vllm import hooks, options
parallel = Of(tensor_parallel_size=1, pipeline_parallel_size=1, nnodes_within_dp=1)
def start(method=None, states=(), **given):
    draft = Of(method=method) if method else None
    made = hooks.of(Of(parallel_config=parallel, speculative_config=draft), None, options.Options(**given))
    assert made.following() == 0
    made.check(Of(states=states), "kv_both")
start()
start(method="ngram")
for refused in ({"method": "eagle"}, {"states": (1,)}, {"offload": "lazy"}, {"load_mode": "sync"}, {"share_tp": 2}):
    try:
        start(**refused)
    except hooks.Unsupported as error:
        assert "not installed" in str(error), error
    else:
        raise AssertionError(refused)
"""


def imports(path: Path) -> Iterator[str]:
    """Yield the names of the modules that a file imports, also those of its types."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)


def test_the_core_imports_no_guest() -> None:
    """By name or by type: ``start`` and the plugin ask for their folders by texts."""
    of_core = [path for path in CORE.rglob("*.py") if path.relative_to(CORE).parts[0] not in GUESTS]
    assert len(of_core) > 20
    guests = tuple(f"kvagent.vllm.{name}" for name in GUESTS)
    found = {(path.name, name) for path in of_core for name in imports(path) if name.startswith(guests)}
    assert not found


def test_the_core_runs_without_guests(tmp_path: Path) -> None:
    """A copy without their folders runs the core's tests with a real agent."""
    need_agent()
    without = shutil.ignore_patterns(*GUESTS, "__pycache__")
    shutil.copytree(CORE.parent, tmp_path / "kvagent", ignore=without)
    shutil.copytree(Path(__file__).parent, tmp_path / "tests", ignore=shutil.ignore_patterns("vllm", "pd", "gpu"))
    assert not any((tmp_path / "kvagent" / "vllm" / name).exists() for name in GUESTS)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "KVAGENT_BINARY": str(BINARY)}
    pytest = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider"]
    for command in (pytest + [f"tests/{name}" for name in TESTS], [sys.executable, "-c", START]):
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
