"""The codec of the session socket: messages to frames and back, strictly (docs/PROTOCOL.md, section
3).

A decoded message encodes to the same bytes. Anything not canonical, of a wrong shape or beyond a
limit is Malformed.
"""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, Any

import msgpack

from kvagent import messages as m
from kvagent.canonical import pack, unpack
from kvagent.errors import Malformed
from kvagent.fields import Bin, List, Optional, Pair, Record, Str, Uint, record
from kvagent.limits import (
    MAX_BUDGET,
    MAX_EVENT_BLOCKS,
    MAX_EVENTS,
    MAX_EXTRA,
    MAX_FRAME,
    MAX_GROUPS,
    MAX_HANDLE,
    MAX_HASH,
    MAX_IDENTITY_BYTES,
    MAX_IDENTITY_PAIRS,
    MAX_JOB_BLOCKS,
    MAX_KEEP_MS,
    MAX_NAME,
    MAX_PATH,
    MAX_PEER_ADDRESS,
    MAX_REGIONS,
    MAX_REGIONS_MESSAGE,
    MAX_RELEASES,
    MAX_SECTIONS,
    MAX_SEGMENTS,
    MAX_SEGMENTS_MESSAGE,
    MAX_SHARDS,
    MAX_STAGE_WORDS,
    MAX_STEPS,
    MAX_TEXT,
    MAX_TRANSFER_MS,
    MAX_TRANSFER_NAME,
    MAX_WORLD,
    STEP_BYTES,
    TOKEN_BYTES,
)

if TYPE_CHECKING:
    from kvagent.packing import Packed

_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size

_U8, _U32, _U64 = Uint(0, 2**8 - 1), Uint(0, 2**32 - 1), Uint(0, 2**64 - 1)
_FLAG, _POSITIVE = Uint(0, 1), Uint(1, 2**32 - 1)
_ID, _NAME, _TEXT = Bin(16, 16), Str(0, MAX_NAME), Str(0, MAX_TEXT)
_GROUP_INDEX = Uint(0, MAX_GROUPS - 1)
_TRANSFER = Bin(1, MAX_TRANSFER_NAME)

_IDENTITY = List(Pair(Str(1, MAX_IDENTITY_BYTES), Str(0, MAX_IDENTITY_BYTES)), 0, MAX_IDENTITY_PAIRS)
_GROUP = record(m.Group, block_tokens=_POSITIVE, num_blocks=_U32, window=_U32)
_SYNC = record(
    m.Sync,
    region=_U32, step_off=_U64, events_off=_U64, events=Uint(0, MAX_EVENTS),
    revoke_off=_U64, revokes=Uint(0, MAX_EVENTS),
)  # fmt: skip
_REGION = record(
    m.Region,
    id=_U32, kind=Uint(m.RegionKind.FD, m.RegionKind.CUDA_FD), size=_U64, addr=_U64, handle=Bin(0, MAX_HANDLE),
)  # fmt: skip
_SEGMENT = record(m.Segment, region=_U32, offset=_U64, stride=_U64, bytes=_POSITIVE)
_SECTION = record(
    m.Section,
    group=_GROUP_INDEX, parent=Bin(0, MAX_HASH), hash_len=Uint(1, MAX_HASH),
    hashes=Bin(1, MAX_JOB_BLOCKS * MAX_HASH), blocks=Bin(4, MAX_JOB_BLOCKS * 4),
)  # fmt: skip
_SECTIONS = List(_SECTION, 1, MAX_SECTIONS)
_EVENT_RUN = record(
    m.EventRun,
    kind=Uint(m.EventKind.STORED, m.EventKind.REMOVED), medium=Uint(1, 255), group=_GROUP_INDEX,
    parent=Bin(0, MAX_HASH), hash_len=Uint(1, MAX_HASH), hashes=Bin(1, MAX_EVENT_BLOCKS * MAX_HASH),
    tokens=Bin(0, MAX_FRAME), extra=Bin(0, MAX_EXTRA),
)  # fmt: skip

_RECORDS: dict[int, Record] = {
    1: record(m.Hello, min_version=_POSITIVE, max_version=_POSITIVE, software=_NAME),
    2: record(
        m.Welcome,
        version=Uint(m.MIN_VERSION, m.VERSION), boot=_ID, session=_U64,
        max_frame=_U32, max_job_blocks=_U32, max_queue=_U32, lease_bytes=_U64,
        peer=Str(0, MAX_PEER_ADDRESS),
    ),
    3: record(
        m.Register,
        req=_U32, instance=Str(1, MAX_NAME), role=Uint(m.Role.SCHEDULER, m.Role.WORKER),
        rank=Uint(0, MAX_WORLD - 1), world=Uint(1, MAX_WORLD),
        held=List(Uint(0, MAX_SHARDS - 1), 0, MAX_SHARDS), shards=Uint(1, MAX_SHARDS),
        identity=_IDENTITY, groups=List(_GROUP, 1, MAX_GROUPS), hash_tokens=_POSITIVE,
        lookup_name=_NAME, sync=Optional(_SYNC), regions=Uint(0, MAX_REGIONS), segments=Uint(0, MAX_SEGMENTS),
    ),
    4: record(m.Regions, req=_U32, regions=List(_REGION, 0, MAX_REGIONS_MESSAGE)),
    5: record(
        m.Segments,
        req=_U32, shard=Uint(0, MAX_SHARDS - 1), group=_GROUP_INDEX, segments=List(_SEGMENT, 0, MAX_SEGMENTS_MESSAGE),
    ),
    6: record(m.Registered, req=_U32, status=_U8, text=_TEXT, space=_ID, epoch=_U32, lookup_path=Str(0, MAX_PATH)),
    7: record(m.Unregister, req=_U32),
    8: record(m.Release, leases=List(_U64, 0, MAX_RELEASES)),
    9: record(m.Save, job=_U64, epoch=_U32, step=_U64, event=_U32, revoke=_U32, sections=_SECTIONS),
    10: record(m.Load, job=_U64, epoch=_U32, step=_U64, event=_U32, lease=_U64, sections=_SECTIONS),
    11: record(m.Cancel, job=_U64),
    12: record(m.Reset, req=_U32),
    13: record(m.Ping, req=_U32),
    14: record(m.Done, job=_U64, statuses=Bin(0, MAX_JOB_BLOCKS)),
    15: record(m.Cancelled, job=_U64),
    16: record(m.Pong, req=_U32),
    17: record(m.ResetDone, req=_U32, status=_U8, text=_TEXT, epoch=_U32),
    18: record(m.Epoch, epoch=_U32),
    19: record(m.Error, code=_U8, text=_TEXT),
    20: record(m.Switches, loads=_FLAG, saves=_FLAG),
    21: record(m.Unregistered, req=_U32, status=_U8, text=_TEXT),
    24: record(m.Offer, name=_TRANSFER, tokens=_U32, ttl_ms=Uint(1, MAX_TRANSFER_MS)),
    25: record(m.Offered, name=_TRANSFER, tokens=_U32),
    26: record(m.Delivered, name=_TRANSFER),
    27: record(m.Stages, off=_U64, count=Uint(1, MAX_STAGE_WORDS), stages=Bin(2, MAX_SEGMENTS * 2)),
    28: record(
        m.StagedLoad,
        job=_U64, epoch=_U32, step=_U64, event=_U32, lease=_U64, word=Uint(0, MAX_STAGE_WORDS - 1), sections=_SECTIONS,
    ),
    29: record(
        m.Keep, group=_GROUP_INDEX, hash_len=Uint(1, MAX_HASH), hashes=Bin(1, MAX_JOB_BLOCKS * MAX_HASH),
        pin_ms=Uint(0, MAX_KEEP_MS), ttl_ms=Uint(0, MAX_KEEP_MS),
    ),
    30: record(m.Steps, steps=Bin(STEP_BYTES, MAX_STEPS * STEP_BYTES)),
    31: record(m.Budget, bytes=Uint(0, MAX_BUDGET)),
    37: record(
        m.BlockTokens,
        group=_GROUP_INDEX, parent=Bin(0, MAX_HASH), hash_len=Uint(1, MAX_HASH),
        hashes=Bin(1, MAX_JOB_BLOCKS * MAX_HASH), tokens=Bin(TOKEN_BYTES, MAX_FRAME), extra=Bin(0, MAX_EXTRA),
    ),
    38: record(m.NextEvents, req=_U32, blocks=Uint(1, MAX_EVENT_BLOCKS), anew=_FLAG),
    39: record(
        m.BlockEvents,
        req=_U32, state=Uint(m.EventsState.MORE, m.EventsState.REFUSED), runs=List(_EVENT_RUN, 0, MAX_EVENT_BLOCKS),
    ),
}  # fmt: skip
_NUMBERS: dict[type[Any], int] = {one.cls: number for number, one in _RECORDS.items()}

_SAVE, _LOAD, _STAGED_LOAD = _NUMBERS[m.Save], _NUMBERS[m.Load], _NUMBERS[m.StagedLoad]

_ARRAY = [bytes([0x90 | i]) for i in range(16)]  # msgpack's header of an array of i elements
_DONE_HEAD = _ARRAY[3] + bytes([_NUMBERS[m.Done]])


def encode(message: m.Message) -> bytes:
    """Return the body of a message's frame, without its length.

    Malformed names the field that is out of range.
    """
    number = _NUMBERS[type(message)]
    values = _RECORDS[number].write(message, type(message).__name__)
    _check(message)
    body = pack([number, *values])
    if len(body) > MAX_FRAME:
        raise Malformed(f"{type(message).__name__}: {len(body)} bytes, at most {MAX_FRAME}")
    return body


def save_frame(job: int, epoch: int, step: int, event: int, revoke: int, sections: Packed) -> bytes:
    """Return the frame of a SAVE with packed sections."""
    return _job_frame(_SAVE, (job, epoch, step, event, revoke), sections)


def load_frame(job: int, epoch: int, step: int, event: int, lease: int, sections: Packed) -> bytes:
    """Return the frame of a LOAD with packed sections."""
    return _job_frame(_LOAD, (job, epoch, step, event, lease), sections)


def staged_load_frame(job: int, epoch: int, step: int, event: int, lease: int, word: int, sections: Packed) -> bytes:
    """Return the frame of a STAGED_LOAD with packed sections."""
    return _job_frame(_STAGED_LOAD, (job, epoch, step, event, lease, word), sections)


def _job_frame(number: int, fields: tuple[int, ...], sections: Packed) -> bytes:
    if not 0 <= min(fields) <= max(fields) < 1 << 32:  # raises the precise error
        one = _RECORDS[number]
        for (name, field), value in zip(one.fields, fields, strict=False):
            field.write(value, f"{one.cls.__name__}.{name}")
    head = pack((number, *fields))  # the header of an array with one element less
    length = len(head) + len(sections.data)
    if length > MAX_FRAME:
        raise Malformed(f"{_RECORDS[number].cls.__name__}: {length} bytes, at most {MAX_FRAME}")
    return b"".join((_LENGTH.pack(length), _ARRAY[len(fields) + 2], head[1:], sections.data))


def decode(body: bytes) -> m.Message:
    """Return the message of a frame's body."""
    if body[:2] == _DONE_HEAD and (done := _decode_done(body)) is not None:
        return done
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


def _decode_done(body: bytes) -> m.Done | None:
    """Return a DONE, which follows every job, at a third of the cost; None if anything about it is
    unusual.
    """
    try:
        _, job, statuses = values = msgpack.unpackb(body)
    except (ValueError, msgpack.exceptions.UnpackException, msgpack.exceptions.ExtraData):
        return None
    if type(statuses) is not bytes or len(statuses) > MAX_JOB_BLOCKS or type(job) is not int or job < 0:
        return None
    return m.Done(job, statuses) if pack(values) == body else None


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
    if isinstance(message, m.Hello) and message.min_version > message.max_version:
        raise Malformed(f"Hello.min_version: {message.min_version} is more than max_version {message.max_version}")
    if isinstance(message, m.Register):
        check_identity(message.identity)
    elif isinstance(message, m.Keep):
        _check_keep(message)
    elif isinstance(message, m.Stages) and len(message.stages) % 2:
        raise Malformed(f"Stages.stages: {len(message.stages)} bytes, no multiple of 2")
    elif isinstance(message, (m.Save, m.Load, m.StagedLoad)):
        _check_sections(message.sections)
    elif isinstance(message, m.Steps) and len(message.steps) % STEP_BYTES:
        raise Malformed(f"Steps.steps: {len(message.steps)} bytes, no multiple of {STEP_BYTES}")
    elif isinstance(message, m.BlockTokens):
        _check_run(message)
        _check_tokens(message)
    elif isinstance(message, m.BlockEvents):
        for run in message.runs:
            _check_run(run)
            if run.kind == m.EventKind.STORED:
                _check_tokens(run)
            elif run.parent or run.tokens or run.extra:
                raise Malformed("EventRun.tokens: removed blocks have no parent, tokens or extra")


def _check_run(run: m.BlockTokens | m.EventRun) -> None:
    if run.parent and len(run.parent) != run.hash_len:
        raise Malformed(f"{type(run).__name__}.parent: {len(run.parent)} bytes, not 0 or hash_len {run.hash_len}")
    if len(run.hashes) % run.hash_len:
        raise Malformed(f"{type(run).__name__}.hashes: {len(run.hashes)} bytes, no multiple of {run.hash_len}")


def _check_tokens(run: m.BlockTokens | m.EventRun) -> None:
    blocks = len(run.hashes) // run.hash_len
    if not run.tokens or len(run.tokens) % (TOKEN_BYTES * blocks):
        raise Malformed(
            f"{type(run).__name__}.tokens: {len(run.tokens)} bytes, not as many for each of {blocks} blocks"
        )


def _check_keep(message: m.Keep) -> None:
    blocks, odd = divmod(len(message.hashes), message.hash_len)
    if odd or blocks > MAX_JOB_BLOCKS:
        raise Malformed(f"Keep.hashes: {len(message.hashes)} bytes do not fit hash_len {message.hash_len}")
    if not message.pin_ms and not message.ttl_ms:
        raise Malformed(f"Keep.ttl_ms: 0, allowed with pin_ms 0 is 1 to {MAX_KEEP_MS}")


def check_identity(identity: tuple[tuple[str, str], ...]) -> None:
    """Raise Malformed unless an identity has the right shape, is sorted by unique keys, and is
    bounded.
    """
    _IDENTITY.write(identity, "identity")
    keys = [key.encode() for key, _ in identity]
    if any(first >= second for first, second in itertools.pairwise(keys)):
        raise Malformed("identity: keys are not sorted, or one is there twice")
    size = sum(len(key.encode()) + len(value.encode()) for key, value in identity)
    if size > MAX_IDENTITY_BYTES:
        raise Malformed(f"identity: {size} bytes, at most {MAX_IDENTITY_BYTES}")


def _check_sections(sections: tuple[m.Section, ...]) -> None:
    total = 0
    for i, section in enumerate(sections):
        blocks, odd = divmod(len(section.blocks), 4)
        if odd or len(section.hashes) != blocks * section.hash_len:
            raise Malformed(
                f"sections[{i}]: {len(section.hashes)} bytes of hashes and {len(section.blocks)} of blocks "
                f"do not fit hash_len {section.hash_len}"
            )
        if section.parent and len(section.parent) != section.hash_len:
            raise Malformed(f"sections[{i}].parent: {len(section.parent)} bytes, allowed is 0 or {section.hash_len}")
        total += blocks
    if total > MAX_JOB_BLOCKS:
        raise Malformed(f"sections: {total} blocks, at most {MAX_JOB_BLOCKS}")
