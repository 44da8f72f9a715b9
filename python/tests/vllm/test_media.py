"""Items of prompts in the real scheduler: equal identifiers do not make contents equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from kvagent.vllm.guests.media import Keyed
from tests.vllm.setting import BLOCK
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from tests.agent import AgentProcess

LENGTH = 20  # tokens of an item
PROMPT = [5] * LENGTH + [(i * 7) % 90 + 3 for i in range(100)]
WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK
NAME = "a client's own"


def item(content: int | None, name: str = NAME, offset: int = 0) -> Any:
    """Return an item of a prompt; ``None`` as content: the engine no longer has it."""
    pixels = None if content is None else torch.full((4, 6), content, dtype=torch.bfloat16)
    data = None if pixels is None else MultiModalKwargsItem({"pixels": SimpleNamespace(data=pixels)})
    return MultiModalFeatureSpec(
        data=data, modality="image", identifier=name, mm_position=PlaceholderRange(offset=offset, length=LENGTH),
        mm_hash=name,
    )  # fmt: skip


def see(world: World, request: str, *items: Any, kind: object = None, tokens: int = 4) -> None:
    """Add a request with items; its KV depends on ``kind``, by default on its items' content."""
    world.add(request, PROMPT, tokens, mm_features=list(items))
    contents = kind if kind is not None else [one.data and one.data["pixels"].data[0, 0].item() for one in items]
    sequence = world.sequences[request]
    world.sequences[request] = type(sequence)(PROMPT, tokens, f"{contents}")


@pytest.fixture
def seeing(worlds: Any) -> Any:
    """Creates worlds whose encoder has room."""

    def make(**options: Any) -> World:
        world: World = worlds(**options)
        world.scheduler.max_num_encoder_input_tokens = 1000
        world.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
        return world

    return make


def test_items_that_clients_name_alike(seeing: Any, agent: AgentProcess) -> None:
    """Each engine had one of the two first; blocks of equal content are shared, others are not."""
    one, other, third = seeing(), seeing(), seeing()
    see(one, "cat", item(1))
    one.run()
    see(other, "dog", item(2))
    other.run()
    assert other.side.counts.tokens_loaded == 0, "an item was taken for another of that name"
    assert other.scheduler.reset_prefix_cache()
    see(other, "dog again", item(2))
    other.run()
    assert other.side.counts.tokens_loaded == WHOLE
    see(third, "cat", item(1))
    third.run()
    assert third.side.counts.tokens_loaded == WHOLE, "engines that see the same do not share"
    clean(one, agent, other, third)


def test_a_name_of_two_contents_in_one_engine(seeing: Any, agent: AgentProcess) -> None:
    """Its own caches of blocks and encoder outputs use identifiers: its results may be of either
    content.
    """
    one, other = seeing(), seeing()
    see(one, "cat", item(1), tokens=60)
    while len(one.outputs["cat"]) < 20:
        one.step()
    saved = one.side.counts.saves_planned
    assert one.side.counts.media_bypassed == 0
    see(one, "dog", item(2), kind=[1.0])  # it finds the other's blocks
    assert one.side.counts.media_bypassed == 2
    one.run()
    assert one.side.counts.saves_planned == saved, "blocks that may be of either content were saved"
    see(one, "cat again", item(1), kind=[1.0])
    one.run()
    assert one.side.counts.saves_planned == saved
    assert one.side.counts.tokens_loaded == 0
    see(other, "dog", item(2))
    other.run()
    assert other.side.counts.tokens_loaded == 0
    clean(one, agent, other)


def test_text_before_an_item_is_shared(seeing: Any, agent: AgentProcess) -> None:
    one, other = seeing(), seeing()
    begin = 3 * BLOCK + 4
    one.add("text", PROMPT, 4)
    one.run()
    other.add("text and item", PROMPT, 4, mm_features=[item(1, offset=begin)])
    other.run()
    # vLLM's own hashes are the same up to the item's first block.
    assert other.side.counts.tokens_loaded == 3 * BLOCK
    request = SimpleNamespace(
        request_id="x", lora_request=None, mm_features=[item(1, offset=begin)], block_hashes=[b"a"] * 6
    )
    keyed = other.side._track(request).request
    assert isinstance(keyed, Keyed)
    assert keyed.block_hashes[:3] == [b"a"] * 3
    assert len(set(keyed.block_hashes[3:])) == 1 != keyed.block_hashes[3:].count(b"a")


def test_the_second_item_counts_from_its_own_place_on(seeing: Any, agent: AgentProcess) -> None:
    one, other = seeing(), seeing()
    see(one, "both", item(1), item(2, "second", 4 * BLOCK), kind="first")
    one.run()
    see(other, "both", item(1), item(3, "second", 4 * BLOCK), kind="first")
    other.run()
    assert other.side.counts.tokens_loaded == 4 * BLOCK


@pytest.mark.parametrize(
    ("media", "content", "loaded"), [("bypass", 1, 0), ("content", None, 0), ("trust", None, WHOLE)]
)
def test_what_an_operator_may_choose(seeing: Any, agent: AgentProcess, media: str, content: Any, loaded: int) -> None:
    """``trust``: clients choose no identifiers, or only for equal content."""
    worlds = [seeing(extra={"media": media}) for _ in range(2)]
    for world in worlds:
        see(world, "cat", item(content))
        world.run()
    assert worlds[1].side.counts.tokens_loaded == loaded
    assert bool(agent.status()["blocks_stored"]) == bool(loaded)
    clean(worlds[0], agent, worlds[1])
