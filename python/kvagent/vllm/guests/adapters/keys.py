"""Requests with LoRA adapters: their blocks are keyed by the adapter's content, not by its name.

vLLM's block hash covers the name and the path that a request gives, while the content is what the
workers have loaded under vLLM's number of the adapter. So the keys of such a request are hashes of
the hashes that it would have without an adapter and of the digest of the content. Until all workers
have reported the same digest, its requests are uncached.

The engine's own cache goes by vLLM's hashes. Under one name it may have blocks of several contents
if the content changed, or if the name's requests had several numbers. A request that finds such
blocks must not be saved: the caller is told to treat all blocks as stale (``new_weights``).
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvagent.vllm.guests.adapters.loaded import ADAPTERS
from kvagent.vllm.hooks import Guest
from kvagent.vllm.internals import further_hashes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvagent.vllm.guests.adapters.loaded import LoadedAdapter
    from kvagent.vllm.plan import Report
    from kvagent.vllm.scheduler.requests import Tracked

MAX_KNOWN = 4096  # adapters, and names
ADAPTER = "lora_request"  # the reason for which a request is barred
SEVERAL = 0  # in place of a number: a name's requests had several at once


@dataclass(slots=True)
class Content:
    """What the workers have loaded under a number."""

    serial: int
    digests: list[bytes] = field(default_factory=list)
    """One of each worker that has reported it."""
    digest: bytes = b""
    """Empty unless all workers have reported the same."""


class Adapters(Guest):
    """The adapters of one engine, and the names under which its requests use them."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._contents: OrderedDict[int, Content] = OrderedDict()
        self._dropped = False  # whether a content was dropped from it
        self._alive: dict[str, Counter[int]] = {}  # by name: the numbers of its requests
        self._last: OrderedDict[str, int] = OrderedDict()  # by name: the number of its last request, or SEVERAL
        self._forgot = False  # whether a name was dropped from it
        self._never: set[Tracked] = set()  # requests that are not keyed, whatever becomes known

    def seen(self, tracked: Tracked) -> None:
        """Key a request that has arrived, if the adapter's content is known."""
        request = tracked.request
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return
        tracked.barred.add(ADAPTER)
        # The encoder may have an adapter too, a session's later turns replace hashes, and a request
        # may tell vLLM to load its adapter again in each of its steps.
        if (
            getattr(request, "mm_features", None) or getattr(request, "resumable", False)
            or getattr(lora, "load_inplace", False)
        ):  # fmt: skip
            self._never.add(tracked)
        self._name(lora)
        if not self.key(tracked):
            self.side.counts.adapters_unknown += 1

    def _name(self, lora: Any) -> None:
        """Note that a request uses a name. If others use it for another adapter, none of them is
        keyed; if others did, the engine's own cache may have blocks of that one.
        """
        name, number = str(lora.lora_name), int(lora.lora_int_id)
        alive = self._alive.setdefault(name, Counter())
        alive[number] += 1
        before = self._last.pop(name, SEVERAL if self._forgot else number)
        self._last[name] = number if len(alive) == 1 else SEVERAL
        if len(self._last) > MAX_KNOWN:
            self._last.popitem(last=False)
            self._forgot = True
        if len(alive) > 1:
            for other in self._users():
                if other.request.lora_request.lora_name == name:
                    self._unkey(other)
                    self._never.add(other)
        elif before != number:
            self.side.new_weights()

    def heard(self, report: Report, over: Any, now: float) -> None:  # noqa: ARG002
        """Key the requests whose adapters have become known, after the others were unkeyed."""
        news = report.news.get(ADAPTERS)
        if not news:
            return
        changed, known, stale = self.report(news)
        if stale:
            self.side.new_weights()
        for tracked in self._users():
            number = tracked.request.lora_request.lora_int_id
            if number in changed:
                self._unkey(tracked)
            if number in known and ADAPTER in tracked.barred:
                self.key(tracked)

    def ended(self, tracked: Tracked) -> None:
        """Forget a request."""
        self._never.discard(tracked)
        if (lora := getattr(tracked.request, "lora_request", None)) is not None:
            name = str(lora.lora_name)
            self._alive[name] -= Counter([int(lora.lora_int_id)])  # drops what has no request left
            if not self._alive[name]:
                del self._alive[name]

    def _users(self) -> list[Tracked]:
        return [one for one in self.side.requests.values() if getattr(one.request, "lora_request", None) is not None]

    def _unkey(self, tracked: Tracked) -> None:
        self.side.bar(tracked, ADAPTER)
        if isinstance(tracked.request, Adapted):
            tracked.request = tracked.request.plain

    def key(self, tracked: Tracked) -> bool:
        """Key a request by the content of its adapter. Return False if that is not known."""
        number = int(tracked.request.lora_request.lora_int_id)
        content = self._contents.get(number)
        if content is None or not content.digest or tracked in self._never:
            return False
        tracked.request = Adapted(tracked.request, content.digest)
        tracked.depends = ((number, content.serial),)
        self.side.unbar(tracked, ADAPTER)
        return True

    def report(self, some: Iterable[LoadedAdapter]) -> tuple[set[int], set[int], bool]:
        """Handle what workers have reported.

        Return the numbers whose content has changed, those whose content has become known, and
        whether the blocks in the engine's own cache have to be treated as stale.
        """
        changed: set[int] = set()
        became: set[int] = set()
        stale = False
        for one in some:
            content = self._contents.get(one.number)
            if content is None or one.serial > content.serial:
                changed.add(one.number)
                stale |= self._dropped or content is not None  # blocks of another content may be left
                self._contents[one.number] = content = Content(one.serial)
                self._contents.move_to_end(one.number)
                if len(self._contents) > MAX_KNOWN:
                    self._contents.popitem(last=False)
                    self._dropped = True
            if one.serial == content.serial:
                content.digests.append(one.digest)
                if one.digest and content.digests == [one.digest] * self._world:
                    content.digest = one.digest
                    became.add(one.number)
        return changed, became, stale


class _Plain:
    """A request of vLLM as one without an adapter, with the hashes that it has then."""

    lora_request = None

    def __init__(self, request: Any) -> None:
        self._request = request
        self.block_hashes: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class Adapted:
    """A request of vLLM whose block hashes depend on its adapter's content, whatever its name."""

    def __init__(self, request: Any, digest: bytes) -> None:
        self.plain = request
        self._unadapted = _Plain(request)
        self._digest = digest
        self._keys: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    @property
    def block_hashes(self) -> list[bytes]:
        """Return keys in place of vLLM's hashes, as many and as long as there are by now."""
        if len(self._keys) < len(self.plain.block_hashes):
            hashes = self._unadapted.block_hashes
            hashes += further_hashes(self.plain, self._unadapted)
            new = hashes[len(self._keys) :]
            self._keys += [hashlib.sha256(self._digest + one).digest()[: len(one)] for one in new]
        return self._keys
