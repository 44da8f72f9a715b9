"""What counts in vLLM's real configuration: everything but what the table of harmless names."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import vllm
from vllm.config import (
    KVEventsConfig,
    LoRAConfig,
    MultiModalConfig,
    ObservabilityConfig,
    ReasoningConfig,
    VllmConfig,
)  # fmt: skip

from kvagent.vllm import space as resolved
from kvagent.vllm.geometry import Ranks
from kvagent.vllm.space import as_worker, identity, used_backends, with_resolved
from kvagent.vllm.weight_changes import PAIR, PRIVATE, UNSHARED, with_generation
from tests.vllm.setting import BLOCK, kv_cache_config, vllm_config
from tests.vllm.test_backends import PROMPT, joined_anew

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.world import World

Pairs = tuple[tuple[str, str], ...]
COUNTED = Path(__file__).with_name("counted.txt")
"""The fields of vLLM's configuration that somebody has looked at and that count, by class."""


@pytest.fixture
def config(model: Path) -> VllmConfig:
    transfer = {"kv_connector": "KVAgentConnector", "kv_role": "kv_both", "kv_connector_module_path": "kvagent.vllm"}
    return vllm_config(model, transfer, layout="LBNHC", asynchronous=False, max_batched=256, ranks=1, drafts=0)


def pairs(config: VllmConfig) -> Pairs:
    return identity(config, kv_cache_config(config, 64, 0, 1), "", Ranks(1, 1), vllm.__version__)


def changed(config: VllmConfig, path: str, value: Any, **more: Any) -> Pairs:
    """Return the identity with another value at a path of the configuration."""
    other = copy.deepcopy(config)
    for where, one in {path: value, **more}.items():
        part, _, name = where.rpartition(".")
        object.__setattr__(at(other, part), name, one)
    return pairs(other)


def parts(config: Any) -> dict[str, Any]:
    """Return the configuration and all that it is made of, by path."""
    found, left = {"": config}, [""]
    while left:
        path = left.pop()
        for field in dataclasses.fields(found[path]):
            value = getattr(found[path], field.name, None)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                found[f"{path}.{field.name}".strip(".")] = value
                left.append(f"{path}.{field.name}".strip("."))
    return found


def at(config: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        config = getattr(config, name)
    return config


def test_an_unknown_field_of_each_part_makes_another_space(config: VllmConfig) -> None:
    """As a new version of vLLM may have one."""
    spaces = [pairs(config)]
    assert spaces == [pairs(copy.deepcopy(config))]
    found = [path for path in parts(config) if "hf_text_config" not in path]  # which is hf_config
    assert len(found) > 20
    spaces += [changed(config, f"{path}.of_tomorrow", value) for path in found for value in (1, 2)]
    assert len(set(spaces)) == 1 + 2 * len(found), "one of them does not count"
    assert not any(UNSHARED in dict(one) for one in spaces)


def test_an_unknown_type_in_each_part_shares_with_no_other(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    class Opaque:
        __slots__ = ("hidden",)

    for path in parts(config):
        caplog.clear()
        found = changed(config, f"{path}.of_tomorrow", [Opaque()])
        assert dict(found)[UNSHARED].startswith(PRIVATE), path
        assert f"{path}.of_tomorrow[0] is of".lstrip(".") in caplog.text
        other = changed(config, f"{path}.of_tomorrow", [Opaque()], instance_id="another")
        assert found != other, "two engines share what neither knows"
        for generation in ("", "named:1"):
            assert dict(with_generation(found, generation))[PAIR] == dict(found)[UNSHARED]


def test_a_field_of_a_class_that_has_one_more(config: VllmConfig) -> None:
    """As of a plugin that replaces a part."""
    own = type(config.scheduler_config)
    kind = dataclasses.make_dataclass("SchedulerConfig", [("of_tomorrow", int, 1)], bases=(own,))
    found = {pairs(config)}
    for value in (1, 2):
        new = copy.copy(config.scheduler_config)
        object.__setattr__(new, "__class__", kind)
        object.__setattr__(new, "of_tomorrow", value)
        found.add(changed(config, "scheduler_config", new))
    assert len(found) == 3


MODEL, CACHE, PARALLEL, COMPILATION = "model_config", "cache_config", "parallel_config", "compilation_config"
COUNTS: list[tuple[str, Any]] = [
    (f"{MODEL}.max_model_len", 2048), (f"{MODEL}.dtype", "float16"), (f"{MODEL}.hf_config.rope_theta", 1e6),
    *((f"{MODEL}.hf_overrides", {"rope_theta": value}) for value in (
        1e6, np.float32(1e6), np.float32(1e4), np.float64(1e4), np.array([1e4]), np.array([1e4, 1]),
        {"deep": [{"er": np.int8(1)}]}, {"deep": [{"er": np.int8(2)}]},
    )),
    (f"{MODEL}.quantization", "fp8"), (f"{MODEL}.quantization_config", {"bits": 4}),
    (f"{MODEL}.model_class_overrides", {"A": "module:B"}),
    (f"{MODEL}.multimodal_config", MultiModalConfig()),
    (f"{MODEL}.multimodal_config", MultiModalConfig(video_pruning_rate=0.5)),
    (f"{CACHE}.cache_dtype", "fp8"), (f"{CACHE}.kv_cache_dtype_skip_layers", ["3"]),
    (f"{CACHE}.prefix_caching_hash_algo", "sha256_cbor"), (f"{CACHE}.kv_cache_layout", "BLHNC"),
    (f"{PARALLEL}.tensor_parallel_size", 2), (f"{PARALLEL}.pipeline_parallel_size", 2),
    (f"{COMPILATION}.inductor_passes", {"x": "someones.code"}), ("additional_config", {"plugin": {"bits": 4}}),
    ("lora_config", LoRAConfig(lora_dtype="bfloat16")),
]  # fmt: skip


def test_what_changes_bytes_makes_another_space(config: VllmConfig) -> None:
    spaces = [pairs(config), *(changed(config, path, value) for path, value in COUNTS)]
    assert len(set(spaces)) == len(spaces)
    assert not any(UNSHARED in dict(one) for one in spaces)


def test_two_lengths_of_a_llama_4_do_not_share(config: VllmConfig) -> None:
    """vLLM turns its attention temperature tuning on above 32,768 tokens."""
    config.model_config.hf_config.architectures = ["Llama4ForConditionalGeneration"]
    assert len({changed(config, "model_config.max_model_len", length) for length in (32_768, 40_000)}) == 2


@pytest.mark.parametrize("name", ["mm_encoder_fp8_scale_path", "of_tomorrow"])
def test_a_file_that_an_option_names_counts_by_content(config: VllmConfig, tmp_path: Path, name: str) -> None:
    scales = tmp_path / "scales.json"
    media = MultiModalConfig()
    object.__setattr__(media, name, str(scales))
    config.model_config.multimodal_config = media
    found = []
    for text in ("1", "2"):
        scales.write_text(text)
        found.append(pairs(config))
    assert len(set(found)) == 2
    moved = tmp_path / "elsewhere" / scales.name
    moved.parent.mkdir()
    object.__setattr__(media, name, str(scales.rename(moved)))
    assert pairs(config) == found[-1], "where it is says nothing"


def test_weights_quantised_as_a_variable_says(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "VLLM_HUMMING_ONLINE_QUANT_CONFIG" not in vllm.envs.environment_variables:
        pytest.skip("SKIPPED: this vLLM does not quantise online so")
    found, file = [pairs(config)], tmp_path / "quantisation.json"
    monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", str(file))
    for bits in ("int8", "int4"):
        file.write_text(f'{{"dtype": "{bits}"}}')
        found.append(pairs(config))
    monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"dtype": "int4"}')
    assert len(set(found)) == 3
    assert pairs(config) == found[-1], "where it stands says nothing"


HARMLESS: list[tuple[str, Any]] = [
    ("instance_id", "that of a restart"), ("kv_transfer_config.engine_id", "another"),
    (f"{MODEL}.served_model_name", ["a", "b"]), (f"{MODEL}.hf_token", "secret"), (f"{MODEL}.seed", 7),
    (f"{MODEL}.logits_processors", [object()]), (f"{MODEL}.enforce_eager", True),
    ("scheduler_config.max_num_seqs", 7), ("scheduler_config.max_num_batched_tokens", 4096),
    (f"{CACHE}.gpu_memory_utilization", 0.5), (f"{CACHE}.num_gpu_blocks", 7),
    (f"{CACHE}.kv_cache_memory_bytes", 1 << 30),
    ("observability_config", ObservabilityConfig(kv_cache_metrics=True)),
    ("kv_events_config", KVEventsConfig(enable_kv_cache_events=True)),
    ("structured_outputs_config.reasoning_parser", "qwen3"), ("reasoning_config", ReasoningConfig()),
    (f"{PARALLEL}.data_parallel_rank", 1), (f"{PARALLEL}.data_parallel_size", 2), (f"{PARALLEL}.rank", 1),
    (f"{PARALLEL}.data_parallel_master_port", 7),
    (f"{COMPILATION}.cudagraph_mode", None), (f"{COMPILATION}.cudagraph_capture_sizes", [1, 2]),
    (f"{COMPILATION}.static_forward_context", {"a layer": object()}),
    ("load_config.load_format", "safetensors"), ("load_config.model_loader_extra_config", {"num_threads": 4}),
    ("load_config.download_dir", "/elsewhere"),
]  # fmt: skip


def test_what_must_not_split_a_cache(config: VllmConfig, model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    plain = pairs(config)
    for path, value in HARMLESS:
        found = changed(config, path, value)
        assert found == plain, (path, sorted({*found} ^ {*plain}))


def test_pages_of_a_block_count(worlds: Any) -> None:
    """A worker's kernels may split a block, and then lay its pages out one after the other."""
    world: World = worlds()
    caches = {name: SimpleNamespace(shape=(64, 2)) for group in world.kv.kv_cache_groups for name in group.layer_names}
    whole = used_backends(world.config, world.kv, caches)
    for cache in caches.values():
        cache.shape = (64 * 4, 2)
    split = used_backends(world.config, world.kv, caches)
    assert "4 pages a block" in split
    assert with_resolved(pairs(world.config), split) != with_resolved(pairs(world.config), whole)


def test_a_scheduler_joins_workers_that_resolved_other_values(worlds: Any) -> None:
    """VLLM changes a worker's configuration after the scheduler got its own."""
    made: list[Pairs] = []

    def resolved(*config: Any) -> Pairs:
        found = dict(identity(*config)) | ({} if made else {"cache_config": "the worker's"})
        made.append(tuple(sorted(found.items())))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvagent.vllm.connector.identity", resolved)
        world: World = worlds(extra={"start_wait_ms": 100})
    worker, scheduler = made
    assert worker != scheduler
    world.add("short", [3] * 4, 2)
    world.run()
    joined_anew(world)
    weights = tuple({**dict(worker), "weights": "changed since"}.items())
    assert dict(as_worker(scheduler, weights)) == dict(worker), "which weights were loaded is not known"


def test_an_engine_with_a_value_of_an_unknown_type_shares_with_itself_alone(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opaque(*more: Any, **options: Any) -> VllmConfig:
        config = vllm_config(*more, **options)
        config.additional_config = {"of_tomorrow": object()}
        return config

    monkeypatch.setattr("tests.vllm.world.vllm_config", opaque)
    for engine in [worlds() for _ in range(2)]:
        loaded = []
        for name in ("cold", "warm"):
            engine.add(name, PROMPT, 4)
            engine.run()
            engine.settle()
            assert engine.forget()
            loaded.append(engine.side.counts.tokens_loaded)
        assert loaded == [0, 96 // BLOCK * BLOCK]


def classes(hint: Any) -> Iterator[Any]:
    if inspect.isclass(hint) and dataclasses.is_dataclass(hint):
        yield hint
    for one in typing.get_args(hint):
        yield from classes(one)


def fields_of(kind: Any, found: dict[Any, list[str]]) -> dict[Any, list[str]]:
    """Return the fields of a class of vLLM's configuration and of those that they are made of."""
    if kind not in found:
        found[kind] = [f"{kind.__name__}.{field.name}" for field in dataclasses.fields(kind)]
        for hint in typing.get_type_hints(kind).values():
            for one in classes(hint):
                fields_of(one, found)
    return found


def test_somebody_has_looked_at_every_field() -> None:
    """A new field counts until it is known to be harmless. Look at it: what changes bytes goes to
    counted.txt, what cannot goes to harmless.txt with its reason.
    """
    counted = {
        f"{kind}.{name}"
        for kind, _, names in (line.partition(":") for line in COUNTED.read_text().splitlines())
        for name in names.split()
    }
    fields = {name for names in fields_of(VllmConfig, {}).values() for name in names}
    assert len(fields) > 400
    assert not fields - counted - set(resolved.harmless()), "new fields of vLLM"
    assert not counted & set(resolved.harmless()), "both"
