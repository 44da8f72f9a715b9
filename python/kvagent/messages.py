"""The messages of the session socket, one dataclass each, with their numbers and statuses
(docs/PROTOCOL.md, section 3).

Numbers are plain ints, hashes and handles bytes; lists are tuples, so that messages can be stored
and compared.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = 3
MIN_VERSION = 3

NO_INDEX = 2**32 - 1
"""As an event: none to wait for. As a revocation word: not revocable."""


class Role(IntEnum):
    """The engine's process that a session belongs to."""

    SCHEDULER = 0
    WORKER = 1


class RegionKind(IntEnum):
    """How the agent reaches a region."""

    FD = 1
    PEER = 2
    CUDA = 3
    CUDA_FD = 4

    @property
    def has_fd(self) -> bool:
        """Whether a descriptor accompanies the region."""
        return self in (RegionKind.FD, RegionKind.CUDA_FD)


class BlockStatus(IntEnum):
    """The outcome of one block of a job."""

    OK = 0
    EXISTS = 1
    IN_PROGRESS = 2
    BUSY = 3
    STALE = 4
    MISSING = 5
    CORRUPT = 6
    INVALID = 7
    REVOKED = 16
    CANCELLED = 17
    TIMED_OUT = 18
    FAILED = 19
    OFF = 20


class RegStatus(IntEnum):
    """The result of a registration, an unregistration or a reset."""

    DONE = 0
    REFUSED = 1
    CLASH = 2


class ErrorCode(IntEnum):
    """Why the agent ends a session."""

    VERSION = 1
    MALFORMED = 2
    PERMISSION = 3
    LIMIT = 4
    SHUTDOWN = 5
    INTERNAL = 6


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session."""

    min_version: int
    max_version: int
    software: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answers HELLO. ``max_frame`` and ``lease_bytes`` in bytes.

    ``peer`` is host:port where other agents reach this one, or empty.
    """

    version: int
    boot: bytes
    session: int
    max_frame: int = 0
    max_job_blocks: int = 0
    max_queue: int = 0
    lease_bytes: int = 0
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group. ``window`` in tokens, 0 for full attention; CHUNKED and the tokens of a
    chunk for chunked local attention.
    """

    block_tokens: int
    num_blocks: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class Sync:
    """The placement of a worker's words in its sync region; offsets in bytes."""

    region: int
    step_off: int
    events_off: int
    events: int
    revoke_off: int
    revokes: int


@dataclass(frozen=True, slots=True)
class Register:
    """Registers one rank of an engine, or its scheduler; ``regions`` and ``segments`` count what
    follows.

    ``held`` are the shards of a worker, ascending. A block has ``shards``.
    """

    req: int
    instance: str
    role: int
    rank: int
    world: int
    held: tuple[int, ...]
    shards: int
    identity: tuple[tuple[str, str], ...]
    groups: tuple[Group, ...]
    hash_tokens: int
    lookup_name: str
    sync: Sync | None
    regions: int
    segments: int


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of the engine; ``size`` in bytes, ``addr`` for PEER, ``handle`` for CUDA."""

    id: int
    kind: int
    size: int
    addr: int = 0
    handle: bytes = b""


@dataclass(frozen=True, slots=True)
class Regions:
    """Registers regions; a descriptor accompanies each that has one, in order."""

    req: int
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of every block of a group: block b has ``bytes`` bytes at ``offset + b * stride`` of
    the region.
    """

    region: int
    offset: int
    stride: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of a shard's group, continuing the last SEGMENTS of both."""

    req: int
    shard: int
    group: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Registered:
    """Answers REGISTER once all its regions and segments arrived."""

    req: int
    status: int
    text: str
    space: bytes
    epoch: int
    lookup_path: str


@dataclass(frozen=True, slots=True)
class Unregister:
    """Withdraws the registration."""

    req: int


@dataclass(frozen=True, slots=True)
class Unregistered:
    """Answers UNREGISTER when the regions are no longer accessed."""

    req: int
    status: int
    text: str


@dataclass(frozen=True, slots=True)
class Release:
    """Releases leases."""

    leases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A run of chained blocks of one group: ``hashes`` joined, ``blocks`` the engine's block IDs as
    u32 LE, joined.
    """

    group: int
    parent: bytes
    hash_len: int
    hashes: bytes
    blocks: bytes

    @classmethod
    def of(cls, group: int, hashes: Sequence[bytes], blocks: Sequence[int], parent: bytes = b"") -> Section:
        """Return the section of hashes of one length, at least one, and as many block IDs.

        ``parent`` is the hash before the first.
        """
        return cls(group, parent, len(hashes[0]), b"".join(hashes), struct.pack(f"<{len(blocks)}I", *blocks))


@dataclass(frozen=True, slots=True)
class Save:
    """Stores blocks once ``step`` has ended and ``event`` has fired; ``revoke`` names a word."""

    job: int
    epoch: int
    step: int
    event: int
    revoke: int
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Loads blocks once ``step`` (the one in flight) has ended and ``event`` has fired."""

    job: int
    epoch: int
    step: int
    event: int
    lease: int
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a job."""

    job: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Answers CANCEL, after the job's DONE."""

    job: int


@dataclass(frozen=True, slots=True)
class Done:
    """Reports a job, with one status byte per block of all its sections in order. A fence."""

    job: int
    statuses: bytes


@dataclass(frozen=True, slots=True)
class Reset:
    """Starts a new weights epoch."""

    req: int


@dataclass(frozen=True, slots=True)
class ResetDone:
    """Answers RESET."""

    req: int
    status: int
    text: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Epoch:
    """Reports that an engine reset the space."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Opens a transfer of a prompt's first ``tokens``, or renews it.

    ``tokens`` are whole blocks; 0 if not known.
    """

    name: bytes
    tokens: int
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Offered:
    """Completes a transfer: ``tokens`` are stored, and nothing more will be."""

    name: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """Ends a transfer: its receiver has it, or no longer wants it."""

    name: bytes


@dataclass(frozen=True, slots=True)
class Steps:
    """Reports decode steps of a worker that have ended, the oldest first.

    ``steps`` has for each its age and its time in us, and its requests, u32 LE.
    """

    steps: bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits what the blocks that a worker's engine stores may take of the pool: ``bytes`` of what
    this worker holds of them, 0 for any number.
    """

    bytes: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Asks to keep blocks for a time, or to drop them after a time unless they are used.

    ``hashes`` are joined; a time of 0 asks for nothing.
    """

    group: int
    hash_len: int
    hashes: bytes
    pin_ms: int
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class BlockTokens:
    """The tokens of a run of chained blocks, u32 LE; ``hashes`` and ``tokens`` are joined.

    ``parent`` is the hash of the block before the first, empty at the start of a prompt. ``extra``
    comes back as it is with each of the blocks.
    """

    group: int
    parent: bytes
    hash_len: int
    hashes: bytes
    tokens: bytes
    extra: bytes


@dataclass(frozen=True, slots=True)
class NextEvents:
    """Asks for the next events of the space, of at most ``blocks`` blocks.

    ``anew`` is 1 to be told everything from the beginning, else 0. The answer repeats ``req``.
    """

    req: int
    blocks: int
    anew: int


class EventKind(IntEnum):
    """What became of the blocks of a run."""

    STORED = 1
    REMOVED = 2


class EventsState(IntEnum):
    """What follows a BLOCK_EVENTS."""

    MORE = 0  # there is more to tell
    WHOLE = 1  # everything was told
    REFUSED = 2  # nothing is told to this session


@dataclass(frozen=True, slots=True)
class EventRun:
    """Blocks that were stored, which are chained, or removed, which have no more than hashes."""

    kind: int
    medium: int  # 1: the agent's memory; 2: the node's disk below it
    group: int
    parent: bytes
    hash_len: int
    hashes: bytes
    tokens: bytes
    extra: bytes


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Answers NEXT_EVENTS once there is something to tell."""

    req: int
    state: int
    runs: tuple[EventRun, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a PONG."""

    req: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Answers PING."""

    req: int


@dataclass(frozen=True, slots=True)
class Error:
    """Tells why the session ends."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class Switches:
    """The agent's switches: 1 on, 0 off."""

    loads: int
    saves: int


@dataclass(frozen=True, slots=True)
class Stages:
    """Declares the stages of a registered worker's segments (u16 LE each, joined, in the order of
    the registration), and ``count`` words at ``off``, in bytes, of its sync region.
    """

    off: int
    count: int
    stages: bytes


@dataclass(frozen=True, slots=True)
class StagedLoad:
    """Loads blocks stage by stage; ``word`` is the index of the word that counts the stages."""

    job: int
    epoch: int
    step: int
    event: int
    lease: int
    word: int
    sections: tuple[Section, ...]


Message: TypeAlias = (
    Hello
    | Welcome
    | Register
    | Regions
    | Segments
    | Registered
    | Unregister
    | Unregistered
    | Release
    | Save
    | Load
    | Cancel
    | Cancelled
    | Done
    | Reset
    | ResetDone
    | Epoch
    | Offer
    | Offered
    | Delivered
    | Stages
    | StagedLoad
    | Steps
    | Keep
    | Budget
    | BlockTokens
    | NextEvents
    | BlockEvents
    | Ping
    | Pong
    | Error
    | Switches
)
