"""Engines of several shapes, of which only the KV caches exist, byte by byte."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvagent.vllm.guests.cells import Cells, cell_extents, cells, layer_number
from kvagent.vllm.worker.memory import Memory, memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYERS, STATES, CONTENT, BLOCKS, ITEM = 4, 3, 2, 7, 4  # content: numbers of K and V, of ITEM bytes each
LAYOUTS = {  # vLLM's names and axes in memory order, of [L, B, H, N, C]
    "LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "LHBNC": (0, 2, 1, 3, 4), "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4), "BHLNC": (1, 2, 0, 3, 4),
}  # fmt: skip


@dataclass
class Storage:
    data: Any

    @property
    def _cdata(self) -> int:
        return id(self.data)

    def nbytes(self) -> int:
        return len(self.data)

    def share_memory_(self) -> None:
        """It may lie anywhere."""

    def _share_fd_cpu_(self) -> tuple[int, int]:
        return -1, self.nbytes()


@dataclass
class Tensor:
    """A view of a storage, as torch has it; steps and start count elements."""

    storage: Storage
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    start: int

    device = SimpleNamespace(type="cpu")

    def untyped_storage(self) -> Storage:
        return self.storage

    def element_size(self) -> int:
        return ITEM

    def storage_offset(self) -> int:
        return self.start

    def stride(self, dim: int | None = None) -> Any:
        return self.steps if dim is None else self.steps[dim]

    def narrow(self, dim: int, first: int, n: int) -> Tensor:
        shape = (*self.shape[:dim], n, *self.shape[dim + 1 :])
        return replace(self, shape=shape, start=self.start + first * self.steps[dim])


@dataclass(frozen=True)
class FullAttentionSpec:
    num_kv_heads: int
    block_size: int = STATES
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    kv_quant_mode: Any = None


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


def parallel_of(tp: int, pp: int, **more: Any) -> Any:
    """Return a ParallelConfig, as far as the connector reads it."""
    usual: dict[str, Any] = {
        "nnodes_within_dp": 1, "distributed_executor_backend": "mp", "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**usual | {"tensor_parallel_size": tp, "pipeline_parallel_size": pp} | more)


def config_of(tp: int, pp: int, heads: int, kind: Any = FullAttentionSpec, layers: int = LAYERS, **more: Any) -> Any:
    model = SimpleNamespace(
        get_total_num_hidden_layers=lambda: layers, get_total_num_kv_heads=lambda: heads,
        hf_text_config=SimpleNamespace(num_key_value_heads=heads),
    )  # fmt: skip
    parallel = parallel_of(tp, pp)
    spec = kind(num_kv_heads=max(1, heads // tp), **more)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], kv_tp_replicas=1)
    return SimpleNamespace(model_config=model, parallel_config=parallel), groups


def cells_of(config: tuple[Any, Any], share_tp: int, share_pp: int) -> Cells | None:
    return cells(config[0], config[1], share_tp, share_pp)


def plan_of(tp: int, pp: int, heads: int, *, share_tp: int = 4, share_pp: int = 2) -> Cells:
    plan = cells_of(config_of(tp, pp, heads), share_tp, share_pp)
    assert plan is not None
    return plan


class Engine:
    """The KV caches of an engine, byte by byte, and what is sent of them to a pool and back."""

    def __init__(self, tp: int, pp: int, heads: int, layout: str, allocate: Callable[[int], Any] = bytearray) -> None:
        self.tp, self.heads = tp, heads
        self.plan = plan_of(tp, pp, heads)
        self.caches: list[dict[str, Tensor]] = []
        for rank in range(tp * pp):
            low, high = self.plan.stages[rank // tp : rank // tp + 2]
            self.caches.append(caches_of(range(low, high), max(1, heads // tp), LAYOUTS[layout], allocate))

    def elements(self) -> Iterator[tuple[tuple[int, ...], Any, int]]:
        """Yield each number of the whole model, by layer, head, block, state and content, and its
        place.
        """
        for rank, caches in enumerate(self.caches):
            first = rank % self.tp * self.heads // self.tp
            for name, tensor in caches.items():
                for b, h, n, c in itertools.product(*map(range, tensor.shape)):
                    at = tensor.start + sum(i * s for i, s in zip((b, h, n, c), tensor.steps, strict=True))
                    yield (layer_number(name), first + h, b, n, c), tensor.storage.data, at * ITEM

    def fill(self) -> None:
        for place, data, at in self.elements():
            data[at : at + ITEM] = value_of(place)

    def check(self, blocks: dict[int, int]) -> None:
        """Compare every byte: block b must have what was saved of blocks[b]."""
        for (layer, head, b, n, c), data, at in self.elements():
            want = value_of((layer, head, blocks[b], n, c)) if b in blocks else bytes(ITEM)
            assert bytes(data[at : at + ITEM]) == want, f"layer {layer}, head {head}, block {b}, state {n}, content {c}"

    def memory(self, rank: int) -> Memory:
        """Return what a worker registers, whose layers are listed in any order."""
        names = sorted(self.caches[rank], reverse=self.tp > 1)
        return memory(self.caches[rank], [names], BLOCKS, extents_of=partial(cell_extents, plan=self.plan, rank=rank))

    def runs(self, rank: int, block: int) -> Iterator[tuple[int, list[tuple[Any, int, int]]]]:
        """Yield each cell of a worker with the runs of one of its blocks."""
        data = next(iter(self.caches[rank].values())).storage.data
        for shard, segments in self.memory(rank).held.items():
            yield shard, [(data, s.offset + block * s.stride, s.bytes) for s in segments[0]]

    def save(self, block: int) -> dict[int, bytes]:
        stored: dict[int, bytes] = {}
        for rank in range(len(self.caches)):
            for shard, runs in self.runs(rank, block):
                content = b"".join(bytes(data[at : at + n]) for data, at, n in runs)
                assert stored.setdefault(shard, content) == content, f"replicas of shard {shard} differ"
        return stored

    def load(self, block: int, stored: dict[int, bytes]) -> None:
        for rank in range(len(self.caches)):
            for shard, runs in self.runs(rank, block):
                content = stored[shard]
                for data, at, n in runs:
                    data[at : at + n], content = content[:n], content[n:]
                assert not content


def value_of(place: tuple[int, ...]) -> bytes:
    number = 1
    for part in place:
        number = number * 11 + part
    return number.to_bytes(4, "little")[:ITEM]


def caches_of(
    layers: range, heads: int, order: tuple[int, ...], allocate: Callable[[int], Any] = bytearray
) -> dict[str, Tensor]:
    shape = (len(layers), BLOCKS, heads, STATES, CONTENT)
    steps, step = [0] * 5, 1
    for axis in reversed(order):
        steps[axis] = step
        step *= shape[axis]
    storage = Storage(allocate(math.prod(shape) * ITEM))
    return {
        f"model.layers.{number}.self_attn.attn": Tensor(storage, shape[1:], tuple(steps[1:]), i * steps[0])
        for i, number in enumerate(layers)
    }


SHAPES = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]
