"""The codec of the session socket: messages to frames and back, strictly (docs/PROTOCOL.md, section
3). A decoded message encodes to the same bytes.

Sections of a job are packed once at planning time and sent unchanged by every rank. Their bytes are
those that ``encode`` produces for the same Sections, at a fraction of the cost: an engine packs
tens of sections in every step.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from kvagent import messages as m
from kvagent.errors import Malformed
from kvagent.fields import Record, form, pack, unpack
from kvagent.limits import (
    MAX_FRAME,
    MAX_GROUPS,
    MAX_HASH,
    MAX_IDENTITY_BYTES,
    MAX_JOB_BLOCKS,
    MAX_SECTIONS,
    STEP_BYTES,
    TOKEN_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Packed:
    """Sections of a job: ``data`` is their msgpack array, ``blocks`` the number of blocks."""

    data: bytes
    blocks: int

    def __reduce__(self) -> tuple[type[Packed], tuple[bytes, int]]:  # a tenth of the time of a dataclass's default
        return Packed, (self.data, self.blocks)


def section(group: int, parent: bytes, hashes: Sequence[bytes], ids: Sequence[int]) -> bytes:
    """Return one section, a run of chained blocks after ``parent`` with these block IDs."""
    joined = b"".join(hashes)
    size, count = len(hashes[0]), len(hashes)
    if not 0 <= group < MAX_GROUPS or not 1 <= size <= MAX_HASH or count != len(ids) or len(joined) != size * count:
        raise Malformed(f"section of group {group}: {len(joined)} bytes of {count} hashes and {len(ids)} blocks")
    if parent and len(parent) != size:
        raise Malformed(f"section of group {group}: parent of {len(parent)} bytes, allowed is 0 or {size}")
    return pack((group, parent, size, joined, struct.pack(f"<{count}I", *ids)))


def packed(sections: Sequence[bytes], blocks: int) -> Packed:
    """Return the sections of one job, each made by ``section``, of so many blocks."""
    count = len(sections)
    if not 1 <= count <= MAX_SECTIONS or blocks > MAX_JOB_BLOCKS:
        raise Malformed(f"{count} sections of {blocks} blocks, allowed is 1 to {MAX_SECTIONS} of {MAX_JOB_BLOCKS}")
    return Packed(msgpack.Packer().pack_array_header(count) + b"".join(sections), blocks)


_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size

_RECORDS = {number: Record(cls) for number, cls in m.NUMBERS.items()}
_NUMBERS: dict[type[Any], int] = {one.cls: number for number, one in _RECORDS.items()}


def encode(message: m.Message) -> bytes:
    """Return the body of a message's frame. Malformed names the field that is out of range."""
    number = _NUMBERS[type(message)]
    values = _RECORDS[number].write(message, type(message).__name__)
    _check(message)
    body = pack([number, *values])
    if len(body) > MAX_FRAME:
        raise Malformed(f"{type(message).__name__}: {len(body)} bytes, at most {MAX_FRAME}")
    return body


def job_frame(kind: type[m.Message], fields: tuple[int, ...], sections: Packed) -> bytes:
    """Return the frame of a job's message, with packed sections after its other fields."""
    number = _NUMBERS[kind]
    if not 0 <= min(fields) <= max(fields) < 1 << 32:  # raises the precise error
        for (name, field), value in zip(_RECORDS[number].fields, fields, strict=False):
            field.write(value, f"{kind.__name__}.{name}")
    head = pack((number, *fields))  # the header of an array with one element less
    length = len(head) + len(sections.data)
    if length > MAX_FRAME:
        raise Malformed(f"{kind.__name__}: {length} bytes, at most {MAX_FRAME}")
    return b"".join((_LENGTH.pack(length), bytes([head[0] + 1]), head[1:], sections.data))


def decode(body: bytes) -> m.Message:
    """Return the message of a frame's body."""
    if not 1 <= len(body) <= MAX_FRAME:
        raise Malformed(f"frame of {len(body)} bytes, not 1 to {MAX_FRAME}")
    values = unpack(body)
    if not isinstance(values, list) or not values or type(values[0]) is not int:
        raise Malformed("not an array that begins with a number")
    number, fields = values[0], values[1:]
    one = _RECORDS.get(number)
    if one is None:
        raise Malformed(f"no message has the number {number}")
    message: m.Message = one.read(fields, one.cls.__name__)
    _check(message)
    return message


def frame(body: bytes) -> bytes:
    """Return the frame of a body: its length, u32 BE, and the body."""
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes | bytearray | memoryview) -> int:
    """Return the body's length from a frame's first HEADER_BYTES bytes."""
    length: int = _LENGTH.unpack(header)[0]
    if not 1 <= length <= MAX_FRAME:
        raise Malformed(f"frame of {length} bytes, not 1 to {MAX_FRAME}")
    return length


def _check(message: m.Message) -> None:
    """Check what involves several fields."""
    kind = type(message).__name__
    if isinstance(message, m.Hello) and message.min_version > message.max_version:
        raise Malformed(f"Hello.min_version: {message.min_version} is more than max_version {message.max_version}")
    if isinstance(message, m.Register):
        check_identity(message.identity)
    elif isinstance(message, m.Stages):
        _check_bytes("Stages.stages", message.stages, 2)
    elif isinstance(message, m.Steps):
        _check_bytes("Steps.steps", message.steps, STEP_BYTES)
    elif isinstance(message, (m.Save, m.Load, m.StagedLoad)):
        total = 0
        for i, one in enumerate(message.sections):
            total += (blocks := _blocks(f"{kind}.sections[{i}]", one.hashes, one.hash_len, one.parent))
            if len(one.blocks) != 4 * blocks:
                raise Malformed(f"{kind}.sections[{i}].blocks: {len(one.blocks)} bytes, not 4 for each of {blocks}")
        _check_total(f"{kind}.sections", total)
    elif isinstance(message, m.Hint):
        total = 0
        for i, chain in enumerate(message.chains):
            total += (blocks := _blocks(f"Hint.chains[{i}]", chain.hashes, chain.hash_len))
            if chain.own and len(chain.own) != (blocks + 7) // 8:
                raise Malformed(f"Hint.chains[{i}].own: {len(chain.own)} bytes, not a bit for each of {blocks} hashes")
        _check_total("Hint.chains", total)
    elif isinstance(message, (m.BlockTokens, m.BlockEvents)):
        for run in message.runs if isinstance(message, m.BlockEvents) else [message]:
            _check_run(run)


def _check_bytes(where: str, data: bytes, unit: int) -> None:
    if len(data) % unit:
        raise Malformed(f"{where}: {len(data)} bytes, no multiple of {unit}")


def _check_total(where: str, blocks: int) -> None:
    if blocks > MAX_JOB_BLOCKS:
        raise Malformed(f"{where}: {blocks} blocks, at most {MAX_JOB_BLOCKS}")


def _blocks(where: str, hashes: bytes, hash_len: int, parent: bytes = b"") -> int:
    """Return the number of blocks of a run."""
    _check_bytes(f"{where}.hashes", hashes, hash_len)
    if parent and len(parent) != hash_len:
        raise Malformed(f"{where}.parent: {len(parent)} bytes, not 0 or hash_len {hash_len}")
    return len(hashes) // hash_len


def _check_run(run: m.BlockTokens | m.EventRun) -> None:
    where = type(run).__name__
    blocks = _blocks(where, run.hashes, run.hash_len, run.parent)
    if isinstance(run, m.EventRun) and run.kind == m.EventKind.REMOVED:
        if run.parent or run.tokens or run.extra:
            raise Malformed("EventRun.tokens: removed blocks have no parent, tokens or extra")
    elif not run.tokens or len(run.tokens) % (TOKEN_BYTES * blocks):
        raise Malformed(f"{where}.tokens: {len(run.tokens)} bytes, not as many for each of {blocks} blocks")


def check_identity(identity: tuple[tuple[str, str], ...]) -> None:
    """Raise Malformed unless an identity is of the right shape, sorted, unique and bounded."""
    form(m.Identity).write(identity, "identity")
    keys = [key.encode() for key, _ in identity]
    if any(first >= second for first, second in itertools.pairwise(keys)):
        raise Malformed("identity: keys are not sorted, or one is there twice")
    size = sum(len(key.encode()) + len(value.encode()) for key, value in identity)
    if size > MAX_IDENTITY_BYTES:
        raise Malformed(f"identity: {size} bytes, at most {MAX_IDENTITY_BYTES}")
