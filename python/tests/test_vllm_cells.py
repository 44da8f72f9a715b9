"""Cells: which bytes of which layers and heads they hold, for engines of all shapes and layouts."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.cells import Cells, cells, layer_number
from kvagent.vllm.geometry import Unsupported, ranks, replicated
from kvagent.vllm.space import _distribution
from kvagent.vllm.worker.memory import memory

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS, STATES, CONTENT, BLOCKS, ITEM = 4, 3, 2, 3, 2  # content: numbers of K and V, of ITEM bytes each
LAYOUTS = {  # vLLM's names and axes in memory order, of [L, B, H, N, C]
    "LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "LHBNC": (0, 2, 1, 3, 4), "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4), "BHLNC": (1, 2, 0, 3, 4),
}  # fmt: skip


@dataclass
class _Storage:
    data: bytearray

    @property
    def _cdata(self) -> int:
        return id(self.data)

    def nbytes(self) -> int:
        return len(self.data)

    def data_ptr(self) -> int:
        return 4096


@dataclass
class _Tensor:
    """A view of a storage, as torch has it; steps and start count elements."""

    storage: _Storage
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    start: int

    device = SimpleNamespace(type="cpu")

    def untyped_storage(self) -> _Storage:
        return self.storage

    def element_size(self) -> int:
        return ITEM

    def storage_offset(self) -> int:
        return self.start

    def stride(self, dim: int | None = None) -> Any:
        return self.steps if dim is None else self.steps[dim]

    def narrow(self, dim: int, first: int, n: int) -> _Tensor:
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


def _config(tp: int, pp: int, heads: int, kind: Any = FullAttentionSpec, layers: int = LAYERS, **more: Any) -> Any:
    model = SimpleNamespace(
        get_total_num_hidden_layers=lambda: layers, get_total_num_kv_heads=lambda: heads,
        hf_text_config=SimpleNamespace(num_key_value_heads=heads),
    )  # fmt: skip
    parallel = SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    spec = kind(num_kv_heads=max(1, heads // tp), **more)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    return SimpleNamespace(model_config=model, parallel_config=parallel), groups


def _cells(config: tuple[Any, Any], share_tp: int, share_pp: int) -> Cells | None:
    return cells(config[0], config[1], share_tp, share_pp)


def _plan(tp: int, pp: int, heads: int, *, share_tp: int = 4, share_pp: int = 2) -> Cells:
    plan = _cells(_config(tp, pp, heads), share_tp, share_pp)
    assert plan is not None
    return plan


class _Engine:
    """The KV caches of an engine, byte by byte, and what is sent of them to a pool and back."""

    def __init__(self, tp: int, pp: int, heads: int, layout: str) -> None:
        self.tp, self.heads = tp, heads
        self.plan = _plan(tp, pp, heads)
        self.caches: list[dict[str, _Tensor]] = []
        for rank in range(tp * pp):
            low, high = self.plan.stages[rank // tp : rank // tp + 2]
            self.caches.append(_caches(range(low, high), max(1, heads // tp), LAYOUTS[layout]))

    def elements(self) -> Iterator[tuple[tuple[int, ...], bytearray, int]]:
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
            data[at : at + ITEM] = _value(place)

    def check(self, blocks: dict[int, int]) -> None:
        """Compare every byte: block b must have what was saved of blocks[b]."""
        for (layer, head, b, n, c), data, at in self.elements():
            want = _value((layer, head, blocks[b], n, c)) if b in blocks else bytes(ITEM)
            assert bytes(data[at : at + ITEM]) == want, f"layer {layer}, head {head}, block {b}, state {n}, content {c}"

    def runs(self, rank: int, block: int) -> Iterator[tuple[int, list[tuple[bytearray, int, int]]]]:
        """Yield each cell of a worker with the runs of one of its blocks."""
        names = sorted(self.caches[rank], reverse=True)  # the order of the list plays no part
        found = memory(self.caches[rank], [names], BLOCKS, "peer", plan=self.plan, rank=rank)
        data = next(iter(self.caches[rank].values())).storage.data
        for shard, segments in found.cells.items():
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


def _value(place: tuple[int, ...]) -> bytes:
    number = 1
    for part in place:
        number = number * 11 + part
    return number.to_bytes(4, "little")[:ITEM]


def _caches(layers: range, heads: int, order: tuple[int, ...]) -> dict[str, _Tensor]:
    shape = (len(layers), BLOCKS, heads, STATES, CONTENT)
    steps, step = [0] * 5, 1
    for axis in reversed(order):
        steps[axis] = step
        step *= shape[axis]
    storage = _Storage(bytearray(math.prod(shape) * ITEM))
    return {
        f"model.layers.{number}.self_attn.attn": _Tensor(storage, shape[1:], tuple(steps[1:]), i * steps[0])
        for i, number in enumerate(layers)
    }


SHAPES = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [8, 4, 2, 1])
def test_every_byte_arrives_in_every_other_shape(layout: str, heads: int) -> None:
    saved = {}
    for shape in SHAPES:
        saver = _Engine(*shape, heads, layout)
        saver.fill()
        saved[shape] = saver.save(2)
        assert sorted(saved[shape]) == list(range(saver.plan.count))
    for shape in SHAPES:
        for stored in saved.values():
            loader = _Engine(*shape, heads, layout)
            loader.load(0, stored)
            loader.check({0: 2})


def test_cells_are_the_same_for_all_shapes() -> None:
    assert {_plan(tp, pp, 8).text for tp, pp in SHAPES} == {"layers 0 2 4, 8 heads in 4"}
    assert [cell.shard for cell in _plan(2, 2, 8).of_rank(3)] == [6, 7]
    assert [cell.shard for cell in _plan(1, 1, 8).of_rank(0)] == list(range(8))
    assert [[cell.shard for cell in _plan(4, 1, 2).of_rank(rank)] for rank in range(4)] == [[0, 2]] * 2 + [[1, 3]] * 2
    one = _plan(2, 1, 1)
    assert (one.count, one.of_rank(0)) == (2, one.of_rank(1))
    uneven = _cells(_config(1, 2, 4, layers=7), 1, 2)
    assert uneven is not None
    assert (uneven.bounds, uneven.stages) == ((0, 4, 7), (0, 4, 7))
    assert _cells(_config(2, 2, 8), 0, 0) is None


def test_replicated_heads_are_one_range_for_any_size() -> None:
    plans = [_cells(_config(tp, 1, 1, MLAAttentionSpec), 4, 2) for tp in (1, 2, 4)]
    assert {plan.text for plan in plans if plan is not None} == {"layers 0 2 4, 1 heads in 1"}
    assert [plan.of_rank(3) == plans[0].of_rank(0) for plan in plans[2:] if plan and plans[0]] == [True]


@pytest.mark.parametrize(
    ("config", "shared", "said"),
    [
        (_config(2, 1, 8), (3, 1), "share_tp: 3, allowed is a multiple of this engine's own size, 2"),
        (_config(1, 2, 8), (1, 3), "share_pp: 3, allowed is a multiple of this engine's own size, 2"),
        (_config(1, 1, 6), (4, 1), "4, and 6 KV heads"),
        (_config(1, 2, 8, layers=9), (1, 4), "and this engine's at 5 too"),
        (_config(1, 1, 64, layers=64), (64, 64), "make 4096 cells, allowed is 1 to 256"),
        (_config(1, 1, 8), (1, 8), "8 pipeline stages of 4 layers"),
        (_config(1, 1, 8, MambaSpec), (2, 1), "is of MambaSpec"),
        (_config(1, 1, 8, page_size_padded=512), (2, 1), "page_size_padded 512"),
        (_config(1, 1, 8, num_head_slots=16), (2, 1), "num_head_slots 16"),
        (_config(1, 1, 8, state_content_bytes=9), (2, 1), "state_content_bytes 9"),
        (_config(1, 1, 8, kv_quant_mode=SimpleNamespace(name="NVFP4")), (2, 1), "format NVFP4"),
    ],
)
def test_what_cannot_be_split_is_refused(config: Any, shared: tuple[int, int], said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        _cells(config, *shared)


def test_layers_with_other_numbers_of_heads_are_refused() -> None:
    vllm, groups = _config(2, 1, 8)
    groups.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(num_kv_heads=8)
    with pytest.raises(Unsupported, match="8 KV heads on each rank, allowed is 4"):
        cells(vllm, groups, 2, 1)
    vllm, groups = _config(2, 1, 8)
    vllm.model_config.hf_text_config.num_global_key_value_heads = 2
    with pytest.raises(Unsupported, match="different numbers of KV heads"):
        cells(vllm, groups, 2, 1)


def test_memory_that_cannot_be_split_is_refused() -> None:
    plan = _plan(1, 1, 8)
    caches = _caches(range(LAYERS), 8, LAYOUTS["LBNHC"])
    for change, said in (
        ({"model.layers.x.attn": None}, "has 0 numbers"),
        ({"model.layers.1.attn.2": None}, "has 2 numbers"),
        ({"model.layers.4.attn": None}, "is not among those of this pipeline stage, 0 to 3"),
    ):
        with pytest.raises(Unsupported, match=said):
            memory(caches, [[*caches, *change]], BLOCKS, "peer", plan=plan)
    flat = {name: replace(one, shape=(BLOCKS, 8 * STATES, CONTENT)) for name, one in caches.items()}
    with pytest.raises(Unsupported, match="its heads cannot be split"):
        memory(flat, [list(flat)], BLOCKS, "peer", plan=plan)
    with pytest.raises(Unsupported, match="group 1 has no layer among 2 to 3"):
        memory(caches, [list(caches), list(caches)[:2]], BLOCKS, "peer", plan=plan)


def test_a_rank_with_too_many_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvagent.vllm.worker.cell_memory.MAX_SEGMENTS", 4 * LAYERS * STATES - 1)
    caches = _caches(range(LAYERS), 8, LAYOUTS["LBNHC"])
    with pytest.raises(Unsupported, match="lie in 48 runs, allowed is 1 to 47"):
        memory(caches, [list(caches)], BLOCKS, "peer", plan=_plan(1, 1, 8))


def _identity(tp: int, pp: int, kind: Any, *shared: int, heads: int = 8) -> dict[str, str]:
    """Return what an identity says of the distribution over ranks."""
    vllm, groups = _config(tp, pp, 1 if kind is MLAAttentionSpec else heads, kind)
    spread, _ = ranks(vllm.parallel_config, groups)
    plan = _cells((vllm, groups), *shared) if shared else None
    count = spread.shards if plan is None else plan.count
    return _distribution(vllm.parallel_config, groups, plan) | {"shards": str(count)}


def test_identities_of_engines_that_share() -> None:
    shapes = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]
    with_cells = [_identity(tp, pp, FullAttentionSpec, 4, 2) for tp, pp in shapes]
    assert all(one == with_cells[0] for one in with_cells)
    assert set(with_cells[0]) == {"cells", "groups", "shards"}
    assert _identity(1, 1, FullAttentionSpec, 2, 2) != with_cells[0]
    assert _identity(1, 1, FullAttentionSpec, 4, 2, heads=16) != with_cells[0]
    without = [tuple(_identity(tp, pp, FullAttentionSpec).items()) for tp, pp in shapes]
    assert len(set(without)) == len(shapes)


def test_replicated_kv_is_shared_without_an_option() -> None:
    for pp in (1, 2):
        mla = [_identity(tp, pp, MLAAttentionSpec) for tp in (1, 2, 4)]
        assert mla == mla[:1] * 3
        assert (mla[0]["shards"], mla[0]["pp"]) == (str(pp), str(pp))
    said = _config(2, 1, 1, FullAttentionSpec)[1]
    said.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(max_tp_shards=1)
    assert replicated(said)
    said.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=SimpleNamespace(max_tp_shards=None)))
    assert not replicated(said)
