"""GPU memory and events shared with another process of this machine. Imports no torch by itself.

The CUDA driver calls in use go through ctypes (see the driver API's reference). GPU memory becomes
regions of a registration (docs/PROTOCOL.md, "Region kinds") by its address alone. Memory of
cudaMalloc has one IPC handle for the whole allocation, of which the region is a part. Virtual
memory (such as torch's expandable segments) consists of chunks, each with its own descriptor. Each
call needs a thread with a current CUDA context, like a worker's main thread.

A GPU's clock is its compute stream, which itself signals its progress to the agent: after a step's
kernels it records the step's event, then writes the step's number into host memory that the agent
maps. Nothing waits. When the agent reads the number, the event was recorded and has fired.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.errors import KVAgentError
from kvagent.limits import MAX_REGIONS
from kvagent.messages import Region, RegionKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.shm import SyncWords


IPC_HANDLE = 64  # bytes of a CUipcMemHandle
UUID = 16  # bytes
MAX_PIECES = MAX_REGIONS - 64  # of all virtual memory of a worker; the rest is for other regions

_LIBRARY = "libcuda.so.1"
_DEVICE_ORDINAL, _LEGACY_IPC, _ALLOWED_HANDLES = 9, 10, 14  # CU_POINTER_ATTRIBUTE_...
_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class CudaError(KVAgentError):
    """A driver call failed. The text names the call and the driver's error."""


class CudaDriver:
    """The driver. Addresses and sizes are in bytes."""

    def __init__(self, library: str = _LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(f"{library} cannot be opened: {error}") from error

    def uuid(self, address: int) -> bytes:
        """Return the UUID of the memory's GPU."""
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), self._attribute(_DEVICE_ORDINAL, address))
        uuid = ctypes.create_string_buffer(UUID)
        self._call("cuDeviceGetUuid_v2", uuid, device)
        return uuid.raw

    def legacy(self, address: int) -> bool:
        """Return whether the memory came from cudaMalloc, and so has an IPC handle."""
        return bool(self._attribute(_LEGACY_IPC, address))

    def shareable(self, address: int) -> bool:
        """Return whether it is virtual memory that can be exported as a descriptor."""
        return bool(self._attribute(_ALLOWED_HANDLES, address) & _POSIX_FD)

    def range(self, address: int) -> tuple[int, int]:
        """Return base and size of the address's allocation; for virtual memory, of its chunk."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def ipc_handle(self, base: int) -> bytes:
        """Return the handle of an allocation of cudaMalloc."""
        handle = ctypes.create_string_buffer(IPC_HANDLE)
        self._call("cuIpcGetMemHandle", handle, ctypes.c_uint64(base))
        return handle.raw

    def descriptor(self, address: int) -> int:
        """Return a new descriptor, to be closed, of the address's chunk of virtual memory."""
        piece, fd = ctypes.c_uint64(), ctypes.c_int(-1)
        self._call("cuMemRetainAllocationHandle", ctypes.byref(piece), ctypes.c_void_p(address))
        try:
            self._call("cuMemExportToShareableHandle", ctypes.byref(fd), piece, _POSIX_FD, ctypes.c_uint64(0))
        finally:
            self._call("cuMemRelease", piece)
        return fd.value

    def _attribute(self, attribute: int, address: int) -> int:
        value = ctypes.c_uint64()  # as large as the largest attribute
        self._call("cuPointerGetAttribute", ctypes.byref(value), attribute, ctypes.c_uint64(address))
        return value.value

    def _call(self, name: str, *arguments: object) -> None:
        result = self._function(name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._function("cuGetErrorName")(result, ctypes.byref(text))
            raise CudaError(f"{name}: {text.value.decode() if text.value else result}")

    def _function(self, name: str) -> Callable[..., int]:
        try:
            function: Callable[..., int] = getattr(self._library, name)
        except AttributeError as error:
            raise CudaError(f"{name}: {error}: install a newer CUDA driver") from error
        return function


class NotExportable(KVAgentError):
    """No other process can open this memory. The text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Memory from an address on: ``regions`` with their descriptors, and its offset in them."""

    regions: tuple[tuple[Region, int | None], ...]
    offset: int

    def close(self) -> None:
        """Close the descriptors. The agent has its own by then."""
        for _, fd in self.regions:
            if fd is not None:
                os.close(fd)


def export(driver: CudaDriver, number: int, address: int, size: int) -> Exported:
    """Return ``size`` bytes of memory as the region ``number``, or raise NotExportable."""
    if driver.legacy(address):
        return _allocation(driver, number, address, size)
    if driver.shareable(address):
        return _pieces(driver, number, address, size)
    raise NotExportable(
        "the KV cache lies in GPU memory that was made without a handle for other processes. vLLM's sleep mode "
        "(--enable-sleep-mode, --enable-cumem-allocator) allocates so, except on GPUs where vLLM 0.33 and newer ask "
        "for one: start it without --enable-sleep-mode. So do torch's cudaMallocAsync backend and, in some "
        "versions, its expandable segments: remove backend:cudaMallocAsync and expandable_segments:True "
        "from PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF)"
    )


def _allocation(driver: CudaDriver, number: int, address: int, size: int) -> Exported:
    base, whole = driver.range(address)
    offset = address - base
    if offset + size > whole:
        raise NotExportable(
            f"the KV cache reaches {offset + size - whole} bytes beyond its allocation of {whole} bytes: "
            "the engine's own allocator made it, and there is no handle for both parts"
        )
    handle = driver.ipc_handle(base) + driver.uuid(address)
    return Exported(((Region(number, RegionKind.CUDA, size, offset, handle), None),), 0)


def _pieces(driver: CudaDriver, number: int, address: int, size: int) -> Exported:
    uuid = driver.uuid(address)
    first, _ = driver.range(address)
    pieces: list[tuple[Region, int | None]] = []
    try:
        at = first
        while at < address + size:
            base, length = driver.range(at)
            if base != at or length <= 0:
                raise NotExportable(f"the KV cache's virtual memory has a gap before byte {at - address}")
            if len(pieces) >= MAX_PIECES:
                raise NotExportable(
                    f"the KV cache's virtual memory is in more than {MAX_PIECES} pieces of {length} bytes: remove "
                    "expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF)"
                )
            pieces.append((Region(number, RegionKind.CUDA_FD, length, 0, uuid), driver.descriptor(at)))
            at += length
    except BaseException:
        Exported(tuple(pieces), 0).close()
        raise
    return Exported(tuple(pieces), address - first)


EVENTS = 256  # of a worker; an event is reused after that many steps


class CudaClock:
    """The clock of one GPU. ``words`` have cells of IPC_HANDLE bytes. ``close`` frees them."""

    def __init__(self, words: SyncWords, gpu: TorchGpu) -> None:
        self.words = words
        self._gpu = gpu
        self._events = [gpu.event() for _ in range(words.events)]
        for i, event in enumerate(self._events):
            words.put_handle(i, bytes(event.ipc_handle()))
        self._write = gpu.word(words)

    def end(self, step: int) -> None:
        """Record the step's event and write its number, after all kernels are launched."""
        self._events[self.event(step)].record()
        self._write(step)

    def event(self, step: int) -> int:
        """Return the event that fires when the step's kernels have ended."""
        return step % len(self._events)

    def close(self) -> None:
        """Stop signalling."""
        self._write = lambda _: None  # the words are about to be freed
        self._gpu.close()
        self.words.close()


class TorchGpu:
    """One GPU. ``close`` waits for writes in flight, so that nothing writes to freed memory."""

    def __init__(self, device: Any) -> None:
        import torch  # only a worker whose KV cache is on a GPU has one

        self._torch = torch
        self._device = torch.device(device)
        self._registered = 0

    def event(self) -> Any:
        """Return a new event."""
        with self._torch.cuda.device(self._device):
            return self._torch.cuda.Event(interprocess=True)

    def word(self, words: SyncWords) -> Callable[[int], None]:
        """Map the words for the GPU. Return what writes the step word on the current stream."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(words.memory.view))
        with self._torch.cuda.device(self._device):
            result = self._torch.cuda.cudart().cudaHostRegister(address, words.memory.size, 0)
        if int(result):
            raise CudaError(
                f"cudaHostRegister of {words.memory.size} bytes: error {int(result)}; the step word cannot be written "
                "by the GPU (ulimit -l may be too low)"
            )
        self._registered = address
        on_gpu = self._torch.zeros(1, dtype=self._torch.int64, device=self._device)
        in_words = self._torch.frombuffer(words.memory.view, dtype=self._torch.int64, count=1)

        def write(step: int) -> None:
            on_gpu.fill_(step)
            in_words.copy_(on_gpu, non_blocking=True)

        return write

    def close(self) -> None:
        """Unmap the words after all writes have ended."""
        if self._registered:
            with self._torch.cuda.device(self._device):
                self._torch.cuda.synchronize()
                self._torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = 0
