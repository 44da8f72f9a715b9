"""Which KV cache specifications are served, as groups of which windows, and what states require."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvagent.vllm.geometry import Unsupported, fails_by_block, geometry, replicated
from kvagent.vllm.guests.states import check_states
from kvagent.vllm.guests.sync import asynchronous_only
from kvagent.vllm.options import LAZY, OptionError, Options


class FullAttentionSpec:
    block_size = 32

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(FullAttentionSpec):
    block_size = 16
    sliding_window = 100


class SlidingWindowMLASpec(SlidingWindowSpec):
    max_tp_shards = 1


class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size = 64


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class RSWASpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    mamba_cache_mode = "align"
    num_speculative_blocks = 0


class UniformTypeKVCacheSpecs:
    """A group whose layers differ, as workers see it."""

    def __init__(self, *specs: Any) -> None:
        self.kv_cache_specs = {f"layer {i}": spec for i, spec in enumerate(specs)}
        self.block_size = specs[0].block_size


def _config(*specs: Any, **more: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a"], **more) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=9, needs_kv_cache_zeroing=False, kv_tp_replicas=1)


def test_groups_of_other_kinds() -> None:
    kinds = (SinkFullAttentionSpec(), SlidingWindowMLASpec(), ChunkedLocalAttentionSpec(), MambaSpec())
    found = geometry(_config(*kinds), 16)
    assert [(g.block_tokens, g.window) for g in found.groups] == [(32, 0), (16, 100), (32, (1 << 31) + 64), (32, 2)]
    assert found.states == {3}
    assert not geometry(_config(FullAttentionSpec(), SlidingWindowSpec()), 16).states


def test_whether_failures_are_told_block_by_block() -> None:
    assert fails_by_block(_config(FullAttentionSpec()))
    assert fails_by_block(_config(UniformTypeKVCacheSpecs(MLAAttentionSpec(), MLAAttentionSpec(head_size=4))))
    assert not fails_by_block(_config(FullAttentionSpec(), FullAttentionSpec()))
    for spec in (SlidingWindowSpec(), ChunkedLocalAttentionSpec(), MambaSpec()):
        assert not fails_by_block(_config(spec))


def test_more_groups_than_the_agent_takes_are_not_supported() -> None:
    assert len(geometry(_config(*[FullAttentionSpec()] * 16), 16).groups) == 16
    with pytest.raises(Unsupported, match=r"^the model has 17 KV cache groups, allowed is 1 to 16$"):
        geometry(_config(*[FullAttentionSpec()] * 17), 16)


def test_a_group_of_several_specifications_is_that_of_its_first() -> None:
    """The scheduler has the first one alone."""
    mla, indexer = MLAAttentionSpec(), MLAAttentionSpec(head_size=4)
    worker, scheduler = _config(UniformTypeKVCacheSpecs(mla, indexer)), _config(mla)
    assert geometry(worker, 16) == geometry(scheduler, 16)
    assert replicated(worker)
    assert asynchronous_only(worker) == asynchronous_only(scheduler) == ""
    windows = SlidingWindowSpec(), SlidingWindowSpec(head_size=4)
    assert geometry(_config(UniformTypeKVCacheSpecs(*windows)), 16).groups[0].window == 100
    for other in (FullAttentionSpec(), MLAAttentionSpec(block_size=64)):
        with pytest.raises(Unsupported, match=r"group 0 has layers of MLAAttentionSpec and .* that differ in window"):
            geometry(_config(UniformTypeKVCacheSpecs(mla, other)), 16)
    with pytest.raises(Unsupported, match="is of RSWASpec"):
        geometry(_config(UniformTypeKVCacheSpecs(FullAttentionSpec(), RSWASpec())), 16)


@pytest.mark.parametrize(
    ("spec", "fields", "said"),
    [
        (MambaSpec, {"mamba_cache_mode": "none"}, "mamba_cache_mode none, allowed is align.* prefix caching"),
        (MambaSpec, {"num_speculative_blocks": 2}, "2 blocks of states for draft tokens, allowed are 0"),
        (FullAttentionSpec, {"non_causal": True}, "later tokens"),
        (SlidingWindowMLASpec, {"bounded_replay": True}, "bounded_replay"),
    ],
)
def test_blocks_that_hashes_do_not_cover_are_refused(spec: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Unsupported, match=f"KV cache group 0 .*{said}"):
        geometry(_config(spec(**fields)), 16)


@pytest.mark.parametrize("field", [{"enable_kv_transfer": False}, {"host_resident": True}])
def test_a_group_that_vllm_keeps_from_connectors_is_refused(field: dict[str, bool]) -> None:
    with pytest.raises(Unsupported, match="keeps from connectors"):
        geometry(_config(FullAttentionSpec(), **field), 16)


def _limits(**limits: Any) -> Any:
    scheduler = {"max_num_batched_tokens": 64, "max_num_scheduled_tokens": None, "long_prefill_token_threshold": 0}
    cache = {"use_replayssm": limits.pop("use_replayssm", False)}
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**scheduler | limits), cache_config=SimpleNamespace(**cache)
    )


def test_a_step_has_room_for_a_block_of_states() -> None:
    states = geometry(_config(FullAttentionSpec(), MambaSpec()), 32)
    plain = geometry(_config(FullAttentionSpec()), 32)
    check_states(_limits(max_num_batched_tokens=32), states, Options())
    for name, argument in (
        ("max_num_batched_tokens", "--max-num-batched-tokens"),
        ("max_num_scheduled_tokens", "--max-num-batched-tokens"),
        ("long_prefill_token_threshold", "--long-prefill-token-threshold"),
    ):
        with pytest.raises(Unsupported, match=f"{name} 31, allowed is at least 32.* start vLLM with {argument} 32"):
            check_states(_limits(**{name: 31}), states, Options())
        check_states(_limits(**{name: 31}), plain, Options())


def test_what_states_exclude() -> None:
    states = geometry(_config(FullAttentionSpec(), MambaSpec()), 32)
    with pytest.raises(Unsupported, match="states alone"):
        check_states(_limits(), geometry(_config(MambaSpec()), 32), Options())
    with pytest.raises(Unsupported, match="use_replayssm"):
        check_states(_limits(use_replayssm=True), states, Options())
    with pytest.raises(OptionError, match="offload: lazy, allowed is eager"):
        check_states(_limits(), states, Options(offload=LAZY))
