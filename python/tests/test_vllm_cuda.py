"""KV caches on a GPU, without one: the few calls of the driver and torch are simulated."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.cuda import EVENTS, MAX_PIECES, CudaClock, CudaDriver, CudaError, NotExportable, export
from kvagent.messages import Region, RegionKind, Segment
from kvagent.registration import Registration
from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.worker.memory import memory
from kvagent.vllm.worker.side import make_clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.shm import SyncWords

UUID = b"u" * 16
PIECE = 2 << 20


@dataclass
class FakeDriver(CudaDriver):
    """Allocations of cudaMalloc, by base; virtual memory in chunks from ``virtual`` on; no other
    memory can be exported.
    """

    allocations: dict[int, int] = field(default_factory=dict)
    virtual: range = range(0)
    gap: int = -1
    open: list[int] = field(default_factory=list)

    def uuid(self, address: int) -> bytes:
        return UUID

    def legacy(self, address: int) -> bool:
        return any(base <= address < base + size for base, size in self.allocations.items())

    def shareable(self, address: int) -> bool:
        return address in self.virtual

    def range(self, address: int) -> tuple[int, int]:
        for base, size in self.allocations.items():
            if base <= address < base + size:
                return base, size
        base = self.virtual.start + (address - self.virtual.start) // PIECE * PIECE
        return (base - 1 if base == self.gap else base), PIECE

    def ipc_handle(self, base: int) -> bytes:
        return b"h" * 56 + base.to_bytes(8, "little")

    def descriptor(self, address: int) -> int:
        self.open.append(os.memfd_create("piece"))
        return self.open[-1]

    def closed(self) -> bool:
        return not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in self.open)  # noqa: PTH110


class Storage:
    def __init__(self, address: int, size: int, number: int = 1) -> None:
        self._cdata, self._address, self._size = number, address, size

    def nbytes(self) -> int:
        return self._size

    def data_ptr(self) -> int:
        return self._address


@dataclass
class Tensor:
    """Consecutive blocks of 8 float32 on a GPU."""

    storage: Storage
    index: int = 0
    blocks: int = 9

    @property
    def device(self) -> Any:
        class Device(SimpleNamespace):
            def __str__(self) -> str:
                return f"cuda:{self.index}"

        return Device(type="cuda", index=self.index)

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks, 8

    def untyped_storage(self) -> Storage:
        return self.storage

    def element_size(self) -> int:
        return 4

    def storage_offset(self) -> int:
        return 16

    def stride(self, dim: int | None = None) -> Any:
        return (8, 1) if dim is None else (8, 1)[dim]


def test_an_allocation_goes_by_its_handle_and_the_offset_in_it() -> None:
    driver = FakeDriver({0x70000000: 1 << 20})
    found = memory({"a": Tensor(Storage(0x70001000, 4096))}, [["a"]], 9, driver)
    handle = b"h" * 56 + (0x70000000).to_bytes(8, "little") + UUID
    assert found.regions == ((Region(1, RegionKind.CUDA, 4096, 0x1000, handle), None),)
    assert len(handle) == 80
    assert found.held[0] == {0: (Segment(1, 64, 32, 32),)}  # places in the region: where the tensor is in its storage
    assert str(found.device) == "cuda:0"


def test_virtual_memory_goes_by_the_descriptors_of_its_pieces() -> None:
    driver = FakeDriver(virtual=range(0x40000000, 0x40000000 + 8 * PIECE))
    found = memory({"a": Tensor(Storage(0x40000000 + PIECE + 512, 2 * PIECE))}, [["a"]], 9, driver)
    # From the second piece to the fourth, which has its last 512 bytes.
    assert [region for region, _ in found.regions] == [Region(1, RegionKind.CUDA_FD, PIECE, 0, UUID)] * 3
    assert [fd for _, fd in found.regions] == driver.open
    assert found.held[0] == {0: (Segment(1, 512 + 64, 32, 32),)}
    registration = Registration(
        instance="x", role=1, identity=(), groups=(), hash_tokens=16, regions=found.regions, held=found.held
    )
    messages = list(registration.messages(1))
    assert messages[1][1] == driver.open
    found.close()
    assert driver.closed()


@pytest.mark.parametrize(
    ("driver", "storage", "hint"),
    [
        (FakeDriver(), Storage(4096, 4096), "without --enable-sleep-mode"),
        (FakeDriver({4096: 8192}), Storage(8192, 8192), "4096 bytes beyond its allocation of 8192"),
        (FakeDriver(virtual=range(1 << 40)), Storage(0, (MAX_PIECES + 1) * PIECE), "expandable_segments:True from"),
        (FakeDriver(virtual=range(4 * PIECE), gap=PIECE), Storage(0, 4 * PIECE), "a gap before byte 2097152"),
    ],
)
def test_what_no_other_process_can_open_is_refused_with_a_hint(driver: FakeDriver, storage: Storage, hint: str) -> None:
    with pytest.raises(NotExportable, match=hint):
        memory({"a": Tensor(storage)}, [["a"]], 9, driver)
    assert driver.closed()


def test_one_bad_allocation_closes_the_good_ones() -> None:
    driver = FakeDriver(virtual=range(4 * PIECE))
    layers = {"a": Tensor(Storage(0, PIECE, 1)), "b": Tensor(Storage(1 << 40, PIECE, 2))}
    with pytest.raises(NotExportable, match="without a handle"):
        memory(layers, [["a", "b"]], 9, driver)
    assert driver.open
    assert driver.closed()


def test_one_worker_has_one_gpu() -> None:
    layers = {"a": Tensor(Storage(0, 4096)), "b": Tensor(Storage(0, 4096), 1)}
    with pytest.raises(Unsupported, match="several devices: cuda:0, cuda:1"):
        memory(layers, [["a", "b"]], 9, FakeDriver({0: 1 << 20}))


def test_a_machine_without_the_driver_says_so() -> None:
    if not _no_driver():
        pytest.skip("this machine has a CUDA driver")
    with pytest.raises(CudaError, match=r"libcuda\.so\.1 cannot be opened"):
        CudaDriver()


def _no_driver() -> bool:
    try:
        CudaDriver()
    except CudaError:
        return True
    return False


class FakeGpu:
    """A stream that runs nothing until told to."""

    def __init__(self) -> None:
        self.stream: list[tuple[str, int]] = []
        self.events = 0
        self.closed = False

    def event(self) -> Any:
        number, self.events = self.events, self.events + 1
        return SimpleNamespace(
            ipc_handle=lambda: number.to_bytes(64, "little"), record=lambda: self.stream.append(("event", number))
        )

    def word(self, words: SyncWords) -> Callable[[int], None]:
        return lambda step: self.stream.append(("word", step))

    def close(self) -> None:
        self.closed = True


def test_the_event_is_recorded_before_the_step_is_written() -> None:
    """The agent queries the event once it reads the step: an unrecorded event would count as
    fired.
    """
    gpu: Any = FakeGpu()
    sync = make_clock(SimpleNamespace(type="cuda"), gpu)
    assert isinstance(sync, CudaClock)
    for step in (1, 2, EVENTS + 1):
        sync.end(step)
    assert gpu.stream == [("event", 1), ("word", 1), ("event", 2), ("word", 2), ("event", 1), ("word", EVENTS + 1)]
    assert sync.event(EVENTS + 1) == 1
    view, off = sync.words.memory.view, sync.words.events_off
    for i in (0, 7, EVENTS - 1):
        assert bytes(view[off + 64 * i : off + 64 * (i + 1)]) == i.to_bytes(64, "little")
    place = sync.words.sync(0)
    assert (place.events, place.revoke_off) == (EVENTS, off + 64 * EVENTS)
    sync.words.revoke(3)
    assert sync.words.revocations[3]
    sync.close()
    assert gpu.closed


def test_export_names_what_failed() -> None:
    with pytest.raises(NotExportable, match="sleep mode"):
        export(FakeDriver(), 1, 0, 10)
