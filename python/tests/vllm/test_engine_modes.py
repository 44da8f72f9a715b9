"""The real engine whose loads are asynchronous or synchronous, as ``auto`` decides: whatever
happens in the middle of a load, and whatever switches its requests have, its output is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm import engine as real
from tests.vllm.agents import figures
from tests.vllm.engine import BLOCK, PROMPTS, WHOLE_BLOCKS
from tests.vllm.middle import EVENTS, SILENT, middle
from tests.vllm.test_engine import Alive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.holding import HoldingAgent

pytestmark = pytest.mark.engine
OPTIONS = {"weights_fixed": True, "load_mode": "auto", "sync_wait_ms": 10_000, "lookup_wait_ms": 100}


@pytest.fixture(scope="module")
def alive(opt: Path, reference: list[list[int]], holding: HoldingAgent) -> Iterator[Alive]:
    llm = real.make_engine(opt, str(holding.folder), options=OPTIONS)
    yield Alive(llm, holding)
    llm.llm_engine.engine_core.shutdown()


def test_cold_and_warm(alive: Alive, reference: list[list[int]]) -> None:
    alive.fill(reference)
    before = alive.side.counts.tokens_loaded
    assert alive.says() == reference
    counts = alive.side.counts
    loaded = (counts.tokens_loaded - before) // BLOCK
    assert loaded * 2 >= WHOLE_BLOCKS
    print(f"auto: {loaded} of {WHOLE_BLOCKS} whole blocks; {counts.loads_sync} of {counts.loads} synchronous")


@pytest.mark.stops
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_what_happens_to_a_load(
    alive: Alive, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch, event: str, *, sync: bool
) -> None:
    for limit in ("_most", "_left"):
        monkeypatch.setattr(alive.side.waiting_loads, limit, 1 << 30 if sync else 0)
    alive.fill(reference)
    counts = alive.side.counts
    synchronous, failed, late = counts.loads_sync, counts.loads_failed, counts.loads_late
    with middle(alive, event, "begin" if sync else "start") as happened:
        assert alive.says() == reference
        assert happened, "nothing was loaded"
        assert alive.says() == reference
        assert (counts.loads_sync > synchronous) == sync
        assert (alive.side.blocks.loading > 0) == (event in SILENT), "pins without a fence to come, or none"
        assert counts.loads_late > late if event in SILENT else counts.loads_failed > failed
    alive.forget()  # an agent that goes on ends the load that was given up
    assert alive.side.blocks.loading == 0
    assert alive.says() == reference
    print(f"{event}: {dict(vars(alive.side.counts))}; {figures(alive.agent)}")


def test_switches_of_requests(alive: Alive, reference: list[list[int]]) -> None:
    """They concern the cache alone. A salt makes prompts new to it."""
    counts = alive.side.counts

    def asked(salt: str, **switches: object) -> tuple[int, int]:
        """Return how many blocks were stored and loaded."""
        stored, loaded = alive.agent.status()["blocks_stored"], counts.tokens_loaded
        assert says(alive.llm, salt, {f"kvagent.{name}": value for name, value in switches.items()}) == reference
        alive.forget()
        return alive.agent.status()["blocks_stored"] - stored, (counts.tokens_loaded - loaded) // BLOCK

    alive.forget()
    assert asked("a", save=False) == (0, 0)
    stored, _ = asked("a")
    assert stored > WHOLE_BLOCKS // 2
    assert asked("a", load=False, save=False) == (0, 0)
    _, loaded = asked("a", max_load_tokens=BLOCK)
    assert 0 < loaded <= len(PROMPTS)
    _, loaded = asked("a")
    assert loaded > WHOLE_BLOCKS // 2


def says(llm: Any, salt: str, params: dict[str, object]) -> list[list[int]]:
    from vllm import SamplingParams

    one = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False, extra_args={"kv_transfer_params": params}
    )
    results = llm.generate([{"prompt_token_ids": p, "cache_salt": salt} for p in PROMPTS], one, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]
