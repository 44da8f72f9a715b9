"""The stages of a worker's KV caches: the parts of each block that a staged load copies one after
the other.

Each layer that calls the connector before its attention (vLLM's attention layers do) is a stage of
its own, in the order of the layers' numbers. All others, such as the indexers of sparse attention,
are in the first stage, which the forward pass waits for. So are the layers of a draft model: vLLM
runs it after it has asked the connector for the step's results, or not at all.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.limits import MAX_SEGMENTS, MAX_STAGES
from kvagent.vllm.geometry import WITHOUT_DRAFTS, Unsupported
from kvagent.vllm.worker.memory import WHOLE, extents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvagent.vllm.worker.memory import Extent, Found

_CALLING = ("Attention", "MLAAttention")  # vLLM's classes whose forward calls wait_for_layer_load
_DRAFT_MODEL = "draft_model"  # the speculation method, and the first part of its layers' names

log = logging.getLogger("vllm.kvagent")


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a worker's segments."""

    segments: bytes
    """The stage of each segment, u16 LE, in the order of the registration."""
    needed: Mapping[str, int]
    """By layer that waits: how many stages must have arrived."""
    first: int
    """How many stages must have arrived before the forward pass: 1, or 0 if all layers wait."""
    count: int


def calling_layers(vllm_config: Any) -> frozenset[str]:
    """Return the names of the layers of this process that call wait_for_layer_load in the forward
    pass of a step: none, with a draft model whose layers are named like the model's own.
    """
    method = str(getattr(getattr(vllm_config, "speculative_config", None), "method", None) or "")
    if method and method not in (*WITHOUT_DRAFTS, _DRAFT_MODEL):
        log.warning(
            "layerwise: has no effect with speculative_config.method %s, whose layers cannot be told from the model's: "
            "steps wait for whole loads",
            method,
        )
        return frozenset()
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    return frozenset(
        name
        for name, layer in layers.items()
        if any(cls.__name__ in _CALLING for cls in type(layer).__mro__) and name.split(".")[0] != _DRAFT_MODEL
    )


def staged(
    kv_caches: Mapping[str, Any], groups: Sequence[Sequence[str]], num_blocks: int,
    storages: dict[int, tuple[int, Any]], *, calling: frozenset[str],
) -> Found:  # fmt: skip
    """Return the extents of the only group, and their stages. ``calling``: the layers that wait for
    their part of a load.

    They are those of the whole group, cut at the layers, so a block has the same bytes.
    """
    if len(groups) != 1:
        raise Unsupported(f"layerwise: {len(groups)} KV cache groups, allowed is 1")
    missing = [name for name in groups[0] if name not in kv_caches]
    if missing:
        raise Unsupported(f"group 0: layer {missing[0]} has no KV cache here")
    layers = {name: list(extents(name, kv_caches[name], num_blocks, storages)) for name in groups[0]}
    found, stages = stages_of(layers, calling)
    return {WHOLE: {0: found}}, stages


def stages_of(
    layers: Mapping[str, Sequence[Extent]], calling: frozenset[str]
) -> tuple[list[Extent], Stages]:  # fmt: skip
    """Return the extents of a group's layers in memory order, not merged, and their stages.

    Layers that share memory share the stage of the first of them.
    """
    order = sorted((name for name in layers if name in calling), key=_position)
    first = int(any(name not in calling for name in layers))
    number = {name: first + i for i, name in enumerate(order)}
    stage: dict[Extent, int] = {}
    for name, some in layers.items():
        for extent in some:
            stage[extent] = min(stage.get(extent, MAX_STAGES), number.get(name, 0))
    found = sorted(stage, key=lambda p: (p.storage, p.stride, p.offset))
    count = first + len(order)
    if count > MAX_STAGES or len(found) > MAX_SEGMENTS:
        raise Unsupported(
            f"layerwise: {count} layers in {len(found)} runs, allowed is 1 to {MAX_STAGES} in {MAX_SEGMENTS}: use a "
            "layout with heads outside of tokens, or larger blocks"
        )
    needed = {name: 1 + max(stage[extent] for extent in layers[name]) for name in order}
    return found, Stages(struct.pack(f"<{len(found)}H", *(stage[p] for p in found)), needed, first, count)


def _position(name: str) -> tuple[list[int], str]:
    """Return a layer's place among the others: by the numbers in its name."""
    return [int(part) for part in name.split(".") if part.isdigit()], name
