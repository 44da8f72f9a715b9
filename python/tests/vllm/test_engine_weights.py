"""Real engines whose weights change in place, beside others with the old ones: their output is
always right.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm import engine as real
from tests.vllm.engine import PROMPTS
from tests.vllm.serving import Serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine
HALF = len(PROMPTS) // 2


@pytest.fixture
def serving(opt: Path, node: AgentProcess) -> Iterator[Callable[..., Serving]]:
    """Starts engines of the base weights, and ends them."""
    with contextlib.ExitStack() as stack:

        def start(*, model: Path = opt, connected: bool = True, **more: Any) -> Serving:
            made = Serving(model, node.folder if connected else None, **({"weights_version": "base"} | more))
            stack.callback(made.close)
            return made

        yield start


class Told:
    """The agent's work for the acting engine: only one acts at a time."""

    def __init__(self, agent: AgentProcess) -> None:
        self._agent = agent

    def says(self, engine: Serving, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
        """Return the output, and the number of blocks from the agent.

        Its saves are stored on return.
        """
        before = int(self._agent.status()["blocks_loaded"])
        said = engine.ask("says", prompts)
        return said, int(self._agent.status()["blocks_loaded"]) - before


def test_an_engine_updated_in_place_beside_others(
    serving: Callable[..., Serving], opt: Path, node: AgentProcess, reference: list[list[int]]
) -> None:
    """By vLLM's own reload and reset.

    One engine keeps the base weights; a fresh one starts from their files later. Each resets its
    own cache before it says anything, which counts as new weights where those have no name.
    """
    updated_files = real.write_model(opt.with_name("updated"), seed=6)
    updated, other = serving(), serving(weights_fixed=True)
    alone = serving(model=updated_files, connected=False)
    told = Told(node)
    first, second = PROMPTS[:HALF], PROMPTS[HALF:]
    new = alone.ask("says", PROMPTS)
    alone.close()
    assert all(a != b for a, b in zip(new, reference, strict=True)), "weights that change nothing show nothing"
    hits: dict[str, int] = {}

    def right(engine: Serving, who: str, prompts: list[list[int]], weights: list[list[int]], *, hit: bool) -> None:
        said, hits[who] = told.says(engine, prompts)
        wanted = [weights[PROMPTS.index(prompt)] for prompt in prompts]
        wrong = sum(a != b for a, b in zip(said, wanted, strict=True))
        assert not wrong, f"{who}: {wrong} of {len(prompts)} prompts are wrong"
        assert (hits[who] > 0) == hit, f"{who}: {hits[who]} blocks loaded"

    right(updated, "base, cold", first, reference, hit=False)
    right(other, "the other, warm", first, reference, hit=True)
    updated.ask("update", str(updated_files))
    right(updated, "updated, before any reset", first, new, hit=False)
    assert updated.ask("reset")
    right(other, "the other saves", second, reference, hit=False)
    right(updated, "updated, what the other saved", second, new, hit=False)
    right(updated, "updated, what it had saved before", first, new, hit=False)
    updated.ask("name", "v2")
    right(updated, "named, cold", PROMPTS, new, hit=False)
    right(updated, "named, its own blocks", PROMPTS, new, hit=True)
    right(other, "the other beside the updated", PROMPTS, reference, hit=True)
    node.kill()
    node.start()
    right(other, "the other at a new agent", PROMPTS, reference, hit=real.keeps_its_pool())
    right(updated, "updated at a new agent", PROMPTS, new, hit=real.keeps_its_pool())
    right(updated, "updated, its own at a new agent", PROMPTS, new, hit=True)
    fresh = serving()
    right(fresh, "a fresh replica", PROMPTS, reference, hit=True)
    assert other.ask("reset")  # a plain one
    right(other, "the other, forgotten", first, reference, hit=False)
    right(fresh, "the replica after the plain reset", first, reference, hit=True)
    right(updated, "updated beside the plain reset", PROMPTS, new, hit=True)
    fresh.ask("update", str(updated_files))
    right(fresh, "the replica updated, unnamed", PROMPTS, new, hit=False)
    fresh.ask("name", "v2")
    right(fresh, "the replica of that name", PROMPTS, new, hit=True)
    print("blocks loaded:", "; ".join(f"{who} {blocks}" for who, blocks in hits.items()))
