"""Keys of requests with items, and what belongs to an item's content."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.guests import media
from kvagent.vllm.guests.media import Keyed, Media, Unhashable, content_digest
from tests.sides import side_of

if TYPE_CHECKING:
    from kvagent.vllm.scheduler.side import SchedulerSide


class Item(dict[str, Any]):
    """Weakly referenceable, like vLLM's."""


def feature(content: Any, name: str = "a", offset: int = 0) -> Any:
    data = None if content is None else Item(pixels=SimpleNamespace(data=content))
    return SimpleNamespace(
        identifier=name, modality="image", data=data, mm_position=SimpleNamespace(offset=offset, length=4)
    )


def request(*features: Any, hashes: int = 4) -> Any:
    keys = [bytes([i]) * 32 for i in range(hashes)]
    return SimpleNamespace(mm_features=list(features), block_hashes=keys, name="r", lora_request=None)


def engine(how: str = "content") -> SchedulerSide:
    return side_of(Media(how, 16))


def keyed(side: SchedulerSide, one: Any) -> Any | None:
    """Return a request that arrives with its keys; None if it is neither saved nor loaded."""
    one.request_id = str(len(side.requests))
    tracked = side._track(one)
    return None if tracked.barred else tracked.request


def keys(*features: Any, how: str = "content") -> list[bytes] | None:
    kept = keyed(engine(how), request(*features))
    return None if kept is None else list(kept.block_hashes)


def test_keys_go_by_content_from_the_first_item_on() -> None:
    plain = request().block_hashes
    assert keys() == plain
    here = keys(feature([1], offset=20))
    assert here is not None
    assert here[0] == plain[0]
    assert not set(here[1:]) & set(plain)
    assert keys(feature([1], offset=20)) == here
    other = keys(feature([2], offset=20))
    assert other is not None
    assert other[0] == here[0]
    assert not set(other[1:]) & set(here[1:])
    moved = keys(feature([1], offset=21))
    assert moved is not None
    assert moved[1:] != here[1:]
    second = keys(feature([1], offset=20), feature([2], "b", 40))
    assert second is not None
    assert second[:2] == here[:2]
    assert second[2:] != here[2:]


def test_keys_grow_with_the_request() -> None:
    one = request(feature([1]), hashes=2)
    kept = keyed(engine(), one)
    assert isinstance(kept, Keyed)
    assert kept.name == "r"
    first = list(kept.block_hashes)
    one.block_hashes.append(b"x" * 32)
    assert kept.block_hashes[:2] == first
    assert len(kept.block_hashes) == 3


def test_a_content_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def digest(modality: str, data: Any) -> bytes:
        hashed.append(1)
        return content_digest(modality, data)

    monkeypatch.setattr(media, "content_digest", digest)
    kept, again = engine(), feature([1])
    for _ in range(3):
        assert keyed(kept, request(again)) is not None
    assert len(hashed) == 1


def test_a_name_with_two_contents_is_of_no_use_any_more() -> None:
    kept = engine()
    first, second = feature([1]), feature([2])
    assert keyed(kept, request(first)) is not None
    assert keyed(kept, request(second, feature([1], "b"))) is None
    assert [bool(one.barred) for one in kept.requests.values()] == [True, True], "the first one goes on"
    assert keyed(kept, request(first)) is None
    assert keyed(kept, request(feature([1], "b"))) is not None
    assert keyed(kept, request(feature(None, "b"))) is None, "what is not here may be anything"
    assert keyed(kept, request(feature([1], "b"))) is None


def test_too_many_such_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MAX_NAMES", 2)
    kept = engine()
    for name in "abc":
        for content in ([1], [2]):
            keyed(kept, request(feature(content, name)))
    assert keyed(kept, request(feature([1], "d"))) is None
    assert keyed(kept, request()) is not None


def test_a_session_that_may_see_items_later_is_left_alone() -> None:
    session = SimpleNamespace(mm_features=[], block_hashes=[], resumable=True, lora_request=None)
    assert keyed(engine(), session) is None
    began = request(feature([1]))
    began.resumable = True
    assert keyed(engine(), began) is None, "a token that its next turn replaces has a key"
    assert keyed(side_of(Media("content", 16, multimodal=False)), session) is session
    trusted = side_of(answered=frozenset({"mm_features"}))
    assert keyed(trusted, session) is session
    assert keyed(trusted, request(feature([1]))) is not None
    assert keyed(side_of(), request(feature([1]))) is None, "nothing keys it"


def test_contents() -> None:
    contents = [1, 1.0, True, "1", None, [1], [[1]], [1, 1], (1, (1,)), []]
    found = {content_digest("image", {"pixels": SimpleNamespace(data=one)}) for one in contents}
    found |= {content_digest("video", {"pixels": SimpleNamespace(data=1)})}
    found |= {content_digest("image", {"other": SimpleNamespace(data=1)})}
    assert len(found) == len(contents) + 2
    for data in (None, {"pixels": SimpleNamespace(data=object())}, {"monotonic_id": SimpleNamespace(data=1)}):
        with pytest.raises(Unhashable):
            content_digest("image", data)
