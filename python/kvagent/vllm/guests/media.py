"""Requests with images, audio or video: their blocks are keyed by the items' content, not by their
identifiers.

vLLM's block hash covers the identifier of each item. A client may choose it, and nothing
distinguishes a chosen identifier from a hash of the content. So the keys of such a request's
blocks, from the first item on, are hashes of vLLM's hash and the items' processed content. vLLM's
own caches of blocks and encoder outputs use the identifiers: once one identifier had two contents,
blocks computed for it may belong to either, and such requests are bypassed.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import sys
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from kvagent.vllm.hooks import Guest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.vllm.scheduler.requests import Tracked

MAX_NAMES = 1 << 17  # more names than an engine's caches hold
CONTENT, TRUST, BYPASS = "content", "trust", "bypass"
ITEMS = "mm_features"  # the reason for which a request is barred

log = logging.getLogger("vllm.kvagent")


class Unhashable(TypeError):
    """An item whose content is elsewhere, or of an unknown type."""


class Media(Guest):
    """The contents of an engine's items. ``how`` is the option: content or bypass."""

    def __init__(self, how: str, hash_tokens: int, *, multimodal: bool = True) -> None:
        self._how = how
        self._multimodal = multimodal
        self._hash_tokens = hash_tokens
        self._contents: OrderedDict[str, tuple[bytes, Any]] = OrderedDict()  # digest by name, and the object it is of
        self._ambiguous: set[str] = set()

    def seen(self, tracked: Tracked) -> None:
        """Key a request by its items, or bar it."""
        request = tracked.request
        features = getattr(request, "mm_features", None) or ()
        if getattr(request, "resumable", False) and self._multimodal:
            self._bar(tracked)  # a session's later turns bring items, and replace tokens that have keys
            return
        if not features:
            return
        names, before = {str(one.identifier) for one in features}, len(self._ambiguous)
        if self._how == CONTENT:
            items = [(int(one.mm_position.offset), self._content(str(one.identifier), one)) for one in features]
            if len(self._ambiguous) > before:
                self._bar_all()
            if not names & self._ambiguous:
                tracked.request = Keyed(request, items, self._hash_tokens)
                self.side.unbar(tracked, ITEMS)
                return
        self._bar(tracked)

    def _bar(self, tracked: Tracked) -> None:
        self.side.counts.media_bypassed += 1
        self.side.bar(tracked, ITEMS)

    def _bar_all(self) -> None:
        """Bar the requests with an item of a name that has become ambiguous."""
        if len(self._ambiguous) > MAX_NAMES:
            self._how = BYPASS
            log.warning("items of %d names had several contents: no request with items is saved or loaded", MAX_NAMES)
        for one in self.side.requests.values():
            items = one.request if isinstance(one.request, Keyed) else None
            if items is not None and ITEMS not in one.barred and items.names & self._ambiguous:
                self._bar(one)

    def _content(self, name: str, feature: Any) -> bytes:
        """Return the digest of an item's content, computed once per object: vLLM keeps repeated
        items.
        """
        digest, owner = self._contents.pop(name, (b"", None))
        if owner is None or feature.data is None or owner() is not feature.data:
            try:
                content, owner = content_digest(str(feature.modality), feature.data), weakref.ref(feature.data)
            except Unhashable as reason:
                log.debug("item %s: %s", name, reason)
                content, owner = b"", None
            if not content or (digest and content != digest):
                self._ambiguous.add(name)
            digest = content
        self._contents[name] = digest, owner
        if len(self._contents) > MAX_NAMES:
            self._contents.popitem(last=False)
        return digest


class Keyed:
    """A request of vLLM with other block hashes."""

    def __init__(self, request: Any, items: Sequence[tuple[int, bytes]], hash_tokens: int) -> None:
        """``items``: the first token and the content of each."""
        self._request = request
        self.names = {str(one.identifier) for one in request.mm_features}
        """The identifiers of its items."""
        self._items = sorted(items)
        self._hash_tokens = hash_tokens
        self._seen = hashlib.sha256()  # items that begin before the end of the last key
        self._taken = 0
        self._keys: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    @property
    def block_hashes(self) -> list[bytes]:
        """Return keys in place of vLLM's hashes, as many and as long as there are by now."""
        hashes = self._request.block_hashes
        for i in range(len(self._keys), len(hashes)):
            while self._taken < len(self._items) and self._items[self._taken][0] < (i + 1) * self._hash_tokens:
                begin, content = self._items[self._taken]
                self._seen.update(struct.pack("<Q", begin) + content)
                self._taken += 1
            key = self._seen.copy()
            key.update(hashes[i])
            self._keys.append(key.digest()[: len(hashes[i])] if self._taken else hashes[i])
        return self._keys


def content_digest(modality: str, data: Any) -> bytes:
    """Return the digest of an item's fields (vLLM's MultiModalKwargsItem), or raise Unhashable."""
    if data is None or "monotonic_id" in data:
        raise Unhashable("its content is in the workers")  # vLLM's shared-memory cache passes a reference
    digest = _hasher()
    digest.update(modality.encode() + b"\0")
    for name in sorted(data):
        digest.update(struct.pack("<Q", len(name)) + name.encode())
        _add(digest, getattr(data[name], "data", None))
    return bytes(digest.digest())


def _hasher() -> Any:
    """Return BLAKE3, which vLLM uses for items too and which is several times as fast; SHA-256
    without it.
    """
    try:
        from blake3 import blake3
    except ImportError:
        return hashlib.sha256(b"sha256")
    return blake3()


def _add(digest: Any, value: Any) -> None:
    if value is None or isinstance(value, (bool, int, float, str)):
        text = f"{type(value).__name__} {value!r}".encode()
        digest.update(struct.pack("<Q", len(text)) + text)
    elif isinstance(value, (list, tuple)):
        digest.update(b"[" + struct.pack("<Q", len(value)))
        for one in value:
            _add(digest, one)
    elif (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        head = f"{value.dtype} {tuple(value.shape)}".encode()
        digest.update(struct.pack("<Q", len(head)) + head)
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    else:
        raise Unhashable(f"a field of type {type(value).__name__}")
