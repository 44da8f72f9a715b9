"""Sections of a job in wire form, packed once at planning time and sent unchanged by every rank.

The bytes are those that wire.encode produces for the same Sections (canonical msgpack), at a
fraction of the cost: an engine packs tens of sections in every step.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvagent.errors import Malformed
from kvagent.limits import MAX_GROUPS, MAX_HASH, MAX_JOB_BLOCKS, MAX_SECTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

_SMALL = [bytes([i]) for i in range(128)]  # msgpack's positive fixint
_BIN8 = [b"\xc4" + bytes([i]) for i in range(256)]
_BIN16, _BIN32 = struct.Struct(">BH"), struct.Struct(">BI")
_ARRAY16 = struct.Struct(">BH")
_ID = struct.Struct("<I")
_SECTION = b"\x95"  # an array of 5


@dataclass(frozen=True, slots=True)
class Packed:
    """Sections of a job: ``data`` is their msgpack array, ``blocks`` the number of blocks."""

    data: bytes
    blocks: int

    def __reduce__(self) -> tuple[type[Packed], tuple[bytes, int]]:  # a tenth of the time of a dataclass's default
        return Packed, (self.data, self.blocks)


def section(group: int, parent: bytes, hashes: Sequence[bytes], ids: Sequence[int]) -> bytes:
    """Return one section, a run of chained blocks.

    ``parent``: the hash before the first one, or empty. ``ids``: the engine's block IDs.
    """
    joined = b"".join(hashes)
    size, count = len(hashes[0]), len(hashes)
    if not 0 <= group < MAX_GROUPS or not 1 <= size <= MAX_HASH or count != len(ids) or len(joined) != size * count:
        raise Malformed(f"section of group {group}: {len(joined)} bytes of {count} hashes and {len(ids)} blocks")
    if parent and len(parent) != size:
        raise Malformed(f"section of group {group}: parent of {len(parent)} bytes, allowed is 0 or {size}")
    blocks = _ID.pack(ids[0]) if count == 1 else struct.pack(f"<{count}I", *ids)
    return b"".join(
        (
            _SECTION, _SMALL[group], _BIN8[len(parent)], parent, _SMALL[size],
            _BIN8[len(joined)] if len(joined) < 256 else _bin(len(joined)), joined,
            _BIN8[len(blocks)] if len(blocks) < 256 else _bin(len(blocks)), blocks,
        )
    )  # fmt: skip


def packed(sections: Sequence[bytes], blocks: int) -> Packed:
    """Return the sections of one job, each made by ``section``; ``blocks`` is their number of
    blocks.
    """
    count = len(sections)
    if not 1 <= count <= MAX_SECTIONS or blocks > MAX_JOB_BLOCKS:
        raise Malformed(f"{count} sections of {blocks} blocks, allowed is 1 to {MAX_SECTIONS} of {MAX_JOB_BLOCKS}")
    head = bytes([0x90 | count]) if count < 16 else _ARRAY16.pack(0xDC, count)
    return Packed(head + b"".join(sections), blocks)


def _bin(size: int) -> bytes:
    return _BIN16.pack(0xC5, size) if size < 1 << 16 else _BIN32.pack(0xC6, size)
