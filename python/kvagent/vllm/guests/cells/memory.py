"""Where the cells of a worker lie in its KV caches.

The bytes of a cell are those of its layers, in the order of the layers' numbers, and of each layer
those of its heads, with the axes in the order of the layout. So they are the same in every engine,
wherever its layers lie and however many heads it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvagent.limits import MAX_SEGMENTS
from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.guests.cells.plan import checked_layers, layer_number
from kvagent.vllm.worker.memory import Extent, extents, joined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvagent.vllm.guests.cells.plan import Cell, Cells
    from kvagent.vllm.worker.memory import Found

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
    _check(found, held, len(groups))
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


def _check(found: Mapping[int, Mapping[int, Sequence[Extent]]], held: Sequence[Cell], groups: int) -> None:
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
