"""The memory of an engine's KV caches: regions and segments, derived from the tensors' strides, and
its retention.

vLLM passes a view [blocks, ...] per layer to ``register_kv_caches``; layers may share an
allocation. Only attributes of the tensors are used, so this imports no torch.

A deadline is no fence: an agent, or one of its movers, that has not let go of a worker's memory in
time may still read and write it. So the memory is retained, with the sessions whose end is the
fence, until that end is seen, or after the connector's shutdown until the process ends: the kernel
and the driver free a process's memory only after its last user is gone.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvagent.cuda import CudaDriver, Exported, export
from kvagent.messages import Region, RegionKind, Segment
from kvagent.vllm.geometry import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvagent.vllm.worker.side import WorkerSide

    Found = tuple[Mapping[int, dict[int, list["Extent"]]], Any]
    """By shard and group, the extents of a worker; and what is known of their order, for guests."""
    ExtentsOf = Callable[..., Found]
    """Finds them in KV caches by layer, for groups' layers and a number of blocks."""

FIRST_REGION = 1  # region 0 holds the words


WHOLE = -1
"""In place of a shard: all that a rank holds."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in every block: block b's is at ``offset + b * stride`` of the storage."""

    storage: int
    offset: int
    stride: int
    bytes: int

    def joins(self, after: Extent) -> bool:
        """Return whether another extent follows this one in every block."""
        follows = (self.storage, self.stride, self.offset + self.bytes) == (after.storage, after.stride, after.offset)
        return follows and self.bytes + after.bytes <= self.stride


def extents(name: str, tensor: Any, num_blocks: int, storages: dict[int, tuple[int, Any]]) -> Iterator[Extent]:
    """Yield a layer's runs of bytes, as long as possible, in memory order."""
    if isinstance(tensor, (list, tuple)):
        for one in tensor:
            yield from extents(name, one, num_blocks, storages)
        return
    if not hasattr(tensor, "untyped_storage"):
        raise Unsupported(f"layer {name}: its KV cache is not a single tensor")
    if tensor.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"layer {name}: KV cache on {tensor.device}, served are cpu and cuda")
    storage = tensor.untyped_storage()
    place, _ = storages.setdefault(storage._cdata, (len(storages), storage))
    size = tensor.element_size()
    split, rest = divmod(tensor.shape[0], num_blocks)
    if rest or not split:
        raise Unsupported(f"layer {name}: {tensor.shape[0]} pages for {num_blocks} blocks")
    # Kernels may split a block into consecutive pages.
    dims = [(split, tensor.stride(0) * size)]
    dims += [(n, step * size) for n, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)]
    run, outer = _run(dims, size)
    base = tensor.storage_offset() * size
    for steps in itertools.product(*(range(n) for n, _ in outer)):
        offset = base + sum(i * step for i, (_, step) in zip(steps, outer, strict=True))
        yield Extent(place, offset, tensor.stride(0) * size * split, run)


def _run(dims: list[tuple[int, int]], size: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the length of a contiguous run, and what repeats it (extent, step), in order."""
    run = size
    outer: list[tuple[int, int]] = []
    for extent, step in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        if step == run and not outer:
            run *= extent
        else:
            outer.append((extent, step))
    return run, outer[::-1]


def merged(extents: list[Extent]) -> list[Extent]:
    """Return the extents in memory order, adjacent ones merged and shared ones once."""
    return joined(sorted(set(extents), key=lambda p: (p.storage, p.stride, p.offset)))


def joined(extents: Iterable[Extent]) -> list[Extent]:
    """Return the extents in their order, adjacent ones merged."""
    found: list[Extent] = []
    for extent in extents:
        if found and found[-1].joins(extent):
            found[-1] = replace(found[-1], bytes=found[-1].bytes + extent.bytes)
        else:
            found.append(extent)
    return found


@dataclass(frozen=True, slots=True)
class Memory:
    """What a worker registers: its regions, and where its blocks lie. ``close`` frees exports."""

    regions: tuple[tuple[Region, int | None], ...]
    held: dict[int, dict[int, tuple[Segment, ...]]]
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
    kv_caches: Mapping[str, Any], groups: Sequence[Sequence[str]], num_blocks: int,
    driver: CudaDriver | None = None, *, shard: int = 0, extents_of: ExtentsOf | None = None,
) -> Memory:  # fmt: skip
    """Return the memory of the layers' tensors. ``groups``: the layer names of each group.
    ``driver`` replaces CUDA's in tests. ``extents_of`` finds the extents, if they are not those of
    the groups.
    """
    storages: dict[int, tuple[int, Any]] = {}
    found, stages = (extents_of or _of_groups)(kv_caches, groups, num_blocks, storages)
    device = _device(kv_caches)
    exported: tuple[Exported, ...] = ()
    if device is None:
        regions = tuple(_region(place + FIRST_REGION, storage) for place, storage in storages.values())
    else:
        exported = _export(storages, driver or CudaDriver())
        regions = tuple(region for one in exported for region in one.regions)
    offsets = [one.offset for one in exported] or [0] * len(regions)  # a region may begin before its storage
    held = {
        shard if one == WHOLE else one: {
            group: tuple(
                Segment(p.storage + FIRST_REGION, offsets[p.storage] + p.offset, p.stride, p.bytes) for p in some
            )
            for group, some in by_group.items()
        }
        for one, by_group in found.items()
    }
    return Memory(regions, held, device, exported, stages)


def _of_groups(
    kv_caches: Mapping[str, Any], groups: Sequence[Sequence[str]], num_blocks: int,
    storages: dict[int, tuple[int, Any]],
) -> Found:  # fmt: skip
    """Return the extents of each group, in memory order."""
    found = {}
    for number, names in enumerate(groups):
        if missing := [name for name in names if name not in kv_caches]:
            raise Unsupported(f"group {number}: layer {missing[0]} has no KV cache here")
        found[number] = merged([one for name in names for one in extents(name, kv_caches[name], num_blocks, storages)])
    return {WHOLE: found}, None


def _export(storages: Mapping[int, tuple[int, Any]], driver: CudaDriver) -> tuple[Exported, ...]:
    exported: list[Exported] = []
    try:
        for place, storage in storages.values():
            exported.append(export(driver, place + FIRST_REGION, int(storage.data_ptr()), int(storage.nbytes())))
    except BaseException:
        for one in exported:
            one.close()
        raise
    return tuple(exported)


def _device(kv_caches: Mapping[str, Any]) -> Any:
    """Return the GPU that all layers are on; None for host memory."""
    tensors = [
        tensor for layer in kv_caches.values() for tensor in (layer if isinstance(layer, (list, tuple)) else [layer])
    ]
    devices = {str(tensor.device): tensor.device for tensor in tensors if hasattr(tensor, "device")}
    if len(devices) > 1:
        raise Unsupported(f"the KV cache is on several devices: {', '.join(sorted(devices))}")
    return next((device for device in devices.values() if device.type == "cuda"), None)


def _region(number: int, storage: Any) -> tuple[Region, int | None]:
    size = int(storage.nbytes())
    storage.share_memory_()  # moves the storage, and all its views
    fd, _ = storage._share_fd_cpu_()
    return Region(number, RegionKind.FD, size), fd


log = logging.getLogger("vllm.kvagent")


@dataclass(eq=False, slots=True)
class RetainedMemory:
    """The memory of one worker, retained until ``fenced``."""

    owner: str
    worker: WorkerSide
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
