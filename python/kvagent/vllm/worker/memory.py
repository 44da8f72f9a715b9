"""Where the blocks of an engine's KV caches lie: regions and segments, found from the tensors' own strides.

The tensors are those that vLLM hands to ``register_kv_caches``: for each layer a view [blocks, ...] of an allocation
that layers share. Only their attributes are used, so this needs no torch to be imported.

What an agent may still touch after it was given up: a deadline is no fence.

An agent, or a mover of one, that has not let go of a worker's memory in time may still read and write it. So the memory
is kept, with the sessions whose end is the fence, until that end is seen. Where nobody looks any more, because the
connector is shut down, it is kept to the end of the process: that is a fence too, because the kernel and the driver
take the memory of a process only after its last user is gone. Nothing here waits, so a shutdown does not hang.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvagent.cuda.driver import CudaDriver
from kvagent.cuda.export import Exported, export
from kvagent.errors import KVAgentError
from kvagent.messages import Region, RegionKind, Segment
from kvagent.vllm.geometry import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvagent.cuda.driver import Driver
    from kvagent.vllm.worker.side import WorkerSide

FIRST_REGION = 1  # 0 holds the words
_PR_SET_PTRACER = 0x59616D61  # from linux/prctl.h
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


@dataclass(frozen=True, slots=True)
class Extent:
    """One run of bytes of every block: block b's is at ``offset + b * stride`` of the storage."""

    storage: int
    offset: int
    stride: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What a worker registers: regions with their descriptors, and the segments of each group. ``close`` lets it go."""

    regions: tuple[tuple[Region, int | None], ...]
    segments: dict[int, tuple[Segment, ...]]
    device: Any = None
    """The GPU that it is on; None for the host."""
    exported: tuple[Exported, ...] = ()

    def close(self) -> None:
        """Closes what was opened to show it to the agent."""
        for one in self.exported:
            one.close()


def memory(
    kv_caches: Mapping[str, Any], groups: Sequence[Sequence[str]], num_blocks: int, kind: str,
    driver: Driver | None = None,
) -> Memory:  # fmt: skip
    """The memory of the layers' tensors. ``groups``: names of each group's layers. ``kind``: fd or peer, for a host's.

    ``driver`` stands in for CUDA's.
    """
    storages: dict[int, tuple[int, Any]] = {}
    found = {}
    for number, names in enumerate(groups):
        extents: list[Extent] = []
        for name in names:
            if name not in kv_caches:
                raise Unsupported(f"group {number}: layer {name} has no KV cache here")
            extents += _extents(name, kv_caches[name], num_blocks, storages)
        found[number] = _merged(extents)
    device = _device(kv_caches)
    if device is not None:
        return _on_gpu(storages, found, device, driver or CudaDriver())
    regions = tuple(_region(place + FIRST_REGION, storage, kind) for place, storage in storages.values())
    return Memory(regions, _segments(found, [0] * len(regions)))


def _on_gpu(
    storages: Mapping[int, tuple[int, Any]], found: Mapping[int, list[Extent]], device: Any, driver: Driver
) -> Memory:
    exported: list[Exported] = []
    try:
        for place, storage in storages.values():
            exported.append(export(driver, place + FIRST_REGION, int(storage.data_ptr()), int(storage.nbytes())))
    except BaseException as error:
        for one in exported:
            one.close()
        if isinstance(error, KVAgentError):
            raise Unsupported(str(error)) from error
        raise
    regions = tuple(region for one in exported for region in one.regions)
    return Memory(regions, _segments(found, [one.offset for one in exported]), device, tuple(exported))


def _segments(found: Mapping[int, list[Extent]], offsets: Sequence[int]) -> dict[int, tuple[Segment, ...]]:
    """The pieces in regions, of which each begins its offset before its storage."""
    return {
        group: tuple(
            Segment(p.storage + FIRST_REGION, offsets[p.storage] + p.offset, p.stride, p.bytes) for p in extents
        )
        for group, extents in found.items()
    }


def _device(kv_caches: Mapping[str, Any]) -> Any:
    """The GPU that all layers are on; None for the host."""
    devices = {str(tensor.device): tensor.device for tensor in kv_caches.values() if hasattr(tensor, "device")}
    if len(devices) > 1:
        raise Unsupported(f"the KV cache is on several devices: {', '.join(sorted(devices))}")
    return next((device for device in devices.values() if device.type == "cuda"), None)


def _extents(name: str, tensor: Any, num_blocks: int, storages: dict[int, tuple[int, Any]]) -> Iterator[Extent]:
    """A layer's runs, longest possible, in the order in which they lie."""
    if not hasattr(tensor, "untyped_storage"):
        raise Unsupported(f"layer {name}: its KV cache is no single tensor")
    if tensor.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"layer {name}: KV cache on {tensor.device}, served are cpu and cuda")
    storage = tensor.untyped_storage()
    place, _ = storages.setdefault(storage._cdata, (len(storages), storage))
    size = tensor.element_size()
    split, rest = divmod(tensor.shape[0], num_blocks)
    if rest or not split:
        raise Unsupported(f"layer {name}: {tensor.shape[0]} pages for {num_blocks} blocks")
    # Kernels may cut a block into pages that lie one after the other.
    dims = [(split, tensor.stride(0) * size)]
    dims += [(n, step * size) for n, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)]
    run, outer = _run(dims, size)
    base = tensor.storage_offset() * size
    for steps in itertools.product(*(range(n) for n, _ in outer)):
        offset = base + sum(i * step for i, (_, step) in zip(steps, outer, strict=True))
        yield Extent(place, offset, tensor.stride(0) * size * split, run)


def _run(dims: list[tuple[int, int]], size: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes that lie together, and the dimensions (extent, step in bytes) that repeat them, outermost first."""
    run = size
    outer: list[tuple[int, int]] = []
    for extent, step in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        if step == run and not outer:
            run *= extent
        else:
            outer.append((extent, step))
    return run, outer[::-1]


def _merged(extents: list[Extent]) -> list[Extent]:
    """The pieces in order of place, neighbours as one; each byte once, though layers may share it."""
    merged: list[Extent] = []
    for extent in sorted(set(extents), key=lambda p: (p.storage, p.stride, p.offset)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.storage, last.stride, last.offset + last.bytes) == (extent.storage, extent.stride, extent.offset)
            and last.bytes + extent.bytes <= last.stride
        ):
            merged[-1] = Extent(last.storage, last.offset, last.stride, last.bytes + extent.bytes)
        else:
            merged.append(extent)
    return merged


def _region(number: int, storage: Any, kind: str) -> tuple[Region, int | None]:
    size = int(storage.nbytes())
    if kind == "peer":
        _allow_ptrace()
        return Region(number, RegionKind.PEER, size, addr=int(storage.data_ptr())), None
    storage.share_memory_()  # moves it, and all views with it
    fd, _ = storage._share_fd_cpu_()
    return Region(number, RegionKind.FD, size), fd


def _allow_ptrace() -> None:
    """Where Yama guards processes, a process is reached only by whom it names; the agent's is not known yet."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


log = logging.getLogger("kvagent.vllm")


@dataclass(eq=False, slots=True)
class RetainedMemory:
    """The memory of one worker, until ``fenced``."""

    owner: str
    worker: WorkerSide
    """Has the sessions, which must stay open."""
    memory: tuple[Any, ...]
    """Whatever must not be freed."""
    close: Callable[[], None]
    """Closes what the memory was shown with."""
    fenced: Callable[[], bool] = field(default=lambda: False)
    """Whether the fence has come; never, where nobody looks any more."""


_retained: list[RetainedMemory] = []


def retain(one: RetainedMemory) -> None:
    """Keeps a worker's memory, and says so."""
    _retained.append(one)
    log.error(
        "%s: the agent did not let go of the KV caches in time; their memory is kept until it does, or to the end of "
        "this process",
        one.owner,
    )


def release_fenced() -> int:
    """Frees what a fence has come for. Gives how many workers' memory is kept."""
    for one in [one for one in _retained if one.fenced()]:
        _retained.remove(one)
        one.close()
        log.info("%s: the agent has let go of the KV caches that were kept", one.owner)
    return len(_retained)
