"""Canonical msgpack (the shortest form of each integer, string, binary and array header, and
nothing else), and the types of message fields in it.

Both directions check; ``where`` names the field in an error.

``read`` converts a result of ``unpack`` to a value of the message; ``write`` converts it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgpack

from kvagent.errors import Malformed

if TYPE_CHECKING:
    from collections.abc import Callable

pack: Callable[[object], bytes] = msgpack.Packer(use_bin_type=True).pack
"""Packs ints, str, bytes, and lists or tuples of them. Shared, because msgpack.packb allocates a
buffer per call.
"""


def unpack(data: bytes) -> Any:
    """Return the value of packed bytes, arrays as lists.

    Malformed unless ``pack`` would produce the same bytes.
    """
    try:
        value = msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True, ext_hook=_no_extension)
    except (ValueError, msgpack.exceptions.UnpackException, msgpack.exceptions.ExtraData) as error:
        raise Malformed(f"not one msgpack value: {error}") from error
    if value is None or isinstance(value, (bool, float, dict)) or pack(value) != data:
        raise Malformed("not canonical msgpack")
    return value


def _no_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} of {len(data)} bytes")


class Field(Protocol):
    """One field."""

    def read(self, value: Any, where: str) -> Any:
        """Convert from the wire."""

    def write(self, value: Any, where: str) -> Any:
        """Convert to the wire."""


@dataclass(frozen=True)
class Uint:
    """An integer from low to high."""

    low: int
    high: int

    def read(self, value: Any, where: str) -> int:
        """Convert from the wire."""
        if type(value) is not int or not self.low <= value <= self.high:
            raise Malformed(f"{where}: {shown(value)} is not an integer from {self.low} to {self.high}")
        return value

    def write(self, value: Any, where: str) -> int:
        """Convert to the wire; an enum member counts as its number."""
        return self.read(int(value) if isinstance(value, int) else value, where)


@dataclass(frozen=True)
class Str:
    """A string of low to high bytes of UTF-8."""

    low: int
    high: int

    def read(self, value: Any, where: str) -> str:
        """Convert from the wire."""
        if not isinstance(value, str) or not self.low <= len(_utf8(value, where)) <= self.high:
            raise Malformed(f"{where}: {shown(value)} is not a string of {self.low} to {self.high} bytes")
        return value

    write = read


@dataclass(frozen=True)
class Bin:
    """Low to high bytes."""

    low: int
    high: int

    def read(self, value: Any, where: str) -> bytes:
        """Convert from the wire."""
        if not isinstance(value, bytes) or not self.low <= len(value) <= self.high:
            raise Malformed(f"{where}: {shown(value)} is not a bin of {self.low} to {self.high} bytes")
        return value

    write = read


@dataclass(frozen=True)
class Pair:
    """An array of a key and a value; a tuple in Python."""

    key: Field
    value: Field

    def read(self, value: Any, where: str) -> tuple[Any, Any]:
        """Convert from the wire."""
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise Malformed(f"{where}: not an array of 2 fields")
        return self.key.read(value[0], f"{where}.key"), self.value.read(value[1], f"{where}.value")

    write = read


@dataclass(frozen=True)
class Record:
    """An array of exactly these fields; a dataclass in Python."""

    cls: type[Any]
    fields: tuple[tuple[str, Field], ...]

    def read(self, value: Any, where: str) -> Any:
        """Convert from the wire."""
        if not isinstance(value, list) or len(value) != len(self.fields):
            raise Malformed(f"{where}: not an array of {len(self.fields)} fields")
        named = zip(self.fields, value, strict=True)
        return self.cls(**{name: field.read(v, f"{where}.{name}") for (name, field), v in named})

    def write(self, value: Any, where: str) -> list[Any]:
        """Convert to the wire."""
        if not isinstance(value, self.cls):
            raise Malformed(f"{where}: {shown(value)} is not a {self.cls.__name__}")
        return [field.write(getattr(value, name), f"{where}.{name}") for name, field in self.fields]


@dataclass(frozen=True)
class List:
    """An array of low to high items; a tuple in Python."""

    item: Field
    low: int
    high: int

    def read(self, value: Any, where: str) -> tuple[Any, ...]:
        """Convert from the wire."""
        self._hold(value, list, where)
        return tuple([self.item.read(v, f"{where}[{i}]") for i, v in enumerate(value)])

    def write(self, value: Any, where: str) -> list[Any]:
        """Convert to the wire."""
        self._hold(value, tuple, where)
        return [self.item.write(v, f"{where}[{i}]") for i, v in enumerate(value)]

    def _hold(self, value: Any, kind: type[Any], where: str) -> None:
        if not isinstance(value, kind):
            raise Malformed(f"{where}: {shown(value)} is not a {kind.__name__}")
        if not self.low <= len(value) <= self.high:
            raise Malformed(f"{where}: {len(value)} items, allowed is {self.low} to {self.high}")


@dataclass(frozen=True)
class Optional:
    """The item, or an empty array, which is None in Python."""

    item: Field

    def read(self, value: Any, where: str) -> Any:
        """Convert from the wire."""
        return None if value == [] else self.item.read(value, where)

    def write(self, value: Any, where: str) -> Any:
        """Convert to the wire."""
        return [] if value is None else self.item.write(value, where)


def record(cls: type[Any]) -> Record:
    """Return the record of a dataclass, each of whose annotations is Annotated with a Field."""
    return Record(cls, tuple((name, form(hint)) for name, hint in cls.__annotations__.items()))


def form(hint: Any) -> Field:
    """Return the field with which a type is Annotated."""
    found: Field = hint.__metadata__[0]
    return found


def shown(value: object) -> str:
    """Return a short form of a value for an error message."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}... ({type(value).__name__})"


def _utf8(value: str, where: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise Malformed(f"{where}: {shown(value)} is not UTF-8") from error
