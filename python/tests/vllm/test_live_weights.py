"""Writes to a model in the calling program's process, which pass none of vLLM's calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvagent.vllm.weight_changes import LiveWeights, Unreachable, under_construction
from kvagent.vllm.weight_samples import Samples
from tests.vllm import engine as real
from tests.vllm.engine import PROMPTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.agent import AgentProcess


class Model(torch.nn.Module):
    """Several types and shapes, one of which is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.arange(100_000, dtype=torch.float32).view(1000, 100).t())
        self.small = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.empty = torch.nn.Parameter(torch.ones(0))
        self.columns = torch.nn.Parameter(torch.ones(4, 6)[:, :3])
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))


def core_of(model: Any, *, sleeping: bool = False) -> Any:
    worker = SimpleNamespace(worker=SimpleNamespace(get_model=lambda: model))
    return SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker, is_sleeping=sleeping))


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.large.data.neg_(),
        lambda m: m.small.data.add_(1),
        lambda m: m.mask.logical_not_(),
        lambda m: setattr(m, "small", torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))),
        lambda m: m.large.data[:, 960:].mul_(2),
        lambda m: m.large.data[:, :64].mul_(2),
        lambda m: m.columns.data.add_(1),
        lambda m: setattr(m.small, "data", torch.zeros(3, dtype=torch.bfloat16)),
    ],
)
def test_a_write_is_seen_once(write: Callable[[Model], Any]) -> None:
    model = Model()
    live = LiveWeights(core_of(model))
    assert not live.changed()
    write(model)
    assert live.changed()
    assert not live.changed()


def test_a_model_elsewhere_or_asleep_is_not_touched() -> None:
    with pytest.raises(Unreachable, match="no worker in this process"):
        LiveWeights(SimpleNamespace(model_executor=SimpleNamespace()))
    with pytest.raises(Unreachable):
        LiveWeights(core_of(None))
    model = Model()
    core = core_of(model)
    live = LiveWeights(core)
    model.small.data.add_(1)
    core.model_executor.is_sleeping = True
    assert not live.changed()
    core.model_executor.is_sleeping = False
    assert live.changed()
    core.model_executor.driver_worker.worker = None
    assert live.changed(), "what cannot be looked at counts as changed"


def test_an_engine_is_idle_once_its_last_request_has_finished() -> None:
    core = core_of(Model())
    live = LiveWeights(core)
    assert live.idle, "the scheduler is made after the connector"
    left = ["one"]
    core.scheduler = SimpleNamespace(has_unfinished_requests=lambda: bool(left))
    seen = [live.idle]
    left.clear()
    assert [*seen, live.idle] == [False, True]


def test_the_core_that_is_being_made_is_found() -> None:
    class Core:
        def __init__(self) -> None:
            self.found = (lambda: under_construction(Core))()

    core = Core()
    assert core.found is core
    assert under_construction(Core) is None


def test_the_sample_is_of_names_and_shapes_too() -> None:
    one, other = torch.nn.Module(), torch.nn.Module()
    one.register_parameter("a", torch.nn.Parameter(torch.zeros(2, 3)))
    other.register_parameter("a", torch.nn.Parameter(torch.zeros(3, 2)))
    assert Samples(one).take() != Samples(other).take()


class Calls(TorchDispatchMode):
    """Counts calls that do work on a device: on a GPU each is a launch, or a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_sample_of_many_tensors_is_few_calls() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(150)))
    samples = Samples(model)
    before = samples.take()
    with Calls() as calls:
        assert samples.take() == before
    assert len(calls.seen) <= 2, calls.seen
    model[70].bias.data.add_(1)
    with Calls() as calls:
        changed = samples.take()
    assert changed != before
    assert len(calls.seen) <= 2, calls.seen
    samples.forget()
    assert samples.take() == changed


@pytest.mark.engine
def test_a_program_that_writes_to_its_engines_model(opt: Path, node: AgentProcess, reference: list[list[int]]) -> None:
    """It shares until then; afterwards it loads no old blocks, and its new ones are not found."""
    llm = real.make_engine(opt, str(node.folder), options={})
    core = llm.llm_engine.engine_core.engine_core
    try:
        side, _ = real.sides(llm)
        assert not side.generations.now, "an engine without writes shares"
        assert real.generate(llm, PROMPTS) == reference
        real.settle(llm)
        llm.reset_prefix_cache()  # vLLM's own cache alone
        before = node.status()["blocks_loaded"]
        assert real.generate(llm, PROMPTS) == reference
        warm = node.status()["blocks_loaded"]
        assert warm > before, "its own blocks, and the weights are the same"
        real.settle(llm)
        core.model_executor.driver_worker.worker.get_model().model.decoder.layers[0].fc2.weight.data.neg_()
        llm.reset_prefix_cache()
        said = real.generate(llm, PROMPTS)
        assert side.generations.now.startswith("private:")
        assert all(a != b for a, b in zip(said, reference, strict=True)), "a write that changes nothing shows nothing"
        assert node.status()["blocks_loaded"] == warm, "blocks of the old weights were loaded"
        real.settle(llm)
        llm.reset_prefix_cache()
        assert real.generate(llm, PROMPTS) == said
        assert node.status()["blocks_loaded"] > warm, "its own blocks of the new weights"
    finally:
        core.shutdown()
