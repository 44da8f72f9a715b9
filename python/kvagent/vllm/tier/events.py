"""KV events of the tier: the engine's stream tells which chunks the agent holds.

vLLM's tiers give events that name a chunk by its key; vLLM adds the tokens if its own region holds
the chunk too. That leaves out what another engine stored, and what outlives the region. So
``KVAgentTier.take_events`` gives none of these, and vLLM's connector publishes what this module
makes besides (construction), with tokens that the agent keeps.

It has a session of its own with the agent, which the scheduler's thread uses without waiting, as
the connector's scheduler does.

Events name vLLM's blocks. The agent knows a chunk, which holds one or more of them, by the hash of
its last block, so the hashes of the others are computed from the tokens. Prompts that part within a
chunk have two chunks that begin with the same blocks: these are stored with the first chunk that
has them, and removed with the last.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from kvagent.limits import TOKEN_BYTES
from kvagent.messages import EventKind, Group, Role
from kvagent.registration import Registration
from kvagent.vllm import internals
from kvagent.vllm.geometry import Geometry, is_state, window
from kvagent.vllm.guests.events import (
    MEDIA,
    EventForm,
    EventsOptions,
    Publication,
    Tokens,
    Waker,
    extra_of,
    salt_of,
    unpacked,
)
from kvagent.vllm.link import Link
from kvagent.vllm.options import OFF
from kvagent.vllm.scheduler.agent_session import AgentSession
from kvagent.vllm.tier.questions import group_of, hash_of
from kvagent.vllm.weight_changes import with_generation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvagent.messages import EventRun
    from kvagent.vllm.guests.events import EventCounts
    from kvagent.vllm.tier.construction import Construction
    from kvagent.vllm.tier.identity import Space
    from kvagent.vllm.tier.options import TierOptions
    from kvagent.vllm.tier.questions import Key
    from kvagent.vllm.weight_changes import Generations

log = logging.getLogger("vllm.kvagent")

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
    """The chunks that the engine's stream says are stored, in memory or on the disk alike."""

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


def of_engine(
    construction: Construction, config: Any, options: TierOptions, space: Space, rows: int,
    generations: Generations, counts: EventCounts,
) -> TierEvents | None:  # fmt: skip
    """Return the events of an engine, if it publishes some and the tier is to give its own."""
    asked = getattr(construction.vllm_config, "kv_events_config", None)
    if asked is None or not asked.enable_kv_cache_events or options.events == OFF:
        return None
    left_out = _untold(construction, config, space.tokens)
    geometry = Geometry((Group(space.tokens, rows),) * space.groups, int(config.cache.tokens_per_hash), left_out)
    if len(left_out) == len(geometry.groups):
        log.warning("tier: KV events do not tell what the agent holds: no group's blocks have the hashes of events")
        return None
    instance = f"{str(config.engine_id)[:100]} events"
    return TierEvents(construction.vllm_config, options, space, geometry, generations, instance, counts)


def _untold(construction: Construction, config: Any, tokens: int) -> frozenset[int]:
    """Return the groups of which nothing is told. ``tokens`` of a chunk, as registered. Told are
    chunks of whole prefixes, whose blocks have the hashes of vLLM's own events.
    """
    groups = construction.kv_cache_config.kv_cache_groups
    left_out = set(range(len(groups)))
    for one in config.groups:
        group = int(one.group_id)
        spec = groups[group].kv_cache_spec
        whole = not window(spec) and not is_state(spec)
        hashed = one.tokens_per_block == config.cache.tokens_per_hash
        if whole and hashed and one.tokens_per_block * config.cache.blocks_per_chunk == tokens:
            left_out.discard(group)
    return frozenset(left_out)


class Spoken:
    """A request whose chunks are said. ``scale``: hashes of a chunk."""

    def __init__(self, request: Any, scale: int) -> None:
        self.request = request
        self.events_extra = extra_of(request)
        self._scale = scale
        self._places: dict[bytes, int] = {}

    def place(self, block_hash: bytes) -> int | None:
        """Return the number of the chunk that ends with a block; None if it has no such chunk."""
        hashes = self.request.block_hashes
        for chunk in range(len(self._places), len(hashes) // self._scale):
            self._places[bytes(hashes[(chunk + 1) * self._scale - 1])] = chunk
        return self._places.get(block_hash)


class TierEvents:
    """The events. Used by the scheduler's thread."""

    def __init__(
        self, vllm_config: Any, options: TierOptions, space: Space, geometry: Geometry, generations: Generations,
        instance: str, counts: EventCounts,
    ) -> None:  # fmt: skip
        """``geometry``: of chunks; its states are the groups of which nothing is told."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import hash_block_tokens
        from vllm.v1.engine import core

        function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)

        def hash_block(parent: bytes | None, tokens: list[int], extra: tuple[str] | None) -> bytes:
            return bytes(hash_block_tokens(function, parent, tokens, extra))

        def registration() -> Registration:
            return Registration(
                instance=instance, role=Role.SCHEDULER, identity=with_generation(space.identity, generations.now),
                groups=geometry.groups, hash_tokens=space.tokens,
            )  # fmt: skip

        self._scale = blocks = max(1, space.tokens // geometry.hash_tokens)
        self._requests: dict[str, Spoken] = {}
        link = Link(options.socket_dir, "tier, events", registration, pool=options.pool)
        wake = internals.waker(core)
        waker = Waker(wake) if wake is not None else None
        if waker is not None:
            link.attached = waker.wake
        self._agent = AgentSession(link, options)
        tokens, form = Tokens(geometry, counts), EventForm(STORAGE)
        told = PublishedChunks(form, tokens.sizes, blocks, hash_block, counts)
        self._publication = Publication(self._agent, tokens, EventsOptions(form, waker), told, blocks)

    # ---- what vLLM's connector says (construction)

    def bind(self, manager: Any) -> None:
        """Take vLLM's KV cache manager."""
        self._publication.form.bind(manager)

    def cleared(self) -> None:
        """Handle that vLLM's stream says that all blocks are gone, in all media."""
        self._publication.cleared()

    def begin(self, request: Any) -> None:
        """Handle the arrival of a request."""
        self._requests[request.request_id] = Spoken(request, self._scale)

    def take(self) -> list[Any]:
        """Return the next events. Called once in each step."""
        self._agent.poll()
        return self._publication.take()

    # ---- what the tier says

    def say(self, request: str, keys: tuple[Key, ...]) -> None:
        """Say the tokens of chunks that are saved or loaded."""
        spoken = self._requests.get(request)
        if spoken is None or spoken.events_extra is None:
            return
        self._publication.follow()
        for group in {group_of(key) for key in keys} & self._publication.tokens.sizes.keys():
            places = (spoken.place(hash_of(key)) for key in keys if group_of(key) == group)
            for first, count in _runs(sorted(one for one in places if one is not None)):
                self._publication.tokens.say(spoken.request, spoken.events_extra, group, first, count)

    def end(self, request: str) -> None:
        """Handle that no chunk of a request will be saved or loaded any more."""
        self._requests.pop(request, None)

    def drained(self) -> None:
        """Drop the requests that have ended: vLLM's manager is reset, and may not name them."""
        for name in [name for name, one in self._requests.items() if one.request.is_finished()]:
            del self._requests[name]

    def move(self) -> None:
        """Continue in the space of the present weights: what was told is gone."""
        self._agent.reregister()

    def pending(self) -> bool:
        """Return whether a step has something to publish or to ask."""
        return self._publication.pending()

    def close(self) -> None:
        """Leave the agent."""
        self._publication.close()
        self._agent.close()


def _runs(places: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the length of each run of consecutive numbers."""
    for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        numbers = [place for _, place in run]
        yield numbers[0], len(numbers)
