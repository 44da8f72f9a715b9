"""Tests with the real vLLM: they are collected only in an environment that has it (scripts/test-vllm)."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.agent import AgentProcess

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob.append("test_*.py")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine: needs vLLM's CPU platform")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder as far as a scheduler needs one."""
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
    """Makes worlds and closes them."""
    from tests.vllm.world import World

    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(model, str(agent.folder), **options))
        return made[-1]

    yield make
    for world in made:
        world.close()
