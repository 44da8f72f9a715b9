"""The runs of bytes of a layer's KV cache, derived from its tensor's strides.

Only attributes of the tensors are used, so this imports no torch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.vllm.geometry import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Found = tuple[Mapping[int, dict[int, list["Extent"]]], Any]
    """By shard and group, the extents of a worker; and what is known of their order, for guests."""
    ExtentsOf = Callable[..., Found]
    """Finds them: of KV caches by layer, the layers of each group, the number of blocks, and a
    mapping that collects the storages.
    """

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
        return (
            (self.storage, self.stride, self.offset + self.bytes) == (after.storage, after.stride, after.offset)
            and self.bytes + after.bytes <= self.stride
        )  # fmt: skip

    def with_bytes(self, size: int) -> Extent:
        """Return the extent with another length."""
        return Extent(self.storage, self.offset, self.stride, size)


def extents(name: str, tensor: Any, num_blocks: int, storages: dict[int, tuple[int, Any]]) -> Iterator[Extent]:
    """Yield a layer's runs of bytes, as long as possible, in memory order; of a layer with states,
    those of each of its tensors.
    """
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
    """Return the length of a contiguous run, and the dimensions (extent, step in bytes) that repeat
    it, outermost first.
    """
    run = size
    outer: list[tuple[int, int]] = []
    for extent, step in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        if step == run and not outer:
            run *= extent
        else:
            outer.append((extent, step))
    return run, outer[::-1]


def merged(extents: list[Extent]) -> list[Extent]:
    """Return the extents in memory order, adjacent ones merged; bytes shared by layers appear
    once.
    """
    found: list[Extent] = []
    for extent in sorted(set(extents), key=lambda p: (p.storage, p.stride, p.offset)):
        last = found[-1] if found else None
        if last is not None and last.joins(extent):
            found[-1] = last.with_bytes(last.bytes + extent.bytes)
        else:
            found.append(extent)
    return found
