"""Requests of engines whose blocks depend on the next token too (drafts): their keys cover it.

The last block of a prompt whose tokens end with it has no key before the first output token is
known. vLLM's own cache, which goes by hashes without that token, may give a request blocks that
were computed before another one, so blocks found there are never saved (Geometry.following).
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Any

from kvagent.vllm.hooks import Guest

if TYPE_CHECKING:
    from kvagent.vllm.scheduler.requests import Tracked


class Following(Guest):
    """Keys the requests of such an engine. After it, no guest keys them otherwise."""

    def seen(self, tracked: Tracked) -> None:
        """Key a request by its tokens and the one after each block, or bar it."""
        if keyable(tracked.request):
            tracked.request = Followed(tracked.request, self.side.geometry.hash_tokens)
        else:
            self.side.bar(tracked, "following")


class Followed:
    """A request of vLLM whose block hashes cover the token after each block."""

    def __init__(self, request: Any, hash_tokens: int) -> None:
        self._request = request
        self._hash_tokens = hash_tokens
        self._keys: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    @property
    def block_hashes(self) -> list[bytes]:
        """Return keys as long as vLLM's hashes: of the blocks whose next token is known."""
        hashes, size, keys = self._request.block_hashes, self._hash_tokens, self._keys
        most = min(len(hashes), (self._request.num_tokens - 1) // size)
        if len(keys) < most:
            tokens = self._request.all_token_ids
            for i in range(len(keys), most):
                following = struct.pack("<q", tokens[(i + 1) * size])
                keys.append(hashlib.sha256(hashes[i] + following).digest()[: len(hashes[i])])
        return keys


def keyable(request: Any) -> bool:
    """Return whether tokens are all that a request's KV depends on: an item, an embedding or an
    adapter is not covered for the next token, and a session's later turns replace tokens.
    """
    others = ("mm_features", "lora_request", "resumable")
    return getattr(request, "prompt_embeds", None) is None and not any(getattr(request, name, None) for name in others)
