"""The registration of one rank of an engine, or of its scheduler, its messages, and the identity of
a space: all that changes a block's bytes besides its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kvagent import messages as m
from kvagent.errors import Malformed
from kvagent.limits import MAX_REGIONS_MESSAGE, MAX_SEGMENTS_MESSAGE
from kvagent.wire import check_identity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


REQUIRED = ("dtype", "model", "tenant")
"""Keys that every identity needs; the tenant may be empty."""


def identity_pairs(identity: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the identity as REGISTER carries it: checked, and sorted by the bytes of its keys."""
    if missing := [key for key in REQUIRED if key not in identity]:
        raise Malformed(f"identity: {', '.join(missing)} missing")
    pairs = tuple(sorted(identity.items(), key=lambda pair: pair[0].encode(errors="surrogatepass")))
    check_identity(pairs)
    return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A registration. The defaults suit one rank. A scheduler has no sync, regions, segments."""

    instance: str
    """Names the engine; equal in all its sessions."""
    role: int
    identity: tuple[tuple[str, str], ...]
    """Sorted by key: see identity.identity_pairs."""
    groups: tuple[m.Group, ...]
    hash_tokens: int
    rank: int = 0
    world: int = 1
    shards: int = 1
    lookup_name: str = ""
    """The look-up socket to open for this space; empty for none."""
    sync: m.Sync | None = None
    regions: Sequence[tuple[m.Region, int | None]] = ()
    """Each with its descriptor, which the caller may close once registered."""
    held: Mapping[int, Mapping[int, Sequence[m.Segment]]] = field(default_factory=dict)
    """By shard and group: segments in the order in which a block's lie in the pool."""

    def messages(self, req: int) -> Iterator[tuple[m.Message, list[int]]]:
        """Yield the messages of the registration in order, with their descriptors."""
        held, shards = sorted(self.held.items()), tuple(sorted(self.held))
        segments = sum(len(one) for _, groups in held for one in groups.values())
        yield m.Register(
            req, self.instance, self.role, self.rank, self.world, shards, self.shards, self.identity, self.groups,
            self.hash_tokens, self.lookup_name, self.sync, len(self.regions), segments,
        ), []  # fmt: skip
        for part in parts(self.regions, MAX_REGIONS_MESSAGE):
            yield m.Regions(req, tuple(region for region, _ in part)), [fd for _, fd in part if fd is not None]
        for shard, groups in held:
            for group in sorted(groups):
                for some in parts(groups[group], MAX_SEGMENTS_MESSAGE):
                    yield m.Segments(req, shard, group, tuple(some)), []


_Item = TypeVar("_Item")


def parts(items: Sequence[_Item], size: int) -> list[Sequence[_Item]]:
    """Return the items in runs of at most ``size``."""
    return [items[i : i + size] for i in range(0, len(items), size)]
