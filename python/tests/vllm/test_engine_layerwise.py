"""The real engine with steps that wait for loads layer by layer: its output equals its output when
it computes everything, whatever happens to a layer's part, or to the agent, between two layers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.holding import HoldingAgent
from tests.sides import waits as step_waits
from tests.vllm import agents
from tests.vllm import engine as real
from tests.vllm.agents import figures
from tests.vllm.engine import LAYERS, PROMPTS, WHOLE_BLOCKS
from tests.vllm.test_engine import Alive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.engine
WAIT_MS = 10_000  # of a step: the most that is allowed
STOPPED_S = 0.3  # of a step, from when its agent is stopped
LAYER = "model.decoder.layers.{}.self_attn.attn"


@pytest.fixture(scope="module")
def alive(opt: Path, reference: list[list[int]]) -> Iterator[Alive]:
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        path = Path(folder) / "run"
        path.mkdir(mode=0o700)
        agent = HoldingAgent(path)
        options = {
            "weights_fixed": True, "load_mode": "sync", "layerwise": True, "sync_wait_ms": WAIT_MS,
            "lookup_wait_ms": 100,
        }  # fmt: skip
        llm = real.make_engine(opt, str(agent.folder), options=options)
        yield Alive(llm, agent)
        llm.llm_engine.engine_core.shutdown()
        agent.close()


class Middle:
    """The middle of the next load: its first stage has arrived, the last is held."""

    def __init__(self, alive: Alive, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
        """``act``: called when the last layer is about to wait."""
        self.computed: list[str] = []
        """The layers that have computed by then."""
        worker = alive.worker
        wait = worker.wait_layer
        assert isinstance(alive.agent, HoldingAgent)
        holding = alive.agent
        holding.hold(1)

        def waits(name: str) -> None:
            loading = bool(step_waits(worker)._waited)
            if loading and self.computed == [LAYER.format(0)] and name == LAYER.format(LAYERS - 1):
                holding.holds()
                layers = step_waits(worker).layers
                assert [layers._landed[word] for word in layers._words.values()] == [1]
                self.computed.append("-")
                act()
            wait(name)
            if loading and not self.computed:
                self.computed.append(name)

        monkeypatch.setattr(worker, "wait_layer", waits)


def says(alive: Alive, reference: list[list[int]]) -> None:
    """Check the answer to one prompt, whose load is the only one of its step."""
    assert real.generate(alive.llm, PROMPTS[5:6]) == reference[5:6]


def test_cold_and_warm(alive: Alive, reference: list[list[int]]) -> None:
    alive.fill(reference)
    stages = step_waits(alive.worker).layers
    assert stages._stages.needed == {LAYER.format(i): i + 1 for i in range(LAYERS)}
    before, count = dict(vars(alive.side.counts)), alive.agent.status()["blocks_loaded"]
    assert alive.says() == reference
    after = dict(vars(alive.side.counts))
    assert after["loads_sync"] - before["loads_sync"] >= len(PROMPTS) - 1
    assert after["loads_sync_failed"] == 0
    assert not stages._broken
    warm = alive.agent.status()["blocks_loaded"] - count
    assert warm * 2 >= WHOLE_BLOCKS
    print(f"warm: {warm} of {WHOLE_BLOCKS} whole blocks of prompts loaded; {figures(alive.agent)}")


def test_the_first_layer_computes_before_the_last_has_arrived(
    alive: Alive, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive.fill(reference)
    assert isinstance(alive.agent, HoldingAgent)
    failed = alive.side.counts.loads_sync_failed
    middle = Middle(alive, monkeypatch, alive.agent.release)
    says(alive, reference)
    assert middle.computed == [LAYER.format(0), "-"]
    assert alive.side.counts.loads_sync_failed == failed


@pytest.mark.parametrize("how", ["freeze", "kill", "spoil"])
def test_what_happens_between_two_layers(alive: Alive, reference: list[list[int]], how: str) -> None:
    patch = pytest.MonkeyPatch()  # which ends before the test does
    alive.fill(reference)
    holding = alive.agent
    assert isinstance(holding, HoldingAgent)
    failed = alive.side.counts.loads_sync_failed

    def spoiled() -> None:
        agents.spoil(alive.agent.process.pid)
        holding.release()

    def freeze() -> None:
        holding.freeze()
        loads = step_waits(alive.worker)
        patch.setattr(loads, "_wait_s", STOPPED_S)
        loads._left_s = STOPPED_S

    middle = Middle(alive, patch, {"spoil": spoiled, "freeze": freeze, "kill": holding.kill}[how])
    try:
        says(alive, reference)
        assert middle.computed == [LAYER.format(0), "-"]
        assert alive.side.counts.loads_sync_failed == failed + 1
        assert (alive.side.blocks.loading > 0) == (how == "freeze"), "pins without a fence to come, or none"
        assert alive.says() == reference
    finally:
        patch.undo()
        if how == "kill":
            holding.start()
        elif how == "freeze":
            holding.thaw()
            holding.release()
    alive.joined()
    assert alive.says() == reference
    alive.forget()
    assert alive.says() == reference
    print(f"{how}: {dict(vars(alive.side.counts))}")
