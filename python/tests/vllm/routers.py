"""Models of routers, fed with an engine's own stream of KV events: one that counts stores and
removes, as llm-d's does, and one that keeps a set and refuses blocks with an unknown parent, as
Dynamo's does. Both expect more than the real ones tolerate.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgpack
import zmq

CPU = "CPU"


class Routers:
    """Both routers, subscribed to a publisher's endpoint."""

    def __init__(self, endpoint: str) -> None:
        self.counted: Counter[int] = Counter()
        """By llm-d: how often a block in CPU memory was stored and not removed."""
        self.known: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """By Dynamo: parent and tokens of each block in CPU memory."""
        self.salts: dict[int, Any] = {}
        self.stores = self.removes = self.clears = 0
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
            _, events, *_ = msgpack.unpackb(payload)
            for event in events:
                self._take(event)
        return batches

    def prefix(self, hashes: list[int]) -> int:
        """Return how many of a prompt's first blocks are credited, by both routers alike."""
        counted = next((i for i, one in enumerate(hashes) if self.counted[one] <= 0), len(hashes))
        known = next((i for i, one in enumerate(hashes) if one not in self.known), len(hashes))
        assert counted == known
        return counted

    def check(self) -> None:
        """Check that the two agree block by block: n stores, n removes."""
        assert set(self.counted.values()) <= {0, 1}
        assert {one for one, count in self.counted.items() if count} == set(self.known)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.counted.clear()
            self.known.clear()
            self.clears += 1
        elif event["medium"] != CPU:
            return
        elif kind == "BlockStored":
            self._store(event)
        else:
            assert kind == "BlockRemoved"
            self.removes += len(event["block_hashes"])
            for one in event["block_hashes"]:
                self.counted[one] -= 1
                assert one not in {parent for parent, _ in self.known.values()}, "removed before those after it"
                del self.known[one]

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
            assert one not in self.known, "stored twice"
            self.counted[one] += 1
            self.known[one] = parent, tuple(event["token_ids"][i * size : (i + 1) * size])
            self.salts[one] = event["extra_keys"][i]
            parent = one
