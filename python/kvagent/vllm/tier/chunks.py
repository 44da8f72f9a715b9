"""What is published of chunks: blocks of the agent that each hold one or more blocks of vLLM.

Events name vLLM's blocks. The agent knows a chunk by the hash of its last block, so the hashes of
the others are computed from the tokens. Prompts that part within a chunk have two chunks that begin
with the same blocks: these are stored with the first chunk that has them, and removed with the
last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvagent.limits import TOKEN_BYTES
from kvagent.messages import EventKind
from kvagent.vllm.guests.events import MEDIA, salt_of, unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvagent.messages import EventRun
    from kvagent.vllm.guests.events import EventCounts, EventForm

STORAGE = dict.fromkeys(MEDIA, "STORAGE")
"""Names of the media for EventForm. vLLM's own tier says ``CPU`` for the region that these chunks
are copies of, and Dynamo keeps a set: the eviction from the region would remove the agent's copy.
"""


class _Chunk(NamedTuple):
    media: int
    hashes: tuple[Any, ...]
    """Of its blocks, as events name them."""


@dataclass(slots=True)
class _New:
    """The blocks of one event."""

    parent: Any = None
    hashes: list[Any] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    extra: list[tuple[str] | None] = field(default_factory=list)


class PublishedChunks:
    """The chunks of which the engine's stream says that they are stored, in memory or on the disk
    alike: for routers that is one medium.
    """

    def __init__(
        self,
        form: EventForm,
        chunk_tokens: Mapping[int, int],
        blocks: int,
        hash_block: Callable[[bytes | None, list[int], tuple[str] | None], bytes],
        counts: EventCounts,
    ) -> None:
        """``chunk_tokens``: by group of which events tell. ``blocks`` of vLLM in a chunk.
        ``hash_block`` returns the hash of a block, from that of the one before it, its tokens and
        its extra keys.
        """
        self._form = form
        self._tokens = chunk_tokens
        self._blocks = blocks
        self._hash_block = hash_block
        self._counts = counts
        # By group and key; a chunk before those after it.
        self._chunks: dict[int, dict[bytes, _Chunk]] = {group: {} for group in chunk_tokens}
        self._holders: dict[int, Counter[Any]] = {group: Counter() for group in chunk_tokens}

    def __len__(self) -> int:
        return sum(map(len, self._chunks.values()))

    def clear(self) -> None:
        """Forget all: the stream says that nothing is stored."""
        for group in self._chunks:
            self._chunks[group].clear()
            self._holders[group].clear()

    def remove(self, most: int) -> list[Any]:
        """Return events that remove chunks, at most that many, each before the one before it."""
        events: list[Any] = []
        for group, chunks in self._chunks.items():
            gone = [chunks.popitem()[1] for _ in range(min(most, len(chunks)))]
            most -= len(gone)
            events += self._removed(group, gone, MEDIA[0])
        return events

    def take(self, run: EventRun) -> list[Any]:
        """Return the events of a run: none if it says nothing new."""
        chunks = self._chunks.get(run.group)
        if chunks is None or run.medium not in MEDIA:
            return []
        n, bit = run.hash_len, 1 << run.medium
        keys = [run.hashes[at : at + n] for at in range(0, len(run.hashes), n)]
        if run.kind == EventKind.REMOVED:
            gone = [one for key in keys if (one := _leave(chunks, key, bit)) is not None]
            return self._removed(run.group, gone, run.medium)
        return self._take_stored(run, chunks, keys)

    def _take_stored(self, run: EventRun, chunks: dict[bytes, _Chunk], keys: list[bytes]) -> list[Any]:
        size, bit, salt = self._tokens[run.group], 1 << run.medium, salt_of(run.extra) if run.extra else None
        if len(run.tokens) != len(keys) * size * TOKEN_BYTES or (run.extra and salt is None):
            return []
        if (run.parent and run.parent not in chunks) or any(key in chunks and chunks[key].media & bit for key in keys):
            return []
        ids, parent, new = unpacked(run.tokens), run.parent, _New()
        for i, key in enumerate(keys):
            told = chunks.get(key)
            if told is None:
                raw = self._hashes(parent, key, ids[i * size : (i + 1) * size], salt)
                if not raw:
                    break
                self._add(run.group, parent, raw, ids[i * size : (i + 1) * size], salt, new)
                chunks[key] = _Chunk(bit, tuple(map(self._form.hash, raw)))
            elif new.hashes:
                break  # a chunk that is told follows one that is not
            else:
                chunks[key] = told._replace(media=told.media | bit)
            parent = key
        if not new.hashes:
            return []
        self._counts.events_stored += len(new.hashes)
        return [
            self._form.stored(
                run.group, new.parent, new.hashes, new.tokens, size // self._blocks, new.extra, run.medium
            )
        ]

    def _hashes(self, parent: bytes, key: bytes, ids: list[int], salt: tuple[str] | None) -> list[bytes]:
        """Return the hashes of a chunk's blocks; none if its tokens are not those of its key."""
        if self._blocks == 1:
            return [key]
        size = len(ids) // self._blocks
        raw: list[bytes] = []
        for at in range(0, len(ids), size):
            raw.append(self._hash_block(raw[-1] if raw else parent or None, ids[at : at + size], None if raw else salt))
        return raw if raw[-1] == key else []

    def _add(
        self, group: int, parent: bytes, raw: list[bytes], ids: list[int], salt: tuple[str] | None, new: _New
    ) -> None:
        """Add the blocks of a chunk that no other chunk has: the last ones."""
        hashes, holders = list(map(self._form.hash, raw)), self._holders[group]
        first = sum(1 for one in hashes if holders[one])
        holders.update(hashes)
        if not new.hashes:
            new.parent = hashes[first - 1] if first else self._form.hash(parent) if parent else None
        new.hashes += hashes[first:]
        new.tokens += ids[first * (len(ids) // len(raw)) :]
        new.extra += [None if i else salt for i in range(first, len(raw))]

    def _removed(self, group: int, gone: list[_Chunk], medium: int) -> list[Any]:
        """Return the event that chunks are gone, if they had blocks that no other has."""
        holders, hashes = self._holders[group], []
        for chunk in gone:
            for one in reversed(chunk.hashes):
                holders[one] -= 1
                if not holders[one]:
                    del holders[one]
                    hashes.append(one)
        self._counts.events_removed += len(hashes)
        return [self._form.removed(group, hashes, medium)] if hashes else []


def _leave(chunks: dict[bytes, _Chunk], key: bytes, bit: int) -> _Chunk | None:
    """Note that a chunk has left a medium. Return it if that was the last one."""
    chunk = chunks.get(key)
    if chunk is None or not chunk.media & bit:
        return None
    if chunk.media != bit:
        chunks[key] = chunk._replace(media=chunk.media & ~bit)
        return None
    del chunks[key]
    return chunk
