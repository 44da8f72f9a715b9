"""KV events of the tier: the engine's stream tells which chunks the agent holds.

vLLM's tiers give events that name a chunk by its key; vLLM adds the tokens if its own region holds
the chunk too. That leaves out what another engine stored, and what outlives the region. So
``KVAgentTier.take_events`` gives none of these, and vLLM's connector publishes what this module
makes besides (construction), with tokens that the agent keeps.

It has a session of its own with the agent, which the scheduler's thread uses without waiting, as
the connector's scheduler does.

Events name vLLM's blocks, of which a chunk holds one or more.
"""

from __future__ import annotations

import logging
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvagent.messages import Group, Role
from kvagent.registration import Registration
from kvagent.vllm import internals
from kvagent.vllm.geometry import Geometry, is_state, window
from kvagent.vllm.guests.events import MEDIA, EventForm, Publication, Published, Tokens, Waker, extra_of
from kvagent.vllm.link import Link
from kvagent.vllm.options import OFF
from kvagent.vllm.scheduler.agent_session import AgentSession
from kvagent.vllm.tier.questions import group_of, hash_of
from kvagent.vllm.weight_changes import with_generation

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        tokens, self._form = Tokens(geometry, counts), EventForm(STORAGE)
        published = Published(self._form, tokens.sizes, counts, blocks, hash_block)
        self._publication = Publication(self._agent, tokens, published, waker, blocks)

    # ---- what vLLM's connector says (construction)

    def bind(self, manager: Any) -> None:
        """Take vLLM's KV cache manager."""
        self._form.bind(manager)

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
