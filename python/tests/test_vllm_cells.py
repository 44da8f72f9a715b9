"""Cells: which bytes of which layers and heads they hold, for engines of all shapes and layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvagent.vllm.geometry import Unsupported, ranks, replicated
from kvagent.vllm.guests.cells import cell_extents, distribution
from kvagent.vllm.options import OptionError
from kvagent.vllm.space import _distribution
from kvagent.vllm.worker.memory import memory
from tests.cells import (
    BLOCKS,
    CONTENT,
    LAYERS,
    LAYOUTS,
    SHAPES,
    STATES,
    Engine,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    caches_of,
    cells_of,
    config_of,
    plan_of,
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [8, 4, 2, 1])
def test_every_byte_arrives_in_every_other_shape(layout: str, heads: int) -> None:
    saved = {}
    for shape in SHAPES:
        saver = Engine(*shape, heads, layout)
        saver.fill()
        saved[shape] = saver.save(2)
        assert sorted(saved[shape]) == list(range(saver.plan.count))
    for shape in SHAPES:
        for stored in saved.values():
            loader = Engine(*shape, heads, layout)
            loader.load(0, stored)
            loader.check({0: 2})


def test_cells_are_the_same_for_all_shapes() -> None:
    assert {plan_of(tp, pp, 8).text for tp, pp in SHAPES} == {"layers 0 2 4, 8 heads in 4"}
    assert [cell.shard for cell in plan_of(2, 2, 8).of_rank(3)] == [6, 7]
    assert [cell.shard for cell in plan_of(1, 1, 8).of_rank(0)] == list(range(8))
    assert [[cell.shard for cell in plan_of(4, 1, 2).of_rank(rank)] for rank in range(4)] == [[0, 2]] * 2 + [[1, 3]] * 2
    one = plan_of(2, 1, 1)
    assert (one.count, one.of_rank(0)) == (2, one.of_rank(1))
    uneven = cells_of(config_of(1, 2, 4, layers=7), 1, 2)
    assert uneven is not None
    assert (uneven.bounds, uneven.stages) == ((0, 4, 7), (0, 4, 7))
    assert cells_of(config_of(2, 2, 8), 0, 0) is None


def test_replicated_heads_are_one_range_for_any_size() -> None:
    plans = [cells_of(config_of(tp, 1, 1, MLAAttentionSpec), 4, 2) for tp in (1, 2, 4)]
    assert {plan.text for plan in plans if plan is not None} == {"layers 0 2 4, 1 heads in 1"}
    assert [plan.of_rank(3) == plans[0].of_rank(0) for plan in plans[2:] if plan and plans[0]] == [True]


@pytest.mark.parametrize(
    ("config", "shared", "said"),
    [
        (config_of(1, 1, 6), (4, 1), "4, and 6 KV heads"),
        (config_of(1, 1, 8, MambaSpec), (2, 1), "is of MambaSpec"),
        (config_of(1, 1, 8, page_size_padded=512), (2, 1), "page_size_padded 512"),
        (config_of(1, 1, 8, num_head_slots=16), (2, 1), "num_head_slots 16"),
        (config_of(1, 1, 8, state_content_bytes=9), (2, 1), "state_content_bytes 9"),
        (config_of(1, 1, 8, kv_quant_mode=SimpleNamespace(name="NVFP4")), (2, 1), "format NVFP4"),
    ],
)
def test_what_cannot_be_split_is_refused(config: Any, shared: tuple[int, int], said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        cells_of(config, *shared)


@pytest.mark.parametrize(
    ("config", "shared", "said"),
    [
        (config_of(2, 1, 8), (3, 1), "share_tp: 3, allowed is a multiple of this engine's own size, 2"),
        (config_of(1, 2, 8), (1, 3), "share_pp: 3, allowed is a multiple of this engine's own size, 2"),
        (config_of(1, 2, 8, layers=9), (1, 4), "and this engine's at 5 too"),
        (config_of(1, 1, 64, layers=64), (64, 64), "make 4096 cells, allowed is 1 to 256"),
        (config_of(1, 1, 8), (1, 8), "8 pipeline stages of 4 layers"),
    ],
)
def test_sizes_that_do_not_fit_the_engine_are_a_mistake_in_the_options(
    config: Any, shared: tuple[int, int], said: str
) -> None:
    """They end the start; a model that cannot be split does so only on request."""
    with pytest.raises(OptionError, match=said):
        cells_of(config, *shared)


def test_layers_with_other_numbers_of_heads_are_refused() -> None:
    vllm, groups = config_of(2, 1, 8)
    groups.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(num_kv_heads=8)
    with pytest.raises(Unsupported, match="8 KV heads on each rank, allowed is 4"):
        cells_of((vllm, groups), 2, 1)
    vllm, groups = config_of(2, 1, 8)
    vllm.model_config.hf_text_config.num_global_key_value_heads = 2
    with pytest.raises(Unsupported, match="different numbers of KV heads"):
        cells_of((vllm, groups), 2, 1)


def test_stages_of_other_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with one stage does not know the sizes that another one's stages were given."""
    plain = cells_of(config_of(1, 1, 8, layers=8), 1, 2)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,5")
    for shared in ((1, 2), (1, 4), (2, 0)):
        with pytest.raises(OptionError, match=r"this engine's at 3 too \(VLLM_PP_LAYER_PARTITION 3,5\)"):
            cells_of(config_of(1, 2, 8, layers=8), *shared)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,6")
    assert cells_of(config_of(1, 2, 8, layers=8), 0, 4)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "4,4")
    same = cells_of(config_of(1, 2, 8, layers=8), 1, 2)
    assert plain
    assert same
    assert same.text == plain.text


def _speculative(method: str, heads: int, tp: int) -> Any:
    draft = SimpleNamespace(get_total_num_kv_heads=lambda: heads)
    return SimpleNamespace(method=method, draft_model_config=draft, draft_tensor_parallel_size=tp)


def test_layers_with_one_head_on_each_rank_may_have_other_heads() -> None:
    """With TP 8, ranks 0 and 1 hold head 0 of 4, and heads 0 and 1 of a draft model with 8."""
    for draft_heads, draft_tp, said in (
        (8, 8, "the draft model has 8 KV heads, allowed is 4"),
        (4, 1, "draft_tensor_parallel_size 1, allowed is 8"),
    ):
        vllm, groups = config_of(8, 1, 4)
        groups.kv_cache_groups *= 2  # that of the draft model is like the model's
        vllm.speculative_config = _speculative("draft_model", draft_heads, draft_tp)
        with pytest.raises(Unsupported, match=said):
            cells_of((vllm, groups), 8, 1)
        vllm.speculative_config.method = "ngram"
        assert cells_of((vllm, groups), 8, 1) == cells_of(config_of(8, 1, 4), 8, 1)
        vllm.speculative_config = _speculative("draft_model", 4, 8)
        assert cells_of((vllm, groups), 8, 1) == cells_of(config_of(8, 1, 4), 8, 1)
        replicated_too = config_of(8, 1, 1, MLAAttentionSpec)
        replicated_too[0].speculative_config = _speculative("draft_model", draft_heads, draft_tp)
        assert cells_of(replicated_too, 8, 1) == cells_of(config_of(8, 1, 1, MLAAttentionSpec), 8, 1)


def test_blocks_with_other_heads_are_refused() -> None:
    vllm, groups = config_of(8, 1, 4)
    sizes = [SimpleNamespace(n_heads_in_group=n) for n in (8, None, 8)]
    vllm.model_config.hf_text_config.block_configs = [SimpleNamespace(attention=one) for one in sizes]
    assert cells_of((vllm, groups), 8, 1)
    sizes[2].n_heads_in_group = 4
    with pytest.raises(Unsupported, match=r"n_heads_in_group of the block_configs: \[4, 8\]"):
        cells_of((vllm, groups), 8, 1)
    vllm, groups = config_of(8, 1, 4)
    vllm.model_config.model_arch_config = SimpleNamespace(
        total_num_kv_heads=4, per_layer_overrides=[{}, {"head_size": 64}]
    )
    assert cells_of((vllm, groups), 8, 1)
    vllm.model_config.model_arch_config.per_layer_overrides[1]["total_num_kv_heads"] = 2
    with pytest.raises(Unsupported, match=r"per_layer_overrides: \[2, 4\]"):
        cells_of((vllm, groups), 8, 1)


def test_memory_that_cannot_be_split_is_refused() -> None:
    plan = plan_of(1, 1, 8)
    caches = caches_of(range(LAYERS), 8, LAYOUTS["LBNHC"])
    for change, said in (
        ({"model.layers.x.attn": None}, "has 0 numbers"),
        ({"model.layers.1.attn.2": None}, "has 2 numbers"),
        ({"model.layers.4.attn": None}, "is not among those of this pipeline stage, 0 to 3"),
    ):
        with pytest.raises(Unsupported, match=said):
            memory(caches, [[*caches, *change]], BLOCKS, extents_of=partial(cell_extents, plan=plan, rank=0))
    flat = {name: replace(one, shape=(BLOCKS, 8 * STATES, CONTENT)) for name, one in caches.items()}
    with pytest.raises(Unsupported, match="its heads cannot be split"):
        memory(flat, [list(flat)], BLOCKS, extents_of=partial(cell_extents, plan=plan, rank=0))
    with pytest.raises(Unsupported, match="group 1 has no layer among 2 to 3"):
        memory(
            caches,
            [list(caches), list(caches)[:2]],
            BLOCKS,
            extents_of=partial(cell_extents, plan=plan, rank=0),
        )


def test_a_rank_with_too_many_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvagent.vllm.guests.cells.MAX_SEGMENTS", 4 * LAYERS * STATES - 1)
    caches = caches_of(range(LAYERS), 8, LAYOUTS["LBNHC"])
    with pytest.raises(Unsupported, match="lie in 48 runs, allowed is 1 to 47"):
        memory(caches, [list(caches)], BLOCKS, extents_of=partial(cell_extents, plan=plan_of(1, 1, 8), rank=0))


def _identity(tp: int, pp: int, kind: Any, *shared: int, heads: int = 8) -> dict[str, str]:
    """Return what an identity says of the distribution over ranks."""
    vllm, groups = config_of(tp, pp, 1 if kind is MLAAttentionSpec else heads, kind)
    spread, _ = ranks(vllm.parallel_config, groups)
    plan = cells_of((vllm, groups), *shared) if shared else None
    count = spread.shards if plan is None else plan.count
    pairs = _distribution(vllm.parallel_config, groups) if plan is None else distribution(plan, groups)
    return pairs | {"shards": str(count)}


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
    said = config_of(2, 1, 1, FullAttentionSpec)[1]
    said.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(max_tp_shards=1)
    assert replicated(said)
    said.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=SimpleNamespace(max_tp_shards=None)))
    assert not replicated(said)
