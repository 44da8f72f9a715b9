"""kvagent's own form of look-ups: one msgpack array each way (docs/PROTOCOL.md, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvagent.canonical import pack, unpack
from kvagent.errors import Malformed
from kvagent.fields import Bin, Uint, record

VERSION = 2
MAX_HASHES = 65536
MAX_HASH = 32  # bytes
MAX_GROUPS = 16
OWN_SPACE = bytes(16)
"""Stands for the space of the look-up socket itself."""


class Want(IntEnum):
    """The purpose of a look-up."""

    PROBE = 0
    RESERVE = 1


class LookupStatus(IntEnum):
    """The result of a look-up."""

    HIT = 0
    PENDING = 1
    OFF = 2
    NOT_REGISTERED = 3
    MALFORMED = 4
    OVERLOADED = 5
    NO_SESSION = 6
    LEASE_CAP = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Asks how much of a prompt is stored.

    ``hashes`` are joined; ``deadline_us`` 0 is the default.
    """

    version: int = VERSION
    space: bytes = OWN_SPACE
    session: int = 0
    want: int = Want.PROBE
    tokens: int
    hbm_tokens: int = 0
    deadline_us: int = 0
    groups: bytes = b""
    hash_len: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """``tokens`` of the prompt, from token 0, are stored; ``lease`` pins them unless it is 0."""

    version: int
    status: int
    tokens: int
    lease: int
    boot: bytes


_U8, _U32, _U64, _ID = Uint(0, 2**8 - 1), Uint(0, 2**32 - 1), Uint(0, 2**64 - 1), Bin(16, 16)
_REQUEST = record(
    Request,
    version=Uint(1, VERSION), space=_ID, session=_U64, want=Uint(Want.PROBE, Want.RESERVE), tokens=_U32,
    hbm_tokens=_U32, deadline_us=_U32, groups=Bin(0, MAX_GROUPS), hash_len=Uint(0, MAX_HASH),
    hashes=Bin(0, MAX_HASHES * MAX_HASH),
)  # fmt: skip
_GROUPS = 7  # index of groups, which version 1 lacks
_ANSWER = record(Answer, version=Uint(1, VERSION), status=_U8, tokens=_U32, lease=_U64, boot=_ID)


def encode_request(request: Request) -> bytes:
    """Return the frame of a request."""
    values = _REQUEST.write(request, "Request")
    _check(request)
    if request.version == 1:
        del values[_GROUPS]
    return pack(values)


def decode_request(frame: bytes) -> Request:
    """Return the request of a frame."""
    values = unpack(frame)
    if isinstance(values, list) and values[:1] == [1]:
        if len(values) != len(_REQUEST.fields) - 1:
            raise Malformed(f"Request: {len(values)} fields, version 1 has {len(_REQUEST.fields) - 1}")
        values.insert(_GROUPS, b"")
    request: Request = _REQUEST.read(values, "Request")
    _check(request)
    return request


def encode_answer(answer: Answer) -> bytes:
    """Return the frame of an answer."""
    return pack(_ANSWER.write(answer, "Answer"))


def decode_answer(frame: bytes) -> Answer:
    """Return the answer of a frame."""
    answer: Answer = _ANSWER.read(unpack(frame), "Answer")
    return answer


def _check(request: Request) -> None:
    size, most = len(request.hashes), MAX_HASHES * request.hash_len
    if size > most or (size and size % request.hash_len):
        raise Malformed(f"Request.hashes: {size} bytes, allowed are multiples of {request.hash_len} up to {most}")
    if request.version == 1 and request.groups:
        raise Malformed("Request.groups: version 1 has none")
