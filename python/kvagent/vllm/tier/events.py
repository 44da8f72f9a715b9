"""KV events of the tier: the engine's stream tells which chunks the agent holds.

vLLM's tiers give events that name a chunk by its key; vLLM adds the tokens if its own region holds
the chunk too. That leaves out what another engine stored, and what outlives the region. So
``KVAgentTier.take_events`` gives none of these, and vLLM's connector publishes what this module
makes besides (construction), with tokens that the agent keeps.

It has a session of its own with the agent, which the scheduler's thread uses without waiting, as
the connector's scheduler does.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from kvagent.messages import Group, Role
from kvagent.registration import Registration
from kvagent.vllm import geometry as specs
from kvagent.vllm import internals
from kvagent.vllm.geometry import Geometry
from kvagent.vllm.guests.events import EventsOptions, Publication, Tokens, Waker, extra_of
from kvagent.vllm.link import Link
from kvagent.vllm.options import OFF
from kvagent.vllm.scheduler.agent_session import AgentSession
from kvagent.vllm.tier.chunks import STORAGE, PublishedChunks
from kvagent.vllm.tier.orders import group_of, hash_of
from kvagent.vllm.weight_changes import with_generation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvagent.vllm.guests.events import EventCounts, EventForm
    from kvagent.vllm.tier.construction import Construction
    from kvagent.vllm.tier.identity import Space
    from kvagent.vllm.tier.options import TierOptions
    from kvagent.vllm.tier.orders import Key
    from kvagent.vllm.weight_changes import Generations


class Vllm(NamedTuple):
    """What of vLLM the events need."""

    form: EventForm
    hash_block: Callable[[bytes | None, list[int], tuple[str] | None], bytes]
    wake: Callable[[], None] | None
    """Wakes the engine; None if its steps are its caller's."""


def of_vllm(vllm_config: Any) -> Vllm:
    """Return it, in the scheduler's process."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens
    from vllm.v1.engine import core

    from kvagent.vllm.guests.events import EventForm

    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)

    def hash_block(parent: bytes | None, tokens: list[int], extra: tuple[str] | None) -> bytes:
        return bytes(hash_block_tokens(function, parent, tokens, extra))

    return Vllm(EventForm(STORAGE), hash_block, internals.waker(core))


def wanted(construction: Construction | None, options: TierOptions) -> bool:
    """Return whether the engine publishes events, and the tier gives its own."""
    config = getattr(construction.vllm_config, "kv_events_config", None) if construction is not None else None
    return config is not None and bool(config.enable_kv_cache_events) and options.events != OFF


def untold(construction: Construction, config: Any, tokens: int) -> frozenset[int]:
    """Return the groups of which nothing is told. ``tokens`` of a chunk, as registered. Told are
    chunks of whole prefixes, whose blocks have the hashes of vLLM's own events.
    """
    groups = construction.kv_cache_config.kv_cache_groups
    left_out = set(range(len(groups)))
    for one in config.groups:
        group = int(one.group_id)
        spec = groups[group].kv_cache_spec
        whole = not specs.window(spec) and not specs.is_state(spec)
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
        self,
        options: TierOptions,
        space: Space,
        geometry: Geometry,
        generations: Generations,
        instance: str,
        vllm: Vllm,
        counts: EventCounts,
    ) -> None:
        """``geometry``: of chunks; its states are the groups of which nothing is told."""
        blocks = max(1, space.tokens // geometry.hash_tokens)
        self._scale = blocks
        self._requests: dict[str, Spoken] = {}

        def registration() -> Registration:
            return Registration(
                instance=f"{instance[:100]} events", role=Role.SCHEDULER,
                identity=with_generation(space.identity, generations.now),
                groups=geometry.groups, hash_tokens=space.tokens,
            )  # fmt: skip

        link = Link(options.socket_dir, "tier, events", registration, pool=options.pool)
        waker = Waker(vllm.wake) if vllm.wake is not None else None
        if waker is not None:
            link.attached = waker.wake
        self._agent = AgentSession(link, options)
        tokens = Tokens(geometry, counts)
        told = PublishedChunks(vllm.form, tokens.sizes, blocks, vllm.hash_block, counts)
        self._publication = Publication(self._agent, tokens, EventsOptions(vllm.form, waker), told, blocks)

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


def geometry_of(construction: Construction, config: Any, space: Space, rows: int) -> Geometry:
    """Return the chunks' geometry."""
    states = untold(construction, config, space.tokens)
    return Geometry((Group(space.tokens, rows),) * space.groups, int(config.cache.tokens_per_hash), states)


def _runs(places: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the length of each run of consecutive numbers."""
    for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        numbers = [place for _, place in run]
        yield numbers[0], len(numbers)
