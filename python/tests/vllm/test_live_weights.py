"""Engines in the calling program's process: it can write to the model without a call of vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvagent.vllm.internals import constructing
from tests.vllm import engine as real
from tests.vllm.engine import PROMPTS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent import AgentProcess


def test_the_core_that_is_being_made_is_found() -> None:
    class Core:
        def __init__(self) -> None:
            self.found = (lambda: constructing(lambda one: isinstance(one, Core)))()

    core = Core()
    assert core.found is core
    assert constructing(lambda one: isinstance(one, Core)) is None


@pytest.mark.engine
def test_a_program_that_writes_to_its_engines_model(opt: Path, node: AgentProcess, reference: list[list[int]]) -> None:
    """It shares until it resets vLLM's cache. Afterwards it loads no old blocks, and its new ones
    are not found, until they get a name: that says that they stay the same.
    """
    llm = real.make_engine(opt, str(node.folder), options={})
    core = llm.llm_engine.engine_core.engine_core

    def loaded(prompts: list[list[int]], expected: list[list[int]]) -> int:
        """Return how many blocks came from the agent after a reset of vLLM's own cache alone."""
        before = int(node.status()["blocks_loaded"])
        assert llm.reset_prefix_cache()
        assert real.generate(llm, prompts) == expected
        real.settle(llm)
        return int(node.status()["blocks_loaded"]) - before

    try:
        side, _ = real.sides(llm)
        assert real.generate(llm, PROMPTS) == reference
        assert not side.generations.now, "an engine without resets shares"
        real.settle(llm)
        core.model_executor.driver_worker.worker.get_model().model.decoder.layers[0].fc2.weight.data.neg_()
        assert llm.reset_prefix_cache()
        said = real.generate(llm, PROMPTS)
        assert all(a != b for a, b in zip(said, reference, strict=True)), "a write that changes nothing shows nothing"
        assert side.generations.now.startswith("private:")
        assert node.status()["blocks_loaded"] == 0, "blocks of the old weights were loaded"
        real.settle(llm)
        assert loaded(PROMPTS, said) == 0, "each reset may follow another write"
        llm.update_weight_version("negated")
        assert loaded(PROMPTS, said) == 0
        assert loaded(PROMPTS, said) > 0, "its own blocks of the named weights"
        assert side.generations.now == "named:negated"
    finally:
        core.shutdown()
