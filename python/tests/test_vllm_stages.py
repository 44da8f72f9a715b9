"""The stages of a worker's KV caches, from the extents of its layers."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from kvagent.limits import MAX_STAGES
from kvagent.vllm.geometry import ONE_RUN, ONE_RUN_A_LAYER, Unsupported, preferred_layout
from kvagent.vllm.guests.sync import Stages, calling_layers, stages_of
from kvagent.vllm.worker.memory import Extent


def layer(number: int) -> str:
    return f"model.layers.{number}.attn"


def outermost(numbers: range) -> dict[str, list[Extent]]:
    """Extents of layers that each have a stretch of one storage."""
    return {layer(i): [Extent(0, i * 1000, 10, 10)] for i in numbers}


def of_segments(stages: Stages) -> list[int]:
    return list(struct.unpack(f"<{len(stages.segments) // 2}H", stages.segments))


def test_each_layer_is_a_stage_in_the_order_of_the_numbers() -> None:
    layers = dict(reversed(outermost(range(12)).items()))
    found, stages = stages_of(layers, frozenset(layers))
    assert [extent.offset for extent in found] == [i * 1000 for i in range(12)]
    assert of_segments(stages) == list(range(12))
    assert stages.needed == {layer(i): i + 1 for i in range(12)}
    assert (stages.first, stages.count) == (0, 12)


def test_neighbours_of_a_block_are_not_merged() -> None:
    layers = {layer(i): [Extent(0, i * 10, 40, 10)] for i in range(4)}  # block-outermost
    found, stages = stages_of(layers, frozenset(layers))
    assert len(found) == 4
    assert of_segments(stages) == [0, 1, 2, 3]


def test_layers_without_a_hook_are_the_first_stage() -> None:
    layers = outermost(range(4))
    _, stages = stages_of(layers, frozenset({layer(0), layer(2)}))
    assert of_segments(stages) == [1, 0, 2, 0]
    assert stages.needed == {layer(0): 2, layer(2): 3}
    assert (stages.first, stages.count) == (1, 3)


@pytest.mark.parametrize("calling", [{layer(0), layer(1), layer(2)}, {layer(1), layer(2)}])
def test_layers_that_share_memory_are_of_the_first_of_their_stages(calling: set[str]) -> None:
    layers = outermost(range(3))
    layers[layer(2)] = layers[layer(0)]
    _, stages = stages_of(layers, frozenset(calling))
    if layer(0) in calling:
        assert of_segments(stages) == [0, 1]
        assert stages.needed == {layer(0): 1, layer(1): 2, layer(2): 1}
    else:
        assert of_segments(stages) == [0, 1]
        assert stages.needed == {layer(1): 2, layer(2): 1}


def test_too_many_layers() -> None:
    layers = outermost(range(MAX_STAGES + 1))
    with pytest.raises(Unsupported, match=f"layerwise: {MAX_STAGES + 1} layers"):
        stages_of(layers, frozenset(layers))


def test_which_layers_call() -> None:
    class Attention: ...

    class Cross(Attention): ...

    class Indexer: ...

    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": Attention(), "b": Cross(), "c": Indexer()})
    )
    assert calling_layers(config) == {"a", "b"}
    assert calling_layers(SimpleNamespace()) == frozenset()


@pytest.mark.parametrize(
    ("method", "waiting"), [(None, 2), ("ngram", 2), ("draft_model", 2), ("a method with layers of its own", 0)]
)
def test_the_layers_of_a_draft_model_are_loaded_before_the_forward_pass(method: str | None, waiting: int) -> None:
    """VLLM runs a draft model after it has taken the step's results."""

    class Attention: ...

    layers = outermost(range(2))
    if method == "draft_model":  # in the same group
        layers["draft_model.model.layers.0.attn"] = [Extent(0, 5000, 10, 10)]
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={name: Attention() for name in layers}),
        speculative_config=SimpleNamespace(method=method),
    )
    found, stages = stages_of(layers, calling_layers(config))
    assert set(stages.needed) == {layer(i) for i in range(waiting)}
    assert of_segments(stages) == {None: [0, 1], "ngram": [0, 1], "draft_model": [1, 2, 0]}.get(method, [0, 0])
    assert (len(found), stages.first) == (len(layers), int(len(layers) > waiting))


@pytest.mark.parametrize(("layerwise", "wanted"), [(False, "BLHNC"), (True, "LBHNC")])
def test_the_layout_to_ask_for(wanted: str, *, layerwise: bool) -> None:
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
    assert not set(ONE_RUN) & set(ONE_RUN_A_LAYER)
    assert preferred_layout(config, "auto", lambda _: ["LHBNC", "BLHNC", "LBHNC"], layerwise=layerwise) == wanted
    assert preferred_layout(config, "BHLNC", layerwise=layerwise) == "BHLNC"
