"""Canonical msgpack (the shortest form of each integer, string, binary and array header, and
nothing else), and the types of message fields in it.

Both directions check; ``where`` names the field in an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from kvagent.errors import Malformed

if TYPE_CHECKING:
    from collections.abc import Callable

    Convert = Callable[[Any, str], Any]

pack: Callable[[object], bytes] = msgpack.Packer(use_bin_type=True).pack
"""Packs ints, str, bytes, and lists or tuples of them. Shared, because msgpack.packb allocates a
buffer per call.
"""


def unpack(data: bytes) -> Any:
    """Return the value of packed bytes. Malformed unless ``pack`` would produce the same bytes."""
    try:
        value = msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True, ext_hook=_no_extension)
    except (ValueError, msgpack.exceptions.UnpackException, msgpack.exceptions.ExtraData) as error:
        raise Malformed(f"not one msgpack value: {error}") from error
    if value is None or isinstance(value, (bool, float, dict)) or pack(value) != data:
        raise Malformed("not canonical msgpack")
    return value


def _no_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} of {len(data)} bytes")


class Field:
    """One field: ``read`` converts from the wire, ``write`` back, by default alike."""

    def __init__(self, read: Convert, write: Convert | None = None) -> None:
        self.read, self.write = read, write or read


def uint(low: int, high: int) -> Field:
    """Return an integer from low to high; a member of an enum becomes its number."""

    def convert(value: Any, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise Malformed(f"{where}: {shown(value)} is not an integer from {low} to {high}")
        return int(value)

    return Field(convert)


def string(low: int, high: int) -> Field:
    """Return a string of low to high bytes of UTF-8."""

    def convert(value: Any, where: str) -> str:
        try:
            size = len(value.encode()) if isinstance(value, str) else -1
        except UnicodeEncodeError:
            size = -1
        if not low <= size <= high:
            raise Malformed(f"{where}: {shown(value)} is not a string of {low} to {high} bytes of UTF-8")
        return str(value)

    return Field(convert)


def binary(low: int, high: int) -> Field:
    """Return low to high bytes."""

    def convert(value: Any, where: str) -> bytes:
        if not isinstance(value, bytes) or not low <= len(value) <= high:
            raise Malformed(f"{where}: {shown(value)} is not a bin of {low} to {high} bytes")
        return value

    return Field(convert)


def pair(key: Field, value: Field) -> Field:
    """Return an array of a key and a value; a tuple in Python."""

    def convert(both: Any, where: str) -> tuple[Any, Any]:
        if not isinstance(both, (list, tuple)) or len(both) != 2:
            raise Malformed(f"{where}: not an array of 2 fields")
        return key.read(both[0], f"{where}.key"), value.read(both[1], f"{where}.value")

    return Field(convert)


def array(item: Field, low: int, high: int) -> Field:
    """Return an array of low to high items; a tuple in Python."""

    def check(values: Any, kind: type[Any], where: str) -> None:
        if not isinstance(values, kind):
            raise Malformed(f"{where}: {shown(values)} is not a {kind.__name__}")
        if not low <= len(values) <= high:
            raise Malformed(f"{where}: {len(values)} items, allowed is {low} to {high}")

    def read(values: Any, where: str) -> tuple[Any, ...]:
        check(values, list, where)
        return tuple([item.read(one, f"{where}[{i}]") for i, one in enumerate(values)])

    def write(values: Any, where: str) -> list[Any]:
        check(values, tuple, where)
        return [item.write(one, f"{where}[{i}]") for i, one in enumerate(values)]

    return Field(read, write)


def optional(item: Field) -> Field:
    """Return the item, or an empty array, which is None in Python."""
    return Field(
        lambda value, where: None if value == [] else item.read(value, where),
        lambda value, where: [] if value is None else item.write(value, where),
    )


class Record(Field):
    """An array of the fields of a dataclass, each of whose annotations is Annotated with one."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__(self._read, self._write)
        self.cls = cls
        self.fields = tuple((name, form(hint)) for name, hint in cls.__annotations__.items())

    def _read(self, value: Any, where: str) -> Any:
        if not isinstance(value, list) or len(value) != len(self.fields):
            raise Malformed(f"{where}: not an array of {len(self.fields)} fields")
        named = zip(self.fields, value, strict=True)
        return self.cls(**{name: field.read(v, f"{where}.{name}") for (name, field), v in named})

    def _write(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, self.cls):
            raise Malformed(f"{where}: {shown(value)} is not a {self.cls.__name__}")
        return [field.write(getattr(value, name), f"{where}.{name}") for name, field in self.fields]


def form(hint: Any) -> Field:
    """Return the field with which a type is Annotated."""
    found: Field = hint.__metadata__[0]
    return found


def shown(value: object) -> str:
    """Return a short form of a value for an error message."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}... ({type(value).__name__})"
