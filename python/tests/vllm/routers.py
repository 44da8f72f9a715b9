"""Models of routers, fed with an engine's own stream of KV events: one that counts stores and
removes, as llm-d's does, and one that keeps a set and refuses blocks with an unknown parent, as
Dynamo's does. Both expect more than the real ones tolerate.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgpack
import zmq

from kvagent.lookup import LookupClient, Want
from kvagent.vllm.scheduler.requests import USUAL

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

LATE_S = 0.5
"""The longest that a router credits a block that is gone, while agent, engine and machine run and
no more than a step's worth of blocks changes (docs/vllm/events.md).
"""
LOOK_S = 0.1  # what the time between two looks counts at most: a machine that stalls ages nothing

MEDIA = ("CPU", "STORAGE")  # of the agent; others are vLLM's own


class Routers:
    """Both routers, of one engine."""

    def __init__(self, media: tuple[str, ...] = MEDIA) -> None:
        """``media``: those that the agent's blocks are told in."""
        self._media = media
        self.counted: Counter[tuple[int, str]] = Counter()
        """By llm-d: how often a block was stored in one of the agent's media and not removed."""
        self.known: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """By Dynamo: parent and tokens of each block that the agent has."""
        self.media: dict[int, set[str]] = {}
        """By Dynamo: where."""
        self.salts: dict[int, Any] = {}
        self.stores = self.removes = self.clears = 0
        self.largest = 0
        """Blocks of the largest batch."""

    def take(self, payload: bytes) -> None:
        """Take a batch."""
        before = self.stores
        _, events, *_ = msgpack.unpackb(payload)
        for event in events:
            self._take(event)
        self.largest = max(self.largest, self.stores - before)

    def prefix(self, hashes: list[int]) -> int:
        """Return how many of a prompt's first blocks are credited, by both routers alike."""
        held = {one for (one, _), count in self.counted.items() if count > 0}
        counted = next((i for i, one in enumerate(hashes) if one not in held), len(hashes))
        known = next((i for i, one in enumerate(hashes) if one not in self.known), len(hashes))
        assert counted == known
        return counted

    def check(self) -> None:
        """Check that the two agree block by block: n stores, n removes."""
        assert set(self.counted.values()) <= {0, 1}
        assert {one for one, count in self.counted.items() if count} == self.places()

    def places(self) -> set[tuple[int, str]]:
        """Return each block that is known, with each of its media."""
        return {(one, medium) for one, media in self.media.items() for medium in media}

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.counted.clear()
            self.known.clear()
            self.media.clear()
            self.clears += 1
        elif event["medium"] not in self._media:
            return
        elif kind == "BlockStored":
            self._store(event)
        else:
            assert kind == "BlockRemoved"
            self.removes += len(event["block_hashes"])
            for one in event["block_hashes"]:
                self.counted[one, event["medium"]] -= 1
                self.media[one].remove(event["medium"])
                if not self.media[one]:
                    assert one not in {parent for parent, _ in self.known.values()}, "removed before those after it"
                    del self.media[one], self.known[one]

    def _store(self, event: dict[str, Any]) -> None:
        hashes, size, parent = event["block_hashes"], event["block_size"], event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(hashes)
        assert event["group_idx"] == 0
        assert event["kv_cache_spec_kind"] == "full_attention"
        assert "locality" not in event
        assert "ownership" not in event
        assert parent is None or parent in self.known, "stored before its parent"
        self.stores += len(hashes)
        for i, one in enumerate(hashes):
            media = self.media.setdefault(one, set())
            assert event["medium"] not in media, "stored twice"
            media.add(event["medium"])
            self.counted[one, event["medium"]] += 1
            self.known[one] = parent, tuple(event["token_ids"][i * size : (i + 1) * size])
            self.salts[one] = event["extra_keys"][i]
            parent = one


class Subscribed(Routers):
    """Routers that subscribe to a publisher's endpoint."""

    def __init__(self, endpoint: str, media: tuple[str, ...] = MEDIA) -> None:
        super().__init__(media)
        self.endpoint = endpoint
        self._next = -1  # sequence number
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    def hear(self) -> int:
        """Read what has arrived. Return the number of batches."""
        batches = 0
        while self._socket.poll(0):
            _, sequence, payload = self._socket.recv_multipart()
            number = int.from_bytes(sequence, "big")
            assert self._next in (-1, number), f"batch {number}, expected {self._next}"
            self._next = number + 1
            batches += 1
            self.take(payload)
        return batches


class Lateness:
    """For how long blocks are credited that were found to be gone."""

    def __init__(self) -> None:
        self.longest = 0.0
        """In seconds in which agent and engines went on."""
        self.seen = 0
        """Blocks that were credited when they were gone."""
        self.clock = 0.0
        """Seconds so far."""
        self._last = time.monotonic()
        self._since: dict[Hashable, float] = {}

    def due(self) -> bool:
        """Return whether the last look was some time ago."""
        return time.monotonic() > self._last + LOOK_S / 4

    def look(self, late: Iterable[Hashable]) -> None:
        """Take the blocks that are credited now, though a look-up before did not find them."""
        now = time.monotonic()
        self.clock += min(now - self._last, LOOK_S)
        self._last = now
        late = set(late)
        self.seen += len(late - self._since.keys())
        self._since = {one: self._since.get(one, self.clock) for one in late}
        self.longest = max([self.longest, *(self.clock - since for since in self._since.values())])

    def check(self) -> None:
        """Check that no router has credited a block for too long."""
        assert self.longest <= LATE_S, f"credited for {self.longest:.2f} s after it was gone"


class Prompts:
    """The prompts that an engine has served, and what is held of them."""

    def __init__(self, side: Any, block: int) -> None:
        """``side``: of the connector's scheduler. ``block``: tokens of a block."""
        self.side = side
        self.hashes: dict[tuple[int, ...], list[bytes]] = {}
        """The block hashes of each prompt with its answer."""
        self._block = block
        finished = side.finished

        def note(request: Any, **more: Any) -> Any:
            if hashes := list(request.block_hashes):
                self.hashes[tuple(request.all_token_ids)] = hashes
            return finished(request, **more)

        side.finished = note

    def held(self, routers: Routers | None = None) -> dict[tuple[int, ...], int]:
        """Return how many of the first blocks of each prompt the agent has; with ``routers``, only
        of those that they credit blocks of.
        """
        lookups = self.side.agent.lookups
        prompts = [
            prompt for prompt, hashes in self.hashes.items() if routers is None or routers.prefix(named(hashes[:1]))
        ]
        if lookups is None:
            return dict.fromkeys(prompts, -1)
        client = LookupClient(lookups._session.registered.lookup_path, 10.0)
        try:
            found = {}
            for prompt in prompts:
                hashes = self.hashes[prompt]
                asked = lookups._request(Want.PROBE, len(hashes) * self._block + 1, 0, hashes, USUAL)
                found[prompt] = client.lookup(asked).tokens // self._block
            return found
        finally:
            client.close()

    def credited(self, routers: Routers) -> dict[tuple[int, ...], int]:
        """Return the same by routers."""
        return {prompt: routers.prefix(named(hashes)) for prompt, hashes in self.hashes.items()}

    def late(self, routers: Routers, held: dict[tuple[int, ...], int]) -> set[int]:
        """Return the blocks that routers credit beyond what was ``held``."""
        return {
            one
            for prompt, blocks in held.items()
            for one in named(self.hashes[prompt])[max(blocks, 0) : routers.prefix(named(self.hashes[prompt]))]
        }

    def check_tokens(self, routers: Routers) -> None:
        """Check that each known block has the tokens that it was computed for."""
        for prompt, hashes in self.hashes.items():
            for i, one in enumerate(named(hashes)):
                if one in routers.known:
                    assert routers.known[one][1] == prompt[i * self._block : (i + 1) * self._block]


def named(hashes: list[bytes]) -> list[int]:
    """Return hashes as events name them."""
    return [int.from_bytes(one, "big") & (1 << 64) - 1 for one in hashes]
