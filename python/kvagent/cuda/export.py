"""GPU memory as regions of a registration (docs/PROTOCOL.md, "Region kinds"), derived from its
address alone.

Memory of cudaMalloc has one IPC handle for the whole allocation, of which the region is a part.
Virtual memory (such as torch's expandable segments) consists of chunks, each with its own
descriptor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvagent.errors import KVAgentError
from kvagent.limits import MAX_REGIONS
from kvagent.messages import Region, RegionKind

if TYPE_CHECKING:
    from kvagent.cuda.driver import CudaDriver

MAX_PIECES = MAX_REGIONS - 64  # of all virtual memory of a worker; the rest is for other regions


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
