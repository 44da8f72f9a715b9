"""PyTorch tensors on a GPU, exported by the connector, saved and loaded by the agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.messages import RegionKind
from tests.agent import AgentProcess, eventually
from tests.simulated import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXPANDABLE = "expandable_segments:True"


@pytest.fixture
def engines(gpu_agent: AgentProcess) -> Iterator[Callable[[str], Any]]:
    from tests.gpu.engine import GpuEngine

    made: list[GpuEngine] = []

    def make(name: str) -> GpuEngine:
        made.append(GpuEngine(gpu_agent, name))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def load(engine: Any, name: str, prompt: str, blocks: int) -> Any:
    request = engine.request(name, prompt, blocks)
    assert engine.matched(request) == blocks * BLOCK
    engine.admit(request, blocks * BLOCK)
    results = engine.until_received(request)
    assert not results.failed
    assert not results.bad_blocks
    return request


def test_bytes_come_back_in_another_tensor(engines: Callable[[str], Any], gpu_agent: AgentProcess) -> None:
    first, second = engines("one"), engines("two")
    first.save("a", "p", 20, 9)
    request = load(second, "b", "p", 20)
    assert second.holds(request, 9, 20)
    eventually(lambda: gpu_agent.status()["leases"] == 0, "an agent without leases")


def test_a_tensor_inside_its_allocation(engines: Callable[[str], Any]) -> None:
    engine = engines("one")
    (region, *_) = [region for region, _ in engine.registered.regions]
    inside = region.addr if region.kind == RegionKind.CUDA else engine.offset()
    assert inside > 0
    engine.save("a", "p", 5, 3)
    request = load(engine, "b", "p", 5)
    assert engine.holds(request, 3, 5)


def test_a_save_waits_for_the_kernels_of_its_step(engines: Callable[[str], Any]) -> None:
    """They are still queued after a slow one when the job is submitted."""
    engine = engines("one")
    engine.late = True
    engine.save("a", "late", 5, 7)
    engine.late = False
    request = load(engine, "b", "late", 5)
    assert engine.holds(request, 7, 5)


def test_a_load_waits_for_the_step_in_flight(engines: Callable[[str], Any]) -> None:
    """The step in flight still writes to the load's destination, as that of an aborted request
    may.
    """
    engine = engines("one")
    engine.save("a", "p", 5, 7)
    request = engine.request("b", "p", 5)
    assert engine.matched(request) == 5 * BLOCK
    engine.admit(request, 5 * BLOCK)
    engine.late = True
    engine.fill(request, 99)
    engine.until_received(request)
    assert engine.holds(request, 7, 5)


@pytest.mark.skipif(EXPANDABLE in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""), reason="this is that other process")
def test_expandable_segments(a_gpu: None) -> None:
    """The same tests in another process, whose allocator uses chunks; a process chooses its
    allocator once.
    """
    from tests.gpu.conftest import REQUIRE

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            "/dev/null",
            "--rootdir",
            str(Path(__file__).parents[2]),
            __file__,
        ],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE, REQUIRE: "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_kinds_of_regions(engines: Callable[[str], Any]) -> None:
    expandable = EXPANDABLE in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    kinds = {region.kind for region, _ in engines("one").registered.regions}
    assert kinds == {RegionKind.CUDA_FD if expandable else RegionKind.CUDA}
