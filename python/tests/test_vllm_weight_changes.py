"""The weights generation: how it is chosen, named and changed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvagent.vllm import weight_changes as generations
from kvagent.vllm.options import OptionError, Options, parse
from kvagent.vllm.weight_changes import (
    LOADED,
    MAX_VERSION_BYTES,
    NAMED,
    PAIR,
    PRIVATE,
    Generations,
    initial_generation,
    unobserved_changes,
    with_generation,
)


def config(instance: str = "1", engine: str = "e", **more: Any) -> Any:
    parallel = SimpleNamespace(
        worker_extension_cls="", distributed_executor_backend=None, worker_cls="auto", enable_elastic_ep=False
    )
    transfer = SimpleNamespace(engine_id=engine)
    parts = {"instance_id": instance, "kv_transfer_config": transfer, "parallel_config": parallel}
    return SimpleNamespace(**({"weight_transfer_config": None} | parts | more))


def test_what_names_a_version_is_checked() -> None:
    assert parse({"weights_version": "step-12_a.b+c=d:e/f@g"}).weights_version
    assert parse({"weights_version": "v" * MAX_VERSION_BYTES})
    for given, said in (
        ({"weights_version": "v 1"}, "weights_version: 'v 1', allowed is 1 to 128 letters"),
        ({"weights_version": "v1\n"}, "weights_version"),
        ({"weights_version": "ä"}, "weights_version"),
        ({"weights_version": "v" * (MAX_VERSION_BYTES + 1)}, "allowed is 1 to 128 letters"),
        ({"weights_fixed": "yes"}, "weights_fixed: 'yes', allowed is true or false"),
    ):
        with pytest.raises(OptionError, match=said):
            parse(given)


def test_an_engine_begins_with_what_it_loaded_or_with_a_name_or_alone() -> None:
    assert initial_generation(config(), "", []) == LOADED
    assert initial_generation(config(), "7", ["why"]) == NAMED + "7"
    alone = initial_generation(config(), "", ["why"])
    assert alone.startswith(PRIVATE)
    assert len(alone) == len(PRIVATE) + 32
    assert initial_generation(config(), "", ["other"]) == alone, (
        "processes of one engine, which see the same configuration"
    )
    assert (
        len({alone, initial_generation(config("2"), "", ["why"]), initial_generation(config("1", "f"), "", ["why"])})
        == 3
    )


def test_the_pair_is_in_the_identity() -> None:
    pairs = (("dtype", "d"), (PAIR, LOADED), ("model", "m"), ("tenant", ""))
    assert dict(with_generation(pairs, "named:7"))[PAIR] == "named:7"
    assert with_generation(pairs, LOADED) == pairs


def test_how_weights_can_change_unobserved() -> None:
    assert not list(unobserved_changes(config()))

    def why(**more: Any) -> str:
        (found,) = unobserved_changes(config(**more))
        return found

    def parallel(
        extension: str = "",
        backend: Any = None,
        worker: str = "vllm.v1.worker.gpu_worker.Worker",
        elastic: bool = False,
    ) -> Any:
        return SimpleNamespace(
            worker_extension_cls=extension, distributed_executor_backend=backend, worker_cls=worker,
            enable_elastic_ep=elastic,
        )  # fmt: skip

    class Own:
        """An executor of the user's."""

    assert "weight_transfer_config" in why(weight_transfer_config=object())
    assert "worker_extension_cls is a.B" in why(parallel_config=parallel("a.B"))
    assert "worker_cls is a.Own" in why(parallel_config=parallel(worker="a.Own"))
    assert "enable_elastic_ep" in why(parallel_config=parallel(elastic=True))
    assert "external_launcher" in why(parallel_config=parallel(backend="external_launcher"))
    assert "Own" in why(parallel_config=parallel(backend=Own))
    for backend in ("mp", "uni", "ray"):
        assert not list(unobserved_changes(config(parallel_config=parallel(backend=backend))))


def test_a_reset_is_of_new_weights_unless_the_user_says_otherwise() -> None:
    generations = Generations(LOADED, Options())
    seen = [generations.now]
    for _ in range(2):
        assert generations.after_reset()
        assert generations.now.startswith(PRIVATE)
        seen.append(generations.now)
    assert (len(set(seen)), generations.serial) == (3, 3)
    assert Generations(NAMED + "v1", Options()).after_reset(), "what it started with says nothing of the next weights"
    fixed = Generations(LOADED, Options(weights_fixed=True))
    assert not fixed.after_reset()
    assert fixed.now == LOADED


def test_what_was_said_ends_with_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    generations = Generations(LOADED, Options())
    assert generations.after_call("update_weights")
    assert generations.now.startswith(PRIVATE)
    assert generations.after_name("v1")
    assert not generations.after_name("v1")
    assert generations.now == NAMED + "v1"
    assert generations.after_call("update_weights")
    assert generations.now.startswith(PRIVATE)
    before = generations.now
    assert not generations.after_name("v 2")
    assert "allowed is 1 to 128 letters" in caplog.text
    assert generations.now == before
    assert generations.after_name("v1")
    assert generations.serial == 5, "a name that came back is another change"
    fixed = Generations(LOADED, Options(weights_fixed=True))
    caplog.clear()
    for _ in range(2):
        assert not fixed.after_call("reload_weights")
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "kvagent: weights: reload_weights is called though weights_fixed is true: are they still the same?"
    ]


def test_which_resets_of_vllms_own_cache_count() -> None:
    def counts(now: str = LOADED, *, fixed: bool = False, **how: bool) -> bool:
        return Generations(now, Options(weights_fixed=fixed), **how).counts_resets

    assert not counts()
    assert counts(unobserved=True)
    assert counts(NAMED + "v1", unobserved=True), "another may have the name by then"
    assert counts(in_process=True)
    assert not counts(NAMED + "v1", in_process=True)
    assert not counts(in_process=True, unobserved=True, fixed=True)
    named = Generations(LOADED, Options(), in_process=True)
    named.after_name("v1")
    assert not named.counts_resets
    named.after_call("update_weights")
    assert named.counts_resets, "the name ended with the call"


class _Core:
    """The calls of vLLM's engine core."""

    def __init__(self, connector: Any) -> None:
        self.collective_rpc("warm_up")  # before there is a scheduler
        self.scheduler = SimpleNamespace(connector=connector)
        self.version = ""

    def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return [method, timeout, args]

    def set_weight_version(self, weight_version: str) -> None:
        self.version = weight_version

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return reset_running_requests or reset_connector


class _Connector:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def before_reset(self) -> None:
        self.heard.append("reset")

    def before_weights_call(self, call: str) -> None:
        self.heard.append(call)

    def weights_named(self, version: str) -> None:
        self.heard.append(f"version {version}")


def compute_weight_checksums() -> None:
    """Code of the caller's, with the name of a harmless method of vLLM's."""


def test_calls_that_may_change_weights_are_heard() -> None:
    core_class = type("Core", (_Core,), {name: call for name, call in vars(_Core).items() if not name.startswith("__")})
    generations.observe(core_class)
    generations.observe(core_class)
    own = _Connector()
    core = core_class(own)
    assert core.collective_rpc("update_weights", 3.0, (1,)) == ["update_weights", 3.0, (1,)]
    core.collective_rpc(method="reload_weights")
    core.collective_rpc(test_calls_that_may_change_weights_are_heard)
    core.collective_rpc("compute_weight_checksums")
    core.collective_rpc(compute_weight_checksums)
    core.set_weight_version("v1")
    core.set_weight_version(weight_version="v2")
    assert core.version == "v2"
    assert own.heard == [
        "update_weights", "reload_weights", "test_calls_that_may_change_weights_are_heard", "compute_weight_checksums",
        "version v1", "version v2",
    ]  # fmt: skip
    own.heard.clear()
    assert core.reset_prefix_cache(reset_connector=True)
    assert own.heard == ["reset"]
    child = _Connector()
    several = SimpleNamespace(_connectors=[SimpleNamespace(), child])
    core_class(several).collective_rpc("update_weights")
    assert child.heard == ["update_weights"]
    core_class(None).collective_rpc("update_weights")
