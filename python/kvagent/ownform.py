"""kvagent's own form of look-ups: one msgpack array each way (docs/PROTOCOL.md, section 2.1)."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from kvagent.errors import Malformed
from kvagent.fields import Record, binary, pack, string, uint, unpack
from kvagent.limits import MAX_PEER_ADDRESS, MAX_TRANSFER_NAME
from kvagent.messages import ID, U8, U32, U64, Flag

VERSION = 3
MAX_HASHES = 65536
MAX_HASH = 32  # bytes
MAX_GROUPS = 16
OWN_SPACE = bytes(16)
"""Stands for the space of the look-up socket itself."""


class Want(IntEnum):
    """The purpose of a look-up."""

    PROBE = 0
    RESERVE = 1
    READY = 2
    """Reserve, and say whether the blocks can be loaded at once."""


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
    READY = 8
    """As HIT, and all blocks are in the agent's memory as they were saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Asks how much of a prompt is stored. ``hashes`` are joined; ``deadline_us`` 0 is the default.
    ``transfer`` names the transfer whose blocks these are, or is empty; ``peer`` is the address of
    the agent that has it, empty for this agent and the shared tiers; ``early`` is 1 if it may not
    have been offered yet.
    """

    version: Annotated[int, uint(VERSION, VERSION)] = VERSION
    space: ID = OWN_SPACE
    session: U64 = 0
    want: Annotated[int, uint(Want.PROBE, Want.READY)] = Want.PROBE
    tokens: U32
    hbm_tokens: U32 = 0
    deadline_us: U32 = 0
    groups: Annotated[bytes, binary(0, MAX_GROUPS)] = b""
    hash_len: Annotated[int, uint(0, MAX_HASH)]
    hashes: Annotated[bytes, binary(0, MAX_HASHES * MAX_HASH)]
    transfer: Annotated[bytes, binary(0, MAX_TRANSFER_NAME)] = b""
    peer: Annotated[str, string(0, MAX_PEER_ADDRESS)] = ""
    early: Flag = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """``tokens`` of the prompt, from token 0, are stored; ``lease`` pins them unless it is 0. Of
    them, ``disk`` are being fetched from the node's own tiers and ``shared`` from shared ones.
    """

    version: Annotated[int, uint(VERSION, VERSION)]
    status: U8
    tokens: U32
    lease: U64
    boot: ID
    disk: U32 = 0
    shared: U32 = 0


_REQUEST, _ANSWER = Record(Request), Record(Answer)


def encode_request(request: Request) -> bytes:
    """Return the frame of a request."""
    values = _REQUEST.write(request, "Request")
    _check(request)
    return pack(values)


def decode_request(frame: bytes) -> Request:
    """Return the request of a frame."""
    request: Request = _REQUEST.read(unpack(frame), "Request")
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
