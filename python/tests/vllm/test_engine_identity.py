"""What counts of the arguments that a user gives, as vLLM resolves them; no engine starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs

from kvagent.vllm.geometry import Ranks
from kvagent.vllm.space import identity
from kvagent.vllm.weight_changes import UNSHARED
from tests.vllm import engine as real

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.every_version]


def pairs(model: Path, **more: Any) -> tuple[tuple[str, str], ...]:
    config = EngineArgs(**real.arguments(model, "/nowhere", **more)).create_engine_config()
    found = identity(config, SimpleNamespace(kv_cache_groups=[]), "", Ranks(1, 1), vllm.__version__)
    assert UNSHARED not in dict(found)
    return found


@pytest.mark.parametrize(
    "more",
    [
        {"served_model_name": ["a", "b"]}, {"max_num_seqs": 7}, {"max_num_batched_tokens": 4096},
        {"gpu_memory_utilization": 0.5}, {"kv_cache_memory_bytes": 32 << 20}, {"num_gpu_blocks_override": 64},
        {"enforce_eager": False}, {"compilation_config": {"cudagraph_mode": "NONE"}, "enforce_eager": False},
        {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}, "enforce_eager": False}, {"load_format": "auto"},
        {"load_format": "hf"}, {"seed": 7}, {"disable_log_stats": False}, {"generation_config": "vllm"},
        {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}},
        {"scheduling_policy": "priority"}, {"performance_mode": "throughput"}, {"max_logprobs": 3},
        {"kv_role": "kv_producer"},
        {"options": {"weights_version": "1", "load_mode": "async"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_must_not_split_a_cache(opt: Path, more: dict[str, Any]) -> None:
    if not set(more) - {"options", "kv_role"} <= set(EngineArgs.__dataclass_fields__):
        pytest.skip(f"SKIPPED: this vLLM has no {', '.join(more)}")
    plain, found = pairs(opt), pairs(opt, **more)
    assert found == plain, sorted({*found} ^ {*plain})


def test_what_changes_bytes_makes_another_space(opt: Path) -> None:
    made: list[dict[str, Any]] = [
        {}, {"max_model_len": 512}, {"dtype": "bfloat16"}, {"enable_lora": True},
        {"hf_overrides": {"rope_theta": np.float32(1e6)}}, {"hf_overrides": {"rope_theta": np.float32(1e4)}},
        {"load_format": "dummy"}, {"additional_config": {"bits": 4}}, {"trust_remote_code": True},
    ]  # fmt: skip
    found = [pairs(opt, **more) for more in made]
    assert [more for more, one in zip(made, found, strict=True) if found.count(one) > 1] == []
