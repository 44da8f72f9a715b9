"""The identity of a space (all that changes a block's bytes besides its tokens) and its
fingerprint.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvagent.errors import Malformed
from kvagent.fields import pack
from kvagent.wire import check_identity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvagent.messages import Group

SPACE_BYTES = 16
REQUIRED = ("dtype", "model", "tenant")
"""Keys that every identity needs; the tenant may be empty."""


def identity_pairs(identity: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the identity as REGISTER carries it: checked, and sorted by the bytes of its keys."""
    if missing := [key for key in REQUIRED if key not in identity]:
        raise Malformed(f"identity: {', '.join(missing)} missing")
    pairs = tuple(sorted(identity.items(), key=lambda pair: pair[0].encode(errors="surrogatepass")))
    check_identity(pairs)
    return pairs


def fingerprint(identity: Sequence[tuple[str, str]], shards: int, hash_tokens: int, groups: Sequence[Group]) -> bytes:
    """Return the space: the first 16 bytes of SHA-256 over ``[identity, shards, hash_tokens,
    [[block_tokens, window], ...]]``.

    The agent computes it too and returns it in REGISTERED; equal values confirm that both agree.
    """
    canonical = pack([list(identity), shards, hash_tokens, [[group.block_tokens, group.window] for group in groups]])
    return hashlib.sha256(canonical).digest()[:SPACE_BYTES]
