"""Packed sections have the same bytes as the codec's."""

from __future__ import annotations

import random
import struct

import pytest

from kvagent import messages as m
from kvagent.errors import Malformed
from kvagent.limits import MAX_JOB_BLOCKS, MAX_SECTIONS
from kvagent.wire import HEADER_BYTES, Packed, decode, encode, frame, job_frame, packed, section

SIZES = (1, 2, 7, 8, 63, 64, 255, 256, 2000)  # around the places where a header grows


def plainly(group: int, hashes: list[bytes], ids: list[int], parent: bytes = b"") -> m.Section:
    return m.Section(group, parent, len(hashes[0]), b"".join(hashes), struct.pack(f"<{len(ids)}I", *ids))


def test_any_sections_are_packed_as_the_codec_packs_them() -> None:
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    for _ in range(200):
        plain: list[m.Section] = []
        bare: list[bytes] = []
        for _ in range(dice.choice((1, 2, 15, 16, MAX_SECTIONS))):
            length = dice.choice((1, 16, 31, 32))
            count = dice.choice(SIZES[: 5 if len(plain) > 3 else None])
            hashes = [dice.randbytes(length) for _ in range(count)]
            ids = [dice.randrange(1 << 32) for _ in range(count)]
            parent = dice.choice((b"", dice.randbytes(length)))
            group = dice.randrange(16)
            plain.append(plainly(group, hashes, ids, parent))
            bare.append(section(group, parent, hashes, ids))
        blocks = sum(len(one.blocks) // 4 for one in plain)
        if blocks > MAX_JOB_BLOCKS:
            continue
        a, b, c, d = (dice.randrange(1 << dice.choice((7, 8, 16, 31))) for _ in range(4))
        one, sections = packed(bare, blocks), tuple(plain)
        load, save = m.Load(a, b, c, d, 5, sections), m.Save(a, b, c, d, 5, sections)
        assert job_frame(m.Load, (a, b, c, d, 5), one) == frame(encode(load)), f"seed {seed}"
        assert job_frame(m.Save, (a, b, c, d, 5), one) == frame(encode(save)), f"seed {seed}"
        assert decode(job_frame(m.Load, (a, b, c, d, 5), one)[HEADER_BYTES:]) == load


def test_what_is_out_of_range_is_not_packed() -> None:
    for group, parent, hashes, ids in (
        (16, b"", [b"h"], [1]),
        (0, b"pp", [b"h"], [1]),
        (0, b"", [b"h" * 33], [1]),
        (0, b"", [b"h", b"hh"], [1, 2]),
        (0, b"", [b"h", b"i"], [1]),
        (0, b"", [b""], [1]),
    ):
        with pytest.raises(Malformed, match="section of group"):
            section(group, parent, hashes, ids)
    one = section(0, b"", [b"h"], [1])
    for sections, blocks in (([], 0), ([one] * (MAX_SECTIONS + 1), MAX_SECTIONS + 1), ([one], MAX_JOB_BLOCKS + 1)):
        with pytest.raises(Malformed, match="sections of"):
            packed(sections, blocks)


def test_a_frame_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(Malformed, match="bytes, at most"):
        job_frame(m.Load, (1, 1, 1, 1, 1), Packed(b"\x90" * (1 << 20), 1))


def test_a_jobs_fields_are_in_their_ranges() -> None:
    one = packed([section(0, b"", [b"h"], [1])], 1)
    with pytest.raises(Malformed, match=r"Load.epoch: 4294967296 is not an integer from 0 to 4294967295"):
        job_frame(m.Load, (1, 1 << 32, 1, 1, 1), one)
    with pytest.raises(Malformed, match=r"Save.step: -1"):
        job_frame(m.Save, (1, 1, -1, 1, 1), one)
    lease = m.Load(1, 1, 1 << 40, 1, 1 << 50, (plainly(0, [b"h"], [1]),))
    assert job_frame(m.Load, (1, 1, 1 << 40, 1, 1 << 50), one) == frame(encode(lease))
