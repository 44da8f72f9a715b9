"""Where the blocks of an engine's KV caches lie: regions and segments, found from the tensors' own strides.

The tensors are those that vLLM hands to ``register_kv_caches``: for each layer a view [blocks, ...] of an allocation
that layers share. Only their attributes are used, so this needs no torch to be imported.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.messages import Region, RegionKind, Segment
from kvagent.vllm.geometry import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FIRST_REGION = 1  # 0 holds the words
_PR_SET_PTRACER = 0x59616D61  # from linux/prctl.h
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of bytes of every block: block b's is at ``offset + b * stride`` of the storage."""

    storage: int
    offset: int
    stride: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What a worker registers: regions with their descriptors, and the segments of each group."""

    regions: tuple[tuple[Region, int | None], ...]
    segments: dict[int, tuple[Segment, ...]]


def memory(kv_caches: Mapping[str, Any], groups: Sequence[Sequence[str]], num_blocks: int, kind: str) -> Memory:
    """The memory of the layers' tensors. ``groups``: names of each group's layers. ``kind``: fd or peer."""
    storages: dict[int, tuple[int, Any]] = {}
    segments = {}
    for number, names in enumerate(groups):
        pieces = []
        for name in names:
            if name not in kv_caches:
                raise Unsupported(f"group {number}: layer {name} has no KV cache here")
            pieces += list(_pieces(name, kv_caches[name], num_blocks, storages))
        segments[number] = tuple(
            Segment(p.storage + FIRST_REGION, p.offset, p.stride, p.bytes) for p in _merged(pieces)
        )
    regions = tuple(_region(place + FIRST_REGION, storage, kind) for place, storage in storages.values())
    return Memory(regions, segments)


def _pieces(name: str, tensor: Any, num_blocks: int, storages: dict[int, tuple[int, Any]]) -> Iterator[Piece]:
    """A layer's runs, longest possible, in the order in which they lie."""
    if not hasattr(tensor, "untyped_storage"):
        raise Unsupported(f"layer {name}: its KV cache is no single tensor")
    if tensor.device.type != "cpu":
        raise Unsupported(f"layer {name}: KV cache on {tensor.device}, this agent reaches host memory only")
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
        yield Piece(place, offset, tensor.stride(0) * size * split, run)


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


def _merged(pieces: list[Piece]) -> list[Piece]:
    """The pieces in order of place, neighbours as one; each byte once, though layers may share it."""
    merged: list[Piece] = []
    for piece in sorted(set(pieces), key=lambda p: (p.storage, p.stride, p.offset)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.storage, last.stride, last.offset + last.bytes) == (piece.storage, piece.stride, piece.offset)
            and last.bytes + piece.bytes <= last.stride
        ):
            merged[-1] = Piece(last.storage, last.offset, last.stride, last.bytes + piece.bytes)
        else:
            merged.append(piece)
    return merged


def _region(number: int, storage: Any, kind: str) -> tuple[Region, int | None]:
    size = int(storage.nbytes())
    if kind == "peer":
        _let_be_reached()
        return Region(number, RegionKind.PEER, size, addr=int(storage.data_ptr())), None
    storage.share_memory_()  # moves it, and all views with it
    fd, _ = storage._share_fd_cpu_()
    return Region(number, RegionKind.FD, size), fd


def _let_be_reached() -> None:
    """Where Yama guards processes, a process is reached only by whom it names; the agent's is not known yet."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
