"""A stream waits for a load by the agent's event, but only once that is recorded."""

from __future__ import annotations

import struct

import pytest

from kvagent.cuda.driver import CudaError
from kvagent.cuda.load_events import LoadEvents

STREAM = 77


class RecordingDriver:
    """A driver that records its calls."""

    def __init__(self, broken: bytes = b"") -> None:
        self.calls: list[tuple[str, int]] = []
        self._broken = broken

    def open_event(self, handle: bytes) -> int:
        if handle == self._broken:
            raise CudaError("cuIpcOpenEventHandle: CUDA_ERROR_INVALID_HANDLE")
        self.calls.append(("open", handle[0]))
        return handle[0]

    def wait_event(self, stream: int, event: int) -> None:
        assert stream == STREAM
        self.calls.append(("wait", event))

    def destroy_event(self, event: int) -> None:
        self.calls.append(("destroy", event))


def handles(*first: int) -> bytes:
    return b"".join(bytes([one]) * 64 for one in first)


def test_waits_only_for_what_is_recorded() -> None:
    driver, words = RecordingDriver(), bytearray(16)
    events = LoadEvents(driver, handles(10, 11), memoryview(words))
    assert not events.wait(STREAM, 5)  # a wait for it would be over at once
    struct.pack_into("@Q", words, 8, 5)
    assert events.wait(STREAM, 5)
    assert not events.wait(STREAM, 7)  # the same word, and another job
    assert not events.wait(STREAM, 4)
    events.close()
    assert driver.calls == [("open", 10), ("open", 11), ("wait", 11), ("destroy", 11), ("destroy", 10)]


def test_an_event_that_does_not_open_leaves_none() -> None:
    driver = RecordingDriver(broken=bytes([12]) * 64)
    with pytest.raises(CudaError):
        LoadEvents(driver, handles(10, 11, 12), memoryview(bytearray(24)))
    assert driver.calls[2:] == [("destroy", 11), ("destroy", 10)]
