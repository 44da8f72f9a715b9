"""What is published of chunks of several blocks, with vLLM's hashes and events in their places."""

from __future__ import annotations

from array import array
from typing import Any, ClassVar

import pytest

from kvagent import messages as m
from kvagent.vllm.counters import Counts
from kvagent.vllm.guests.events import SALT, Published

MEMORY, DISK = 1, 2


def hash_block(parent: bytes | None, ids: list[int], extra: tuple[str] | None) -> bytes:
    """Return the tokens so far, one letter each: a hash that can be read. All are of 8 bytes."""
    salt = extra[0].encode() if extra else b""
    return ((parent or b"").strip() + salt + bytes(ids)).ljust(8)


class Form:
    """Events as tuples."""

    media: ClassVar = {MEMORY: "STORAGE", DISK: "STORAGE"}

    def hash(self, block_hash: bytes) -> str:
        return block_hash.decode().strip()

    def stored(self, group: int, parent: Any, hashes: Any, ids: Any, size: int, keys: Any, medium: int) -> Any:
        assert len(ids) == size * len(hashes)
        assert len(keys) == len(hashes)
        return "stored", parent, *hashes, *[key for key in keys if key]

    def removed(self, group: int, hashes: Any, medium: int) -> Any:
        return "removed", *hashes


class Case:
    """Chunks of two blocks of one token each, or so many."""

    def __init__(self, blocks: int = 2) -> None:
        self.counts = Counts()
        form: Any = Form()
        self.blocks = blocks
        self.it = Published(form, {0: blocks}, self.counts, blocks, hash_block)

    def stored(self, parent: str, text: str, medium: int = MEMORY, extra: bytes = b"") -> list[Any]:
        """Store the chunks that continue ``parent`` up to ``text``."""
        salt = extra[1:].decode()
        ends = [salt + text[: at + self.blocks] for at in range(len(parent), len(text), self.blocks)]
        joined = "".join(f"{end:<8}" for end in ends).encode()
        key = f"{salt}{parent:<8}".encode() if parent else b""
        ids = array("I", list(text[len(parent) :].encode())).tobytes()
        return self.it.take(m.EventRun(1, medium, 0, key, 8, joined, ids, extra))

    def removed(self, *texts: str, medium: int = MEMORY) -> list[Any]:
        joined = "".join(f"{text:<8}" for text in texts).encode()
        return self.it.take(m.EventRun(2, medium, 0, b"", 8, joined, b"", b""))


@pytest.fixture
def case() -> Case:
    return Case()


def test_chunks_are_told_block_by_block(case: Case) -> None:
    assert case.stored("", "abcd") == [("stored", None, "a", "ab", "abc", "abcd")]
    assert case.stored("abcd", "abcdef") == [("stored", "abcd", "abcde", "abcdef")]
    assert case.removed("abcdef", "abcd") == [("removed", "abcdef", "abcde", "abcd", "abc")]
    assert (case.counts.events_stored, case.counts.events_removed) == (6, 4)


def test_blocks_of_two_chunks_are_stored_and_removed_once(case: Case) -> None:
    case.stored("", "abcd")
    assert case.stored("ab", "abcx") == [("stored", "abc", "abcx")]
    assert case.removed("abcd") == [("removed", "abcd")]
    assert case.removed("abcx") == [("removed", "abcx", "abc")]


def test_a_chunk_is_gone_with_its_last_medium(case: Case) -> None:
    assert case.stored("", "ab")
    assert case.stored("", "abcd", DISK) == [("stored", "ab", "abc", "abcd")]
    assert case.removed("ab") == []
    assert case.removed("ab") == [], "it is not there any more"
    assert case.stored("", "ab") == [], "back in memory"
    assert case.removed("abcd", medium=DISK) == [("removed", "abcd", "abc")]
    assert case.removed("ab", medium=DISK) == []
    assert case.removed("ab") == [("removed", "ab", "a")]


def test_what_no_router_could_use_is_left_out(case: Case) -> None:
    assert case.stored("zz", "zzab") == [], "its parent is unknown"
    assert case.stored("", "ab", medium=3) == []
    assert case.stored("", "ab", extra=b"\x07x") == []
    other = array("I", list(b"xy")).tobytes()
    assert case.it.take(m.EventRun(1, MEMORY, 0, b"", 8, b"ab      ", other, b"")) == [], "tokens of another key"
    assert case.it.take(m.EventRun(1, MEMORY, 0, b"", 8, b"ab      ", other[:4], b"")) == []
    assert case.removed("ab") == []
    assert len(case.it) == 0
    assert case.stored("", "ab")
    assert case.stored("", "ab") == [], "told twice"


def test_a_salt_is_of_the_first_block(case: Case) -> None:
    assert case.stored("", "ab", extra=SALT + b"s") == [("stored", None, "sa", "sab", ("s",))]


def test_the_end_of_a_session_removes_all_from_the_leaf_on(case: Case) -> None:
    case.stored("", "abcd")
    case.stored("ab", "abcx")
    assert case.it.remove(2) == [("removed", "abcx", "abcd", "abc")]
    assert case.it.remove(2) == [("removed", "ab", "a")]
    assert case.it.remove(2) == []
    case.stored("", "ab")
    case.it.clear()
    assert case.stored("", "ab") == [("stored", None, "a", "ab")]


def test_chunks_of_one_block_need_no_hashes() -> None:
    case = Case(1)
    assert case.stored("", "ab") == [("stored", None, "a", "ab")]
