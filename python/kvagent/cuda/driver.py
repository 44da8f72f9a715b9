"""The CUDA driver calls in use, through ctypes: properties of addresses, and handles that other
processes can open.

Each call needs a thread with a current CUDA context, like a worker's main thread. See the driver
API's reference, sections "Memory Management", "Virtual Memory Management" and "Unified Addressing".
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kvagent.errors import KVAgentError

if TYPE_CHECKING:
    from collections.abc import Callable

IPC_HANDLE = 64  # bytes of a CUipcMemHandle
UUID = 16  # bytes

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
        """Return a new descriptor of the address's chunk of virtual memory; the caller closes
        it.
        """
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
