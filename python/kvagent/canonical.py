"""Canonical msgpack: the shortest form of each integer, string, binary and array header, and
nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from kvagent.errors import Malformed

if TYPE_CHECKING:
    from collections.abc import Callable


pack: Callable[[object], bytes] = msgpack.Packer(use_bin_type=True).pack
"""Packs ints, str, bytes, and lists or tuples of them. Shared, because msgpack.packb allocates a
buffer per call.
"""


def unpack(data: bytes) -> Any:
    """Return the value of packed bytes, arrays as lists.

    Malformed unless ``pack`` would produce the same bytes.
    """
    try:
        value = msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True, ext_hook=_no_extension)
    except (ValueError, msgpack.exceptions.UnpackException, msgpack.exceptions.ExtraData) as error:
        raise Malformed(f"not one msgpack value: {error}") from error
    if value is None or isinstance(value, (bool, float, dict)) or pack(value) != data:
        raise Malformed("not canonical msgpack")
    return value


def _no_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} of {len(data)} bytes")
