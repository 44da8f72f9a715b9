"""The memory of an engine's KV caches: regions and segments, derived from the tensors' strides, and
its retention.

vLLM passes a view [blocks, ...] per layer to ``register_kv_caches``; layers may share an
allocation. Only attributes of the tensors are used, so this imports no torch.

A deadline is no fence: an agent, or one of its movers, that has not let go of a worker's memory in
time may still read and write it. So the memory is retained, with the sessions whose end is the
fence, until that end is seen. After the connector's shutdown nothing looks for it, and the memory
is retained until the process ends. That is a fence too: the kernel and the driver free a process's
memory only after its last user is gone. Nothing here waits, so a shutdown does not hang.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvagent.cuda.driver import CudaDriver
from kvagent.cuda.export import Exported, export
from kvagent.errors import KVAgentError
from kvagent.messages import Region, RegionKind, Segment
from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.worker.extents import WHOLE, Extent, extents, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvagent.cuda.driver import Driver
    from kvagent.vllm.boundary.worker import LostWorker
    from kvagent.vllm.worker.extents import ExtentsOf, Found
    from kvagent.vllm.worker.side import WorkerSide

FIRST_REGION = 1  # region 0 holds the words
_PR_SET_PTRACER = 0x59616D61  # from linux/prctl.h
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a worker registers: regions with their descriptors, and where its blocks lie in them.

    ``close`` frees its exports.
    """

    regions: tuple[tuple[Region, int | None], ...]
    segments: dict[int, tuple[Segment, ...]]
    """By group; empty if there are cells."""
    cells: dict[int, dict[int, tuple[Segment, ...]]] = field(default_factory=dict)
    """By shard and group."""
    device: Any = None
    """The GPU; None for host memory."""
    exported: tuple[Exported, ...] = ()
    stages: Any = None
    """What ``extents_of`` knows of the order of the segments, for guests."""

    def close(self) -> None:
        """Close what was opened to export the memory to the agent."""
        for one in self.exported:
            one.close()


def memory(
    kv_caches: Mapping[str, Any], groups: Sequence[Sequence[str]], num_blocks: int, kind: str,
    driver: Driver | None = None, *, extents_of: ExtentsOf | None = None,
) -> Memory:  # fmt: skip
    """Return the memory of the layers' tensors.

    ``groups``: the layer names of each group. ``kind``: fd or peer, for host memory. ``driver``
    replaces CUDA's in tests. ``extents_of`` finds the extents, if they are not those of the groups.
    """
    storages: dict[int, tuple[int, Any]] = {}
    found, stages = (extents_of or _of_groups)(kv_caches, groups, num_blocks, storages)
    device = _device(kv_caches)
    if device is not None:
        return _on_gpu(storages, found, device, driver or CudaDriver(), stages)
    regions = tuple(_region(place + FIRST_REGION, storage, kind) for place, storage in storages.values())
    return Memory(regions, *_segments(found, [0] * len(regions)), stages=stages)


def _of_groups(
    kv_caches: Mapping[str, Any], groups: Sequence[Sequence[str]], num_blocks: int,
    storages: dict[int, tuple[int, Any]],
) -> Found:  # fmt: skip
    """Return the extents of each group, in memory order."""
    found = {}
    for number, names in enumerate(groups):
        some: list[Extent] = []
        for name in names:
            if name not in kv_caches:
                raise Unsupported(f"group {number}: layer {name} has no KV cache here")
            some += extents(name, kv_caches[name], num_blocks, storages)
        found[number] = merged(some)
    return {WHOLE: found}, None


def _on_gpu(
    storages: Mapping[int, tuple[int, Any]], found: Mapping[int, dict[int, list[Extent]]], device: Any, driver: Driver,
    stages: Any,
) -> Memory:  # fmt: skip
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
    return Memory(regions, *_segments(found, [one.offset for one in exported]), device, tuple(exported), stages)


def _segments(
    found: Mapping[int, dict[int, list[Extent]]], offsets: Sequence[int]
) -> tuple[dict[int, tuple[Segment, ...]], dict[int, dict[int, tuple[Segment, ...]]]]:
    """Return the segments of a whole rank and those of its cells, of which one is empty.

    A region may begin before its storage, by its offset.
    """
    cells = {
        shard: {
            group: tuple(
                Segment(p.storage + FIRST_REGION, offsets[p.storage] + p.offset, p.stride, p.bytes) for p in some
            )
            for group, some in groups.items()
        }
        for shard, groups in found.items()
    }
    return cells.pop(WHOLE, {}), cells


def _device(kv_caches: Mapping[str, Any]) -> Any:
    """Return the GPU that all layers are on; None for host memory."""
    tensors = [
        tensor for layer in kv_caches.values() for tensor in (layer if isinstance(layer, (list, tuple)) else [layer])
    ]
    devices = {str(tensor.device): tensor.device for tensor in tensors if hasattr(tensor, "device")}
    if len(devices) > 1:
        raise Unsupported(f"the KV cache is on several devices: {', '.join(sorted(devices))}")
    return next((device for device in devices.values() if device.type == "cuda"), None)


def _region(number: int, storage: Any, kind: str) -> tuple[Region, int | None]:
    size = int(storage.nbytes())
    if kind == "peer":
        allow_ptrace()
        return Region(number, RegionKind.PEER, size, addr=int(storage.data_ptr())), None
    storage.share_memory_()  # moves the storage, and all its views
    fd, _ = storage._share_fd_cpu_()
    return Region(number, RegionKind.FD, size), fd


def allow_ptrace() -> None:
    """Allow any process to access this one's memory under Yama, since the agent's is not known
    yet.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


log = logging.getLogger("vllm.kvagent")


@dataclass(eq=False, slots=True)
class RetainedMemory:
    """The memory of one worker, retained until ``fenced``."""

    owner: str
    worker: WorkerSide | LostWorker
    """Owns the sessions, which must stay open."""
    memory: tuple[Any, ...]
    """Objects that must not be freed."""
    close: Callable[[], None]
    """Closes what the memory was exported with."""
    fenced: Callable[[], bool] = field(default=lambda: False)
    """Returns whether the fence has been seen; always False after a shutdown."""


_retained: list[RetainedMemory] = []


def retain(one: RetainedMemory) -> None:
    """Retain a worker's memory, and log it."""
    _retained.append(one)
    log.error(
        "%s: the agent did not let go of the KV caches in time; their memory is kept until it does, or until "
        "this process ends",
        one.owner,
    )


def release_fenced() -> int:
    """Free fenced memory. Return how many workers' memory is still retained."""
    for one in [one for one in _retained if one.fenced()]:
        _retained.remove(one)
        one.close()
        log.info("%s: the agent has let go of the KV caches that were kept", one.owner)
    return len(_retained)
