"""Engines whose blocks depend on the next token too: their draft model's KV is in the cache."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.guests import drafts
from kvagent.vllm.guests.adapters import Adapted
from kvagent.vllm.guests.drafts import Followed, check_options, following_tokens
from kvagent.vllm.options import OptionError, Options
from kvagent.vllm.scheduler.saves import final_tokens
from tests.simulated import BLOCK, SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.agent import AgentProcess

NO_GROUP = SimpleNamespace(kv_cache_groups=[SimpleNamespace(is_eagle_group=False)])


@pytest.fixture
def engines(agent: AgentProcess) -> Iterator[Callable[..., SimulatedEngine]]:
    made: list[SimulatedEngine] = []

    def make(name: str = "one", **more: Any) -> SimulatedEngine:
        made.append(SimulatedEngine(agent, name, **({"following": 1} | more)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def tokens(blocks: int, then: int = 9) -> list[int]:
    """Return the tokens of that many blocks, and one that follows."""
    return [*itertools.islice(itertools.cycle(range(50)), blocks * BLOCK), then]


@pytest.mark.parametrize("length", [16, 32])
def test_keys_are_as_long_as_vllms_hashes(length: int) -> None:
    """Vary with --prefix-caching-hash-algo; one request's have one length."""
    hashes = [bytes([i]) * length for i in range(3)]
    request = SimpleNamespace(block_hashes=hashes, num_tokens=3 * BLOCK + 1, all_token_ids=tokens(3))
    followed = Followed(request, BLOCK).block_hashes
    plain = SimpleNamespace(block_hashes=hashes, _block_hasher=lambda one: hashes[len(one.block_hashes) :])
    adapted = Adapted(plain, b"digest").block_hashes
    for keys in (followed, adapted):
        assert [len(key) for key in keys] == [length] * 3
        assert not {*keys} & {*hashes}


def test_a_block_is_shared_only_before_the_same_token(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    first, second = engines("one"), engines("two")
    first.save("a", "p", 4, 1, all_token_ids=tokens(4))
    assert agent.status()["blocks_stored"] == 4
    assert second.matched(second.request("other", "p", 4, all_token_ids=tokens(4, 8))) == 3 * BLOCK
    assert second.matched(second.request("same", "p", 4, all_token_ids=tokens(4))) == 4 * BLOCK


def test_a_block_is_saved_once_the_next_token_is_known(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """The tokens of the request end with a block; the step samples the next one."""
    engine = engines()
    whole = {"num_tokens": 4 * BLOCK, "num_prompt_tokens": 4 * BLOCK, "all_token_ids": tokens(4)[:-1]}
    request = engine.request("a", "p", 4, **whole)
    engine.matched(request)
    engine.admit(request)
    engine.step((request, 4 * BLOCK))
    engine.quiet()
    assert agent.status()["blocks_stored"] == 3
    request.num_tokens += 1
    request.all_token_ids = tokens(4)
    engine.scheduler.finished(request, normally=True)
    engine.quiet()
    assert agent.status()["blocks_stored"] == 4
    assert engine.matched(engine.request("b", "p", 4, all_token_ids=tokens(4))) == 4 * BLOCK


def test_blocks_that_were_found_in_the_engines_own_cache_are_not_saved(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess
) -> None:
    """vLLM finds them by hashes without the next token, so another one may have followed them."""
    engine = engines()
    request = engine.request("a", "p", 5, all_token_ids=tokens(5))
    engine.matched(request, own=3 * BLOCK)
    engine.admit(request)
    engine.step((request, 2 * BLOCK + 1))
    request.num_computed_tokens = 5 * BLOCK + 1
    engine.step((request, 1))
    engine.quiet()
    engine.scheduler.finished(request, normally=True)
    engine.quiet()
    assert agent.status()["blocks_stored"] == 2


@pytest.mark.parametrize(
    "more", [{"prompt_embeds": "x"}, {"mm_features": ["x"]}, {"resumable": True}, {"lora_request": "x"}]
)
def test_requests_whose_next_token_is_not_all(
    engines: Callable[..., SimulatedEngine], agent: AgentProcess, more: dict[str, Any]
) -> None:
    if "lora_request" in more:
        more = {"lora_request": SimpleNamespace(lora_name="x", lora_int_id=1)}
    if "mm_features" in more:
        more = {"mm_features": [SimpleNamespace(identifier="i", mm_position=SimpleNamespace(offset=0), data=None,
                                                modality="image")]}  # fmt: skip
    engine = engines(media="trust")
    engine.save("a", "p", 4, 1, all_token_ids=tokens(4), **more)
    assert agent.status()["blocks_stored"] == 0
    assert engine.scheduler.counts.lookups == 0


def test_the_last_token_that_is_certain_only_follows() -> None:
    request = SimpleNamespace(num_tokens=100, num_computed_tokens=99, num_output_placeholders=0)
    assert final_tokens(request, 4, 1) == 99
    request.num_computed_tokens = 60
    assert final_tokens(request, 20, 1) == 80, "the tokens after a chunk of the prompt are known"


def config(method: str, *, layers: int = 1, lookahead: int | None = 1, v2: bool = True) -> Any:
    draft = SimpleNamespace(hf_config=SimpleNamespace(num_hidden_layers=layers, n_predict=layers))
    speculative = SimpleNamespace(method=method, draft_model_config=draft)
    found = SimpleNamespace(speculative_config=speculative, use_v2_model_runner=v2)
    if lookahead is not None:
        found.num_prefill_lookahead_tokens = lookahead
    return found


def test_which_draft_models_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_defers", lambda: True)
    assert following_tokens(SimpleNamespace(speculative_config=None), NO_GROUP) == 0
    for method in ("ngram", "draft_model", "custom_class", "dflash"):
        assert following_tokens(config(method), NO_GROUP) == 0
    for method in ("eagle", "eagle3", "mtp"):
        assert following_tokens(config(method), NO_GROUP) == 1
        for more, said in (
            ({"layers": 2}, "2 layers"), ({"layers": 0}, "0 layers"), ({"lookahead": 3}, "next 3 tokens"),
            ({"lookahead": None}, "0.33"), ({"v2": False}, "first model runner"),
        ):  # fmt: skip
            with pytest.raises(Unsupported, match=f"speculative_config.method {method}: .*{said}"):
                following_tokens(config(method, **more), NO_GROUP)
    monkeypatch.setattr(drafts, "_defers", lambda: False)
    with pytest.raises(Unsupported, match=r"before vLLM 0\.33"):
        following_tokens(config("mtp"), NO_GROUP)
    flagged = SimpleNamespace(kv_cache_groups=[SimpleNamespace(is_eagle_group=True)])
    with pytest.raises(Unsupported, match="group 0 holds layers of a draft model of an unknown method, new"):
        following_tokens(config("new"), flagged)


def test_nothing_is_saved_by_vllms_hash(engines: Callable[..., SimulatedEngine], agent: AgentProcess) -> None:
    """Another token may follow a block that vLLM has evicted and computed again."""
    engine = engines(pin_percent=10.0)  # 6 of 64 blocks
    request = engine.request("a", "p", 20, all_token_ids=tokens(20))
    engine.matched(request)
    for block in engine.admit(request):
        block.block_hash = b"hashed"
    engine.step((request, request.num_tokens))
    engine.scheduler.finished(request, normally=True)
    engine.quiet()
    assert agent.status()["blocks_stored"] <= 6
    with pytest.raises(OptionError, match="offload: lazy, allowed is eager"):
        check_options(1, Options(offload="lazy"))
    check_options(0, Options(offload="lazy"))
