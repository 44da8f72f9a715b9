from __future__ import annotations

import mmap
import os
import struct

import pytest

from kvagent.messages import Region, RegionKind
from kvagent.shm import SharedMemory, SyncWords


def test_memory_is_shared_by_its_descriptor_and_cannot_change_size() -> None:
    memory = SharedMemory(8192)
    memory.view[4096:4101] = b"bytes"
    with mmap.mmap(memory.fd, 8192, prot=mmap.PROT_READ) as other:
        assert other[4096:4101] == b"bytes"
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    assert memory.region(7) == Region(7, RegionKind.FD, 8192)
    memory.close()
    memory.close()


def test_words_lie_where_the_placement_says() -> None:
    words = SyncWords(5, events=3, cell=64)
    sync = words.sync(9)
    words.step = 2**40 + 1
    words.put_handle(2, b"h" * 64)
    words.revoke(4)
    raw = bytes(words.memory.view)
    assert struct.unpack_from("<Q", raw, sync.step_off) == (2**40 + 1,)
    assert raw[sync.events_off + 2 * 64 :][:64] == b"h" * 64
    assert struct.unpack_from("<5I", raw, sync.revoke_off) == (0, 0, 0, 0, 1)
    assert (sync.region, sync.events, sync.revokes) == (9, 3, 5)
    assert sync.events_off % 8 == 0
    assert sync.revoke_off % 4 == 0
    assert sync.revoke_off + 5 * 4 <= words.memory.size
    words.close()


def test_words_out_of_range_are_refused() -> None:
    words = SyncWords(1)
    with pytest.raises(IndexError):
        words.revoke(1)
    words.revoke(0)
    words.clear_revoke(0)
    assert struct.unpack_from("<I", words.memory.view, words.revoke_off) == (0,)
    words.close()
