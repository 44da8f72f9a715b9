"""An interpreter of the Triton kernels that vLLM's model runners use, where Triton is missing.

For tests only. It calls a kernel's Python function once for each program, with numpy arrays in
place of blocks, so that vLLM's own kernels run on a CPU as they are written. It has the operations
that those kernels use, and no others.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FIRST = 4096  # the first address that can be read
_MEMORY = (ctypes.c_char * ((1 << 47) - _FIRST)).from_address(_FIRST)
_TYPES = {
    name: np.dtype(name)
    for name in (
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    )
} | {"int1": np.dtype(bool)}  # fmt: skip


@functools.cache
def _memory(kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return this process's memory as an array of a type."""
    return np.ndarray((len(_MEMORY) // kind.itemsize,), kind, _MEMORY)


class Block(np.ndarray[Any, Any]):
    """A block of values, or one value, with Triton's methods."""

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array.view(Block)

    def __getitem__(self, key: Any) -> Any:
        return block(super().__getitem__(key))

    def __and__(self, other: Any) -> Any:
        return super().__and__(self._bits(other))

    def __or__(self, other: Any) -> Any:
        return super().__or__(self._bits(other))

    __rand__, __iand__ = __and__, __and__
    __ror__, __ior__ = __or__, __or__

    def _bits(self, other: Any) -> Any:
        """Return one bit of a number, such as ~False, if this is made of single bits."""
        return bool(other & 1) if self.dtype == bool and isinstance(other, int) else other

    def to(self, kind: Any, **_: Any) -> Any:
        return cast(self, kind)


def block(value: Any, kind: np.dtype[Any] | None = None) -> Block:
    return np.asarray(value, kind).view(Block)


class PointerType:
    """The type of pointers to values of a type."""

    def __init__(self, element_ty: np.dtype[Any]) -> None:
        self.element_ty = element_ty


class Pointer:
    """Addresses of values of a type."""

    __array_ufunc__ = None  # so that numpy leaves additions to this class

    def __init__(self, address: Any, kind: np.dtype[Any]) -> None:
        self.address = block(address, np.dtype(np.int64))
        self.dtype = PointerType(kind)

    def __add__(self, offset: Any) -> Pointer:
        kind = self.dtype.element_ty
        return Pointer(self.address + np.asarray(offset).astype(np.int64) * kind.itemsize, kind)

    __radd__ = __add__

    def __sub__(self, offset: Any) -> Pointer:
        return self + -np.asarray(offset).astype(np.int64)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.address[key], self.dtype.element_ty)

    def to(self, kind: Any, **_: Any) -> Any:
        return cast(self, kind)


def cast(value: Any, kind: Any, **_: Any) -> Any:
    if isinstance(kind, PointerType):
        return Pointer(value.address if isinstance(value, Pointer) else value, kind.element_ty)
    if isinstance(value, Pointer):
        return block(value.address, kind)
    return block(np.asarray(value).astype(kind))


def load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Block:
    kind = pointer.dtype.element_ty
    places, chosen = _places(pointer, mask)
    found = np.empty(places.shape, kind)
    found[...] = 0 if other is None else np.asarray(other).astype(kind)
    found[chosen] = _memory(kind)[places[chosen]]
    return block(found)


def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    kind = pointer.dtype.element_ty
    places, chosen = _places(pointer, mask, np.shape(value))
    _memory(kind)[places[chosen]] = np.broadcast_to(np.asarray(value).astype(kind), places.shape)[chosen]


def _places(pointer: Pointer, mask: Any, shape: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Return where the values are in the memory, and which of them are meant."""
    size = pointer.dtype.element_ty.itemsize
    mask = True if mask is None else np.asarray(mask, bool)
    shape = np.broadcast_shapes(pointer.address.shape, np.shape(mask), shape)
    chosen = np.broadcast_to(mask, shape)
    addresses = np.broadcast_to(np.asarray(pointer.address), shape)
    assert not (addresses[chosen] % size).any(), "a pointer between two values"
    return (addresses - _FIRST) // size, chosen


class Kernel:
    """A function with Triton's decorator."""

    place: tuple[int, ...] = (0, 0, 0)
    """Of the program that runs, in the grid."""
    grid: tuple[int, ...] = (1, 1, 1)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        functools.update_wrapper(self, function)
        self._parameters = inspect.signature(function).parameters
        self.arg_names = list(self._parameters)
        self._fixed = {name for name, one in self._parameters.items() if "constexpr" in str(one.annotation)}

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.fn(*given, **named)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, *given: Any, **named: Any) -> None:
        values = dict(zip(self._parameters, given, strict=False))
        values |= {name: value for name, value in named.items() if name in self._parameters}
        sizes = tuple(int(n) for n in (grid(values) if callable(grid) else grid))
        arguments = {name: value if name in self._fixed else _argument(value) for name, value in values.items()}
        before = Kernel.place, Kernel.grid
        Kernel.grid = (*sizes, 1, 1)[:3]
        try:
            with np.errstate(all="ignore"):
                for place in itertools.product(*(range(n) for n in Kernel.grid)):
                    Kernel.place = place
                    self.fn(**arguments)
        finally:
            Kernel.place, Kernel.grid = before


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        assert value.device.type == "cpu", value.device
        return Pointer(value.data_ptr(), np.dtype(bool) if name == "bool" else _TYPES[name])
    if isinstance(value, (bool, np.bool_)):
        return block(value)
    if isinstance(value, (int, np.integer)):
        return block(value, np.dtype(np.int64))
    return block(value, np.dtype(np.float32)) if isinstance(value, (float, np.floating)) else value


def _jit(function: Any = None, **_: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _reduction(values: Any, places: Any) -> Callable[..., Any]:
    """Return a reduction with Triton's arguments, of numpy's functions of the values and of their
    places.
    """

    def reduce(given: Any, axis: int | None = None, return_indices: bool = False, **_: Any) -> Any:
        found = block(values(np.asarray(given), axis=axis))
        return (found, block(places(np.asarray(given), axis=axis), _TYPES["int32"])) if return_indices else found

    return reduce


def _of(function: Callable[..., Any]) -> Callable[..., Block]:
    return lambda *given, **_: block(function(*given))


def _cumsum(given: Any, axis: int = 0, **_: Any) -> Block:
    return block(np.cumsum(np.asarray(given), axis, dtype=given.dtype))


def _range(*bounds: Any, **_: Any) -> Sequence[Any]:
    return [block(i, _TYPES["int32"]) for i in range(*(int(bound) for bound in bounds))]


def _constexpr(value: Any) -> Any:
    return value


_constexpr.__qualname__ = "constexpr"

LANGUAGE: dict[str, Any] = _TYPES | {
    "constexpr": _constexpr, "pointer_type": PointerType, "load": load, "store": store, "cast": cast,
    "program_id": lambda axis=0: block(Kernel.place[axis], _TYPES["int32"]),
    "num_programs": lambda axis=0: block(Kernel.grid[axis], _TYPES["int32"]),
    "arange": lambda begin, end: block(np.arange(int(begin), int(end), dtype=np.int32)),
    "zeros": lambda shape, dtype=np.float32: block(np.zeros(tuple(shape), dtype)),
    "full": lambda shape, value, dtype: block(np.full(tuple(shape), value, dtype)),
    "range": _range, "static_range": _range, "cdiv": lambda a, b: -(-a // b),
    "where": _of(np.where), "maximum": _of(np.maximum), "minimum": _of(np.minimum), "exp": _of(np.exp),
    "log": _of(np.log), "abs": _of(np.abs), "zeros_like": _of(np.zeros_like), "cumsum": _cumsum,
    "max": _reduction(np.max, np.argmax), "min": _reduction(np.min, np.argmin),
    "sum": lambda given, axis=None, **_: block(np.sum(np.asarray(given), axis=axis)),
    "argmax": lambda given, axis=None, **_: block(np.argmax(np.asarray(given), axis=axis), _TYPES["int32"]),
    "rand": lambda *_: block(math.nan, np.dtype(np.float32)),  # the tests leave nothing to chance
    "multiple_of": lambda value, *_: value, "debug_barrier": lambda: None, "static_assert": lambda *_: None,
}  # fmt: skip


def install() -> None:
    """Take the place of Triton. It must be called before modules with kernels are imported."""
    from vllm.triton_utils import HAS_TRITON, tl, triton

    if HAS_TRITON:
        return
    for name, value in LANGUAGE.items():
        setattr(tl, name, value)
    triton.jit = _jit
    triton.next_power_of_2 = lambda n: 1 << max(int(n) - 1, 0).bit_length()
