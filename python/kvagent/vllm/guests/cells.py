"""Cells: ranges of layers and of KV heads, by which engines of different tensor and pipeline
parallel sizes share (share_tp, share_pp), and where they lie in a worker's KV caches.

Which cells there are follows from the configuration of the whole model, so every engine and every
role gets the same. The bytes of a cell are those of its layers, in the order of the layers'
numbers, and of each layer those of its heads, with the axes in the order of the layout. So they are
the same in every engine, wherever its layers lie and however many heads it holds.
docs/decisions/2026-11-23-cells.md has the reasons.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.limits import MAX_SEGMENTS, MAX_SHARDS
from kvagent.vllm.geometry import MLA, WITHOUT_DRAFTS, Unsupported, group_spec, replicated
from kvagent.vllm.options import OptionError
from kvagent.vllm.worker.memory import Extent, extents, joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvagent.vllm.worker.memory import Found


_SPLIT = ("FullAttentionSpec", "SlidingWindowSpec")  # whose heads tensor parallelism splits
_PLAIN = ("NONE", "FP8_PER_TENSOR")  # formats in which each number is one of one head


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of a model. Cell ``layers * head_ranges + heads`` has these ranges."""

    bounds: tuple[int, ...]
    """Layer range i has the layers with numbers from bounds[i] to bounds[i + 1] - 1."""
    head_ranges: int
    heads: int
    """KV heads of a layer; a multiple of head_ranges. 1 if the KV is replicated."""
    stages: tuple[int, ...]
    """Like bounds: the layers of this engine's pipeline stages."""
    tp: int

    @property
    def count(self) -> int:
        """Return the number of cells."""
        return (len(self.bounds) - 1) * self.head_ranges

    @property
    def text(self) -> str:
        """Return the bounds, for the identity."""
        return f"layers {' '.join(map(str, self.bounds))}, {self.heads} heads in {self.head_ranges}"

    @property
    def heads_of_cell(self) -> int:
        """Return the number of KV heads of a cell."""
        return self.heads // self.head_ranges

    def first_head(self, rank: int) -> int:
        """Return the first KV head of a worker."""
        return rank % self.tp * self.heads // self.tp

    def of_rank(self, rank: int) -> list[Cell]:
        """Return the cells that a worker holds, in order."""
        stage, first = rank // self.tp, self.first_head(rank)
        heads = max(1, self.heads // self.tp)
        low, high = self.stages[stage : stage + 2]
        return [
            Cell(i * self.head_ranges + h, range(start, end), h * self.heads_of_cell - first)
            for i, (start, end) in enumerate(itertools.pairwise(self.bounds))
            if low <= start and end <= high
            for h in range(first // self.heads_of_cell, (first + heads) // self.heads_of_cell)
        ]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell as one worker holds it."""

    shard: int
    layers: range
    first_head: int
    """Among the worker's heads."""


def cells(vllm_config: Any, kv_cache_config: Any, share_tp: int, share_pp: int) -> Cells | None:
    """Return the model's cells, or None if neither size is given (0).

    Unsupported says what cannot be split, OptionError which size does not fit the engine's own.
    """
    if not share_tp and not share_pp:
        return None
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    tp, pp = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    share_tp, share_pp = share_tp or tp, share_pp or pp
    for name, own, shared in (("share_tp", tp, share_tp), ("share_pp", pp, share_pp)):
        if shared % own:
            raise OptionError(f"{name}: {shared}, allowed is a multiple of this engine's own size, {own}")
    layers = int(model.get_total_num_hidden_layers())
    given = os.environ.get("VLLM_PP_LAYER_PARTITION")
    bounds, stages = _partition(layers, share_pp), _partition(layers, pp, given)
    if missing := sorted(set(stages) - set(bounds)):
        raise OptionError(
            f"share_pp: {share_pp} stages begin at layers {bounds[:-1]}, and this engine's at {missing[0]} too"
            + (f" (VLLM_PP_LAYER_PARTITION {given})" if given else "")
        )
    heads, ranges = _heads(vllm_config, kv_cache_config, tp, share_tp)
    found = Cells(bounds, ranges, heads, stages, tp)
    if found.count > MAX_SHARDS:
        raise OptionError(f"share_tp and share_pp make {found.count} cells, allowed is 1 to {MAX_SHARDS}")
    return found


def distribution(plan: Cells, kv_cache_config: Any) -> dict[str, str]:
    """Return the pairs of the identity that say which part of a block is in which cell."""
    specs = [whole_spec(group.kv_cache_spec, plan.heads) for group in kv_cache_config.kv_cache_groups]
    return {"groups": hashlib.sha256("\n".join(specs).encode()).hexdigest()[:32], "cells": plan.text}


def whole_spec(spec: Any, heads: int) -> str:
    """Return the text of a group's specification with the KV heads of the whole model."""
    spec = group_spec(spec)
    if type(spec).__name__ == MLA or not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return repr(spec)
    return repr(dataclasses.replace(spec, num_kv_heads=heads))


def layer_number(name: str) -> int:
    """Return the number in a layer's name."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise Unsupported(
            f"layer {name}: its name has {len(numbers)} numbers, and must have one: layers are matched by it"
        )
    return numbers[0]


def in_order(names: Iterable[str]) -> list[str]:
    """Return the layers in the order of their numbers, then of their names."""
    return sorted(names, key=lambda name: (layer_number(name), name))


def _partition(layers: int, stages: int, given: str | None = None) -> tuple[int, ...]:
    """Return the bounds of vLLM's pipeline stages (distributed.utils.get_pp_indices).

    ``given`` are the sizes that the user set for this engine, which other engines do not know.
    """
    if given:
        sizes = [int(part) for part in given.split(",")]
    else:
        sizes = [layers // stages] * stages
        for i in range(2, layers % stages + 2):
            sizes[-i] += 1
    bounds = (0, *itertools.accumulate(sizes))
    if len(sizes) != stages or bounds[-1] != layers or min(sizes) < 1:
        raise OptionError(f"{stages} pipeline stages of {layers} layers: {sizes}")
    return bounds


def _heads(vllm_config: Any, kv_cache_config: Any, tp: int, share_tp: int) -> tuple[int, int]:
    """Return the KV heads of the model and how many ranges they make. Replicated KV is one."""
    if replicated(kv_cache_config):
        return 1, 1
    heads = int(vllm_config.model_config.get_total_num_kv_heads())
    if any(heads % size and size % heads for size in (tp, share_tp)):
        raise Unsupported(f"share_tp: {share_tp}, and {heads} KV heads: one must divide the other")
    _check_one_number(vllm_config.model_config, heads)
    _check_draft(getattr(vllm_config, "speculative_config", None), heads, tp)
    ranges = min(share_tp, heads)
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        _check_group(i, group.kv_cache_spec, max(1, heads // tp), split=ranges > 1)
    return heads, ranges


def _check_group(number: int, spec: Any, heads: int, *, split: bool) -> None:
    """Raise Unsupported if a group's heads cannot be split, or are not those of the model."""
    where, kind = f"share_tp: KV cache group {number}", type(spec).__name__
    if kind not in _SPLIT:
        raise Unsupported(f"{where} is of {kind}, allowed are {', '.join(_SPLIT)}, or {MLA} in all groups")
    if int(spec.num_kv_heads) != heads:
        raise Unsupported(
            f"{where} has {spec.num_kv_heads} KV heads on each rank, allowed is {heads}, as the model has"
        )
    if not split:
        return
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", _PLAIN[0])
    if mode not in _PLAIN:
        raise Unsupported(
            f"{where} has the format {mode}, whose heads cannot be split; allowed are {', '.join(_PLAIN)}"
        )
    for name, plain in (("page_size_padded", None), ("num_head_slots", None), ("state_content_bytes", None),
                        ("tokens_per_state", 1)):  # fmt: skip
        if (given := getattr(spec, name, plain)) != plain:
            raise Unsupported(f"{where} has {name} {given}: its heads cannot be split; allowed is {plain}")


def _check_one_number(model: Any, heads: int) -> None:
    """Raise Unsupported if the layers of a model may have different numbers of KV heads.

    The groups alone do not tell: with as many ranks as heads, every layer has one head per rank.
    """
    config = getattr(model, "hf_text_config", None)
    found = {
        name: value
        for name, value in (vars(config) if hasattr(config, "__dict__") else {}).items()
        if re.search("kv_heads|key_value_heads", name) and value is not None
    }
    numbers = {one for value in found.values() for one in (value if isinstance(value, (list, tuple)) else [value])}
    if len(numbers) > 1:
        raise Unsupported(f"share_tp: layers have different numbers of KV heads ({found}), allowed is {heads} in all")
    for name, per_layer in (
        ("total_num_kv_heads of the per_layer_overrides", _overrides(model)),
        ("n_heads_in_group of the block_configs", _queries_per_head(config)),
    ):
        if len(per_layer) > 1:
            raise Unsupported(f"share_tp: {name}: {sorted(per_layer)}, allowed is one number of KV heads in all layers")


def _overrides(model: Any) -> set[int]:
    """Return the numbers of KV heads that vLLM found for single layers, and for the model."""
    whole: Any = getattr(model, "model_arch_config", None)
    layers = getattr(whole, "per_layer_overrides", None) or []
    return {layer.get("total_num_kv_heads", whole.total_num_kv_heads) for layer in layers}


def _queries_per_head(config: Any) -> set[int]:
    """Return the numbers of query heads per KV head in the blocks of Nemotron-NAS."""
    attentions: list[Any] = [
        getattr(block, "attention", None) for block in getattr(config, "block_configs", None) or []
    ]
    return {int(one.n_heads_in_group) for one in attentions if getattr(one, "n_heads_in_group", None)}


def _check_draft(speculative: Any, heads: int, tp: int) -> None:
    """Raise Unsupported if a draft model's layers have other KV heads than the model's."""
    draft, method = getattr(speculative, "draft_model_config", None), getattr(speculative, "method", None)
    if draft is None or method in WITHOUT_DRAFTS:
        return
    own, own_tp = int(draft.get_total_num_kv_heads()), getattr(speculative, "draft_tensor_parallel_size", None)
    if own != heads:
        raise Unsupported(f"share_tp: the draft model has {own} KV heads, allowed is {heads}, as the model has")
    if own_tp not in (None, tp):
        raise Unsupported(f"share_tp: draft_tensor_parallel_size {own_tp}, allowed is {tp}, as the model has")
    _check_one_number(draft, heads)


def checked_layers(names: Sequence[str], stage: range) -> list[str]:
    """Return a group's layers in order. Unsupported names one that is not of this stage."""
    ordered = in_order(names)
    for name in ordered:
        if layer_number(name) not in stage:
            raise Unsupported(
                f"layer {name}: its number is not among those of this pipeline stage, {stage.start} to {stage.stop - 1}"
            )
    return ordered


_HEADS = 1  # axis of a layer's view: blocks, heads, states, content


def cell_extents(
    kv_caches: Mapping[str, Any], groups: Sequence[Sequence[str]], num_blocks: int,
    storages: dict[int, tuple[int, Any]], *, plan: Cells, rank: int,
) -> Found:  # fmt: skip
    """Return the extents of a worker's cells, by shard and group.

    ``groups``: the layer names of each group; ``storages`` collects the storages, as extents does.
    """
    held = plan.of_rank(rank)
    stage = range(held[0].layers.start, held[-1].layers.stop)
    heads = max(1, plan.heads // plan.tp)
    found: dict[int, dict[int, list[Extent]]] = {cell.shard: {} for cell in held}
    for number, names in enumerate(groups):
        ordered = checked_layers(names, stage)
        seen: dict[tuple[Extent, ...], str] = {}
        for name in ordered:
            if name not in kv_caches:
                raise Unsupported(f"group {number}: layer {name} has no KV cache here")
            tensor = kv_caches[name]
            _check_heads(name, tensor, heads, plan.head_ranges)
            whole = tuple(extents(name, tensor, num_blocks, storages))
            if seen.setdefault(whole, name) != name:  # it shares the memory of a layer before it
                continue
            for cell in held:
                if layer_number(name) in cell.layers:
                    part = _heads_of(tensor, cell, plan)
                    found[cell.shard].setdefault(number, []).extend(extents(name, part, num_blocks, storages))
    _check_cells(found, held, len(groups))
    return {shard: {g: joined(some) for g, some in by_group.items()} for shard, by_group in found.items()}, None


def _check_heads(name: str, tensor: Any, heads: int, ranges: int) -> None:
    shape = tuple(getattr(tensor, "shape", ()))
    if ranges > 1 and (len(shape) != 4 or shape[_HEADS] != heads):
        raise Unsupported(
            f"layer {name}: its KV cache has the shape {shape}, allowed is (blocks, {heads} heads, states, content): "
            "its heads cannot be split"
        )


def _heads_of(tensor: Any, cell: Cell, plan: Cells) -> Any:
    if plan.head_ranges == 1:
        return tensor
    return tensor.narrow(_HEADS, cell.first_head, plan.heads_of_cell)


def _check_cells(found: Mapping[int, Mapping[int, Sequence[Extent]]], held: Sequence[Cell], groups: int) -> None:
    for cell in held:
        for number in range(groups):
            if number not in found[cell.shard]:
                raise Unsupported(
                    f"KV cache group {number} has no layer among {cell.layers.start} to {cell.layers.stop - 1}: "
                    "every cell needs one of each group; use a smaller share_pp"
                )
    parts = sum(len(joined(some)) for by_group in found.values() for some in by_group.values())
    if parts > MAX_SEGMENTS:
        raise Unsupported(
            f"the cells of this rank lie in {parts} runs, allowed is 1 to {MAX_SEGMENTS}: use a layout with heads "
            "outside of tokens (LBHNC, BLHNC), larger blocks or a smaller share_tp"
        )
