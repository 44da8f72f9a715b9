"""Draft models whose KV depends on the next token (EAGLE, MTP), and which of them are served.

The KV of such a layer at a position is made of the target's hidden state there and of the next
token. A block's hash does not cover the token after the block, on which the KV of its last position
depends. So the keys of blocks cover it too. What else their bytes may depend on has to be excluded:
docs/decisions/2026-11-23-adapters-and-drafts.md.

The last block of a prompt whose tokens end with it has no key before the first output token is
known. vLLM's own cache, which goes by hashes without that token, may give a request blocks that
were computed before another one, so blocks found there are never saved (Geometry.following).
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Any

from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.hooks import Guest
from kvagent.vllm.options import LAZY, OptionError

if TYPE_CHECKING:
    from kvagent.vllm.options import Options
    from kvagent.vllm.scheduler.requests import Tracked

_OF_NEXT_TOKENS = ("eagle", "eagle3", "mtp")  # speculation methods
_LAYERS = {"mtp": ("n_predict", "num_nextn_predict_layers")}
"""The numbers of draft layers in a draft model's configuration, by method."""


def following_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many tokens after a block its bytes depend on: 0 or 1.

    Unsupported says which draft model cannot be served, and why.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    method = str(getattr(speculative, "method", None) or "")
    if method not in _OF_NEXT_TOKENS:
        for i, group in enumerate(kv_cache_config.kv_cache_groups):
            if getattr(group, "is_eagle_group", False):
                raise Unsupported(f"KV cache group {i} holds layers of a draft model of an unknown method, {method}")
        return 0
    for reason in _reasons(vllm_config, speculative, method):
        raise Unsupported(f"speculative_config.method {method}: {reason}. Such draft models are not supported")
    return 1


def check_options(following: int, options: Options) -> None:
    """Raise OptionError if blocks were saved by vLLM's hash alone, which tells too little."""
    if following and options.offload == LAZY:
        raise OptionError("offload: lazy, allowed is eager for draft models whose KV depends on the next token")


def _reasons(vllm_config: Any, speculative: Any, method: str) -> Any:
    """Yield why the bytes of a draft model's blocks may depend on more than the next token."""
    tokens = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if tokens is None or not _defers():
        yield "before vLLM 0.33, saves do not wait for what the draft model computes in their step"
    elif tokens != 1:
        yield f"its KV depends on the next {tokens} tokens; 1 is served"
    if not getattr(vllm_config, "use_v2_model_runner", False):
        yield "vLLM's first model runner leaves its KV out while a request is near max_model_len"
    layers = _layers(speculative, method)
    if layers != 1:
        yield f"it has {layers} layers with KV, and the later ones depend on what its cache held before; 1 is served"


def _layers(speculative: Any, method: str) -> int:
    config = getattr(getattr(speculative, "draft_model_config", None), "hf_config", None)
    found = [getattr(config, name, None) for name in _LAYERS.get(method, ("num_hidden_layers",))]
    return max((int(one) for one in found if one is not None), default=0)


def _defers() -> bool:
    """Return whether vLLM ends a connector's step after the draft model's pass."""
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    return hasattr(ActiveKVConnector, "finalize_step")


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
