"""The look-up forms of other projects, built as their clients build them: with msgpack and struct,
not with kvagent.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgpack

if TYPE_CHECKING:
    from collections.abc import Sequence


def ascend(tokens: int, hashes: Sequence[bytes], groups: Sequence[int] | None, hbm_tokens: int | None) -> list[bytes]:
    """AscendStore: 2 frames, 3 with groups, 4 with groups and hbm_tokens."""
    frames = [tokens.to_bytes(4, "big")]
    if groups is not None:
        frames.append(msgpack.packb(list(groups)))
    if hbm_tokens is not None:
        frames.append(hbm_tokens.to_bytes(4, "big"))
    return [*frames, msgpack.packb([one.hex() for one in hashes])]


def upstream(tokens: int, hashes: Sequence[bytes], hash_len: int) -> list[bytes]:
    """vLLM's MooncakeStoreConnector."""
    return [b"lookup", struct.pack(">I", tokens), struct.pack(">H", hash_len), b"".join(hashes)]


def simple(tokens: int, hashes: Sequence[bytes]) -> list[bytes]:
    """The simple form."""
    return [struct.pack("<Q", tokens), *hashes]
