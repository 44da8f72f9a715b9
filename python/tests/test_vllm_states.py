"""Which states of a step are saved, and loads of states, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvagent.messages import Group, Switches
from kvagent.vllm.counters import Counts
from kvagent.vllm.geometry import Geometry, Unsupported
from kvagent.vllm.guests.states import States, check_states
from kvagent.vllm.options import Options
from kvagent.vllm.plan import StepPlan
from kvagent.vllm.scheduler.loads import Loads
from kvagent.vllm.scheduler.requests import NO_LIMIT, Blocks, Phase, Promise, StaleRequests, Terms, Tracked
from kvagent.vllm.worker.memory import memory
from tests.agent import chain
from tests.sides import running, side_of
from tests.simulated import BLOCK, Block, Pool
from tests.test_vllm_parts import _Tensor

GEOMETRY = Geometry((Group(BLOCK, 64), Group(BLOCK, 64, 2)), BLOCK, frozenset({1}))
NULL = Block(0, is_null=True)


def request(tokens: int = 10 * BLOCK, prompt: int = 5 * BLOCK) -> Tracked:
    asked = SimpleNamespace(
        request_id="one", block_hashes=chain("one", tokens // BLOCK), num_tokens=tokens, num_prompt_tokens=prompt,
        lora_request=None, mm_features=[],
    )  # fmt: skip
    return running(asked, 2)


def added(tracked: Tracked, handed: list[tuple[int, int, int]], *, decode: bool = True) -> list[tuple[int, bytes]]:
    """Return the blocks and keys of the states that a step saves of those that vLLM hands over."""
    pool = Pool(64)
    for block in pool.blocks:
        block.block_hash = b"hashed"
    side = side_of(States(GEOMETRY), geometry=GEOMETRY, pool=pool)
    side.agent = SimpleNamespace(session=object(), switches=Switches(1, 1), silent=False)  # type: ignore[assignment]
    side.requests["one"] = tracked
    if not decode:
        tracked.saving.most = tracked.request.num_prompt_tokens
    state = SimpleNamespace(boundary_state_offloads={"one": handed, "another": [(1, 9, BLOCK)]})
    (states,), output = side.guests, SimpleNamespace(kv_connector_block_state=state, preempted_req_ids=None)
    states.planned(StepPlan(), output, 0.0)
    runs = side.saves._open
    assert all(run.group == 1 and pool.blocks[run.blocks[0].block_id].ref_cnt == 2 for run in runs)
    return [(run.blocks[0].block_id, run.hashes[0]) for run in runs]


def test_a_state_is_saved_under_its_boundary() -> None:
    tracked = request()
    keys = tracked.request.block_hashes
    assert added(tracked, [(1, 7, 3 * BLOCK), (1, 8, 6 * BLOCK)]) == [(7, keys[2]), (8, keys[5])]
    assert added(tracked, [(1, 7, 3 * BLOCK), (1, 8, 6 * BLOCK)], decode=False) == [(7, keys[2])]


@pytest.mark.parametrize(
    "handed", [(0, 7, 3 * BLOCK), (1, 7, 3 * BLOCK + 1), (1, 7, 0), (1, 7, 11 * BLOCK), (1, 7, 2 * BLOCK)]
)
def test_what_is_no_new_state_is_not_saved(handed: tuple[int, int, int]) -> None:
    """Of another group, inside a block, of no tokens, beyond the hashes, or loaded."""
    tracked = request()
    tracked.loaded = (0, 2 * BLOCK)
    assert added(tracked, [handed]) == []


@pytest.mark.parametrize("why", ["stale", "its own switch", "barred", "not running"])
def test_a_request_that_is_not_saved_saves_no_states(why: str) -> None:
    tracked = request()
    tracked.stale = why == "stale"
    tracked.saving.most = 0 if why == "its own switch" else NO_LIMIT
    tracked.barred.update([why] * (why == "barred"))
    tracked.phase = Phase.NONE if why == "not running" else Phase.RUNNING
    assert added(tracked, [(1, 7, 3 * BLOCK)]) == []


def test_blocks_after_one_without_a_hash_are_stale_too() -> None:
    """vLLM gives no hash to blocks of windows and states that no hit needs."""
    pool = Pool(64)
    found = SimpleNamespace(blocks=([NULL, *pool.blocks[1:5]],))
    blocks = Blocks(SimpleNamespace(block_pool=pool, get_blocks=lambda _: found), 0.5)
    stale, tracked = StaleRequests(blocks, 1), request()
    stale.add(tracked)
    for hashed in ([2], [2, 4], [1, 2, 3, 4]):
        for one in hashed:
            pool.blocks[one].block_hash = b"%d" % one
        stale.mark_blocks()
        assert [blocks.is_stale(block) for block in pool.blocks[1:5]] == [i in hashed for i in range(1, 5)]
    assert stale._next[tracked] == [5]


def test_parts_of_blocks_are_refused() -> None:
    """vLLM copies such a part, and its hash becomes another one: no mark of old weights is left."""
    limits = SimpleNamespace(max_num_batched_tokens=8 * BLOCK)
    config = SimpleNamespace(scheduler_config=limits, cache_config=SimpleNamespace())
    check_states(config, GEOMETRY, Options())
    finer = Geometry(GEOMETRY.groups, BLOCK // 2, GEOMETRY.states)
    with pytest.raises(Unsupported, match=f"prefix_match_unit {BLOCK // 2}, allowed is {BLOCK},"):
        check_states(config, finer, Options())


def planned(table: list[Block], tokens: int) -> Any:
    """Return the job that loads so many tokens of a request with this table of states."""
    session = SimpleNamespace(boot=b"b" * 16, epoch=1)
    agent: Any = SimpleNamespace(session=session, space=b"s" * 16, peer="", targets=lambda _: ())
    loads = Loads(
        agent, GEOMETRY, Options(), Blocks(SimpleNamespace(block_pool=Pool(64)), 0.5), Counts(), lambda *_: False
    )
    full = [Block(i) for i in range(1, 11)]
    tracked = request()
    tracked.asking.promised = Promise(0, tokens, 7, 0.0)
    loads.plan(1, tracked, [full, table], tokens)
    ((job,), _) = loads.take()
    return job


def test_only_the_state_at_the_end_is_loaded() -> None:
    job = planned([Block(40), Block(41), NULL, Block(42)], 4 * BLOCK)
    assert job.boot == b"b" * 16
    ids = memoryview(job.ids).cast("I").tolist()
    assert ids == [1, 2, 3, 4, 42]


@pytest.mark.parametrize("table", [[NULL, NULL, NULL, NULL], [NULL, NULL, NULL], []])
def test_a_load_without_a_block_for_its_state_fails(table: list[Block]) -> None:
    """It is planned for no agent, so that the workers report it as failed."""
    assert planned(table, 4 * BLOCK).boot == b""


def test_the_last_token_is_computed_even_of_a_prompt_that_is_received() -> None:
    tracked = request()
    tracked.asking.terms = Terms(b"name")
    assert side_of().loads.most(tracked, 0) == 10 * BLOCK
    assert side_of(geometry=GEOMETRY).loads.most(tracked, 0) == 10 * BLOCK - 1


def test_a_layer_with_several_tensors_has_the_bytes_of_all() -> None:
    """vLLM may pass the states of a layer as a list, such as that of a convolution first."""
    caches = {"a": [_Tensor((9, 3), (16, 1)), _Tensor((9, 2, 4), (16, 4, 1), start=4)]}
    (segments,) = memory(caches, [["a"]], 9).held[0].values()
    assert [(one.offset, one.stride, one.bytes) for one in segments] == [(0, 64, 12), (16, 64, 32)]
