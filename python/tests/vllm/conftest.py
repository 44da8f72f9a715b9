"""Tests with the real vLLM: they are collected only in an environment that has it
(scripts/test-vllm).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import constants
from tests.vllm import portions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.agent import AgentProcess
    from tests.holding import HoldingAgent
    from tests.vllm.tiered import TieredWorld

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob.append("test_*.py")
else:
    constants.allow()
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        from tests.vllm import interpreter

        interpreter.install()

pytest_addoption = portions.add_option


@pytest.hookimpl(trylast=True)  # of what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    portions.select(config, items)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine: needs vLLM's CPU platform")
    config.addinivalue_line("markers", "every_version: of the engine's tests, those for every vLLM")


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Capture the connector's warnings, which vLLM, once it has configured its logger, keeps from
    the root logger.
    """
    logger = logging.getLogger("vllm.kvagent")
    caplog.set_level(logging.WARNING, logger.name)
    kept = not logging.getLogger("vllm").propagate
    if kept:
        logger.addHandler(caplog.handler)
    yield
    if kept:
        logger.removeHandler(caplog.handler)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder, as far as a scheduler needs one."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"architectures": ["OPTForCausalLM"], "model_type": "opt", "max_position_embeddings": 32768, '
        '"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 64, "word_embed_proj_dim": 64, '
        '"ffn_dim": 128, "vocab_size": 512}'
    )
    return folder


@pytest.fixture
def worlds(model: Path, agent: AgentProcess) -> Iterator[Any]:
    """Creates worlds and closes them."""
    from tests.vllm.world import World

    made: list[World] = []

    def make(**options: Any) -> World:
        if options.get("stages", 1) > 1 and options.get("asynchronous") and version("vllm") < "0.33":
            pytest.skip("SKIPPED: on CPUs it has the first runner alone, which drops no output of a stage")
        made.append(World(model, str(agent.folder), **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def tiered(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TieredWorld]]:
    """Creates engines with vLLM's own offloading and closes them. All are on the same hardware."""
    from vllm.platforms.interface import Platform

    from tests.vllm.tiered import TieredWorld

    monkeypatch.setattr(Platform, "get_device_name", classmethod(lambda *_: "the test's"))

    made: list[TieredWorld] = []

    def make(tier: dict[str, Any], **options: Any) -> TieredWorld:
        made.append(TieredWorld(model, [dict(tier)], **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture(scope="session")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that engines run."""
    from tests.vllm import engine

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return engine.write_model(tmp_path_factory.mktemp("opt") / "model")


@pytest.fixture(scope="session")
def reference(opt: Path) -> list[list[int]]:
    """The engine's output without the connector."""
    from tests.vllm import engine

    llm = engine.make_engine(opt, None)
    said = engine.generate(llm, engine.PROMPTS)
    llm.llm_engine.engine_core.shutdown()
    assert len({tuple(s) for s in said}) == len(said), "outputs that do not depend on the prompt show nothing"
    return said


@pytest.fixture(scope="module")
def node() -> Iterator[AgentProcess]:
    """An agent for all tests of a module; it keeps its pool where possible."""
    from tests.agent import AgentProcess
    from tests.vllm import engine

    with (
        tempfile.TemporaryDirectory(prefix="kvagent-") as folder,
        tempfile.TemporaryDirectory(prefix="kvagent-", dir="/dev/shm") as memory,
    ):
        path = Path(folder) / "run"
        path.mkdir(mode=0o700)
        pool = ["--dram-path", str(Path(memory) / "pool")] if engine.keeps_its_pool() else []
        process = AgentProcess(path, *pool)
        yield process
        process.close()


@pytest.fixture(scope="module")
def holding() -> Iterator[HoldingAgent]:
    """An agent for all tests of a module, which can hold copies of loads."""
    from tests.holding import HoldingAgent

    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        path = Path(folder) / "run"
        path.mkdir(mode=0o700)
        process = HoldingAgent(path)
        yield process
        process.close()
