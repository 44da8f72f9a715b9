"""The messages of the session socket, one dataclass each, with their numbers and statuses
(docs/PROTOCOL.md, section 3).

Numbers are plain ints, hashes and handles bytes; lists are tuples, so that messages can be stored
and compared. The annotation of a field has its form on the wire and its limits.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from kvagent import limits
from kvagent.fields import Record, array, binary, optional, pair, string, uint

VERSION = 3
MIN_VERSION = 3

NO_INDEX = 2**32 - 1
"""As an event: none to wait for. As a revocation word: not revocable."""

U8 = Annotated[int, uint(0, 2**8 - 1)]
U32 = Annotated[int, uint(0, 2**32 - 1)]
U64 = Annotated[int, uint(0, 2**64 - 1)]
Positive = Annotated[int, uint(1, 2**32 - 1)]
Flag = Annotated[int, uint(0, 1)]
ID = Annotated[bytes, binary(16, 16)]
Name = Annotated[str, string(0, limits.MAX_NAME)]
Text = Annotated[str, string(0, limits.MAX_TEXT)]
GroupIndex = Annotated[int, uint(0, limits.MAX_GROUPS - 1)]
Transfer = Annotated[bytes, binary(1, limits.MAX_TRANSFER_NAME)]
Hash = Annotated[bytes, binary(0, limits.MAX_HASH)]
HashBytes = Annotated[int, uint(1, limits.MAX_HASH)]
Hashes = Annotated[bytes, binary(1, limits.MAX_JOB_BLOCKS * limits.MAX_HASH)]
Identity = Annotated[
    tuple[tuple[str, str], ...],
    array(
        pair(string(1, limits.MAX_IDENTITY_BYTES), string(0, limits.MAX_IDENTITY_BYTES)), 0, limits.MAX_IDENTITY_PAIRS
    ),
]


class Message:
    """A message of the session socket, in either direction."""

    __slots__ = ()


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
    UNWANTED = 8
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
class Hello(Message):
    """Opens a session."""

    min_version: Positive
    max_version: Positive
    software: Name


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Answers HELLO. Sizes in bytes; ``peer`` is host:port for other agents, or empty."""

    version: Annotated[int, uint(MIN_VERSION, VERSION)]
    boot: ID
    session: U64
    max_frame: U32 = 0
    max_job_blocks: U32 = 0
    max_queue: U32 = 0
    lease_bytes: U64 = 0
    peer: Annotated[str, string(0, limits.MAX_PEER_ADDRESS)] = ""


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group. ``window`` in tokens; 0: full attention; CHUNKED and those of a chunk."""

    block_tokens: Positive
    num_blocks: U32
    window: U32 = 0


@dataclass(frozen=True, slots=True)
class Sync:
    """The placement of a worker's words in its sync region; offsets in bytes."""

    region: U32
    step_off: U64
    events_off: U64
    events: Annotated[int, uint(0, limits.MAX_EVENTS)]
    revoke_off: U64
    revokes: Annotated[int, uint(0, limits.MAX_EVENTS)]


@dataclass(frozen=True, slots=True)
class Register(Message):
    """Registers one rank of an engine, or its scheduler; ``regions`` and ``segments`` count what
    follows. ``held`` are the shards of a worker, ascending. A block has ``shards``.
    """

    req: U32
    instance: Annotated[str, string(1, limits.MAX_NAME)]
    role: Annotated[int, uint(Role.SCHEDULER, Role.WORKER)]
    rank: Annotated[int, uint(0, limits.MAX_WORLD - 1)]
    world: Annotated[int, uint(1, limits.MAX_WORLD)]
    held: Annotated[tuple[int, ...], array(uint(0, limits.MAX_SHARDS - 1), 0, limits.MAX_SHARDS)]
    shards: Annotated[int, uint(1, limits.MAX_SHARDS)]
    identity: Identity
    groups: Annotated[tuple[Group, ...], array(Record(Group), 1, limits.MAX_GROUPS)]
    hash_tokens: Positive
    lookup_name: Name
    sync: Annotated[Sync | None, optional(Record(Sync))]
    regions: Annotated[int, uint(0, limits.MAX_REGIONS)]
    segments: Annotated[int, uint(0, limits.MAX_SEGMENTS)]


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of the engine; ``size`` in bytes, ``addr`` for PEER, ``handle`` for CUDA."""

    id: U32
    kind: Annotated[int, uint(RegionKind.FD, RegionKind.CUDA_FD)]
    size: U64
    addr: U64 = 0
    handle: Annotated[bytes, binary(0, limits.MAX_HANDLE)] = b""


@dataclass(frozen=True, slots=True)
class Regions(Message):
    """Registers regions; a descriptor accompanies each that has one, in order."""

    req: U32
    regions: Annotated[tuple[Region, ...], array(Record(Region), 0, limits.MAX_REGIONS_MESSAGE)]


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of every block of a group: block b's is at ``offset + b * stride`` of the region."""

    region: U32
    offset: U64
    stride: U64
    bytes: Positive


@dataclass(frozen=True, slots=True)
class Segments(Message):
    """Segments of a shard's group, continuing the last SEGMENTS of both."""

    req: U32
    shard: Annotated[int, uint(0, limits.MAX_SHARDS - 1)]
    group: GroupIndex
    segments: Annotated[tuple[Segment, ...], array(Record(Segment), 0, limits.MAX_SEGMENTS_MESSAGE)]


@dataclass(frozen=True, slots=True)
class Registered(Message):
    """Answers REGISTER once all its regions and segments arrived."""

    req: U32
    status: U8
    text: Text
    space: ID
    epoch: U32
    lookup_path: Annotated[str, string(0, limits.MAX_PATH)]


@dataclass(frozen=True, slots=True)
class Unregister(Message):
    """Withdraws the registration."""

    req: U32


@dataclass(frozen=True, slots=True)
class Unregistered(Message):
    """Answers UNREGISTER when the regions are no longer accessed."""

    req: U32
    status: U8
    text: Text


@dataclass(frozen=True, slots=True)
class Release(Message):
    """Releases leases."""

    leases: Annotated[tuple[int, ...], array(uint(0, 2**64 - 1), 0, limits.MAX_RELEASES)]


@dataclass(frozen=True, slots=True)
class Section:
    """Chained blocks of one group: ``hashes`` joined, ``blocks`` the engine's IDs, u32 LE."""

    group: GroupIndex
    parent: Hash
    hash_len: HashBytes
    hashes: Hashes
    blocks: Annotated[bytes, binary(4, limits.MAX_JOB_BLOCKS * 4)]


Sections = Annotated[tuple[Section, ...], array(Record(Section), 1, limits.MAX_SECTIONS)]


@dataclass(frozen=True, slots=True)
class Save(Message):
    """Stores blocks once ``step`` has ended and ``event`` has fired; ``revoke`` names a word."""

    job: U64
    epoch: U32
    step: U64
    event: U32
    revoke: U32
    sections: Sections


@dataclass(frozen=True, slots=True)
class Load(Message):
    """Loads blocks once ``step`` (the one in flight) has ended and ``event`` has fired."""

    job: U64
    epoch: U32
    step: U64
    event: U32
    lease: U64
    sections: Sections


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Ends a job."""

    job: U64


@dataclass(frozen=True, slots=True)
class Cancelled(Message):
    """Answers CANCEL, after the job's DONE."""

    job: U64


@dataclass(frozen=True, slots=True)
class Done(Message):
    """Reports a job, with one status byte per block of all its sections in order. A fence."""

    job: U64
    statuses: Annotated[bytes, binary(0, limits.MAX_JOB_BLOCKS)]


@dataclass(frozen=True, slots=True)
class Reset(Message):
    """Starts a new weights epoch."""

    req: U32


@dataclass(frozen=True, slots=True)
class ResetDone(Message):
    """Answers RESET."""

    req: U32
    status: U8
    text: Text
    epoch: U32


@dataclass(frozen=True, slots=True)
class Epoch(Message):
    """Reports that an engine reset the space."""

    epoch: U32


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """Opens or renews a transfer of a prompt's first ``tokens``, whole blocks; 0: not known."""

    name: Transfer
    tokens: U32
    ttl_ms: Annotated[int, uint(1, limits.MAX_TRANSFER_MS)]


@dataclass(frozen=True, slots=True)
class Offered(Message):
    """Completes a transfer: ``tokens`` are stored, and nothing more will be."""

    name: Transfer
    tokens: U32


@dataclass(frozen=True, slots=True)
class Delivered(Message):
    """Ends a transfer: its receiver has it, or no longer wants it."""

    name: Transfer


@dataclass(frozen=True, slots=True)
class Steps(Message):
    """Reports decode steps of a worker that have ended, the oldest first. ``steps`` has for each
    its age and its time in us, and its requests, u32 LE.
    """

    steps: Annotated[bytes, binary(limits.STEP_BYTES, limits.MAX_STEPS * limits.STEP_BYTES)]


@dataclass(frozen=True, slots=True)
class Budget(Message):
    """Limits what this worker holds of its engine's blocks in the pool; 0: any number."""

    bytes: Annotated[int, uint(0, limits.MAX_BUDGET)]


class Finish(IntEnum):
    """How a request ended."""

    UNKNOWN = 0
    STOP = 1
    LENGTH = 2
    TOOL = 3
    ABORT = 4


class Action(IntEnum):
    """What to do with blocks (docs/STEERING.md)."""

    RETAIN = 1
    PIN = 2
    DEMOTE = 3
    DROP = 4
    PREFETCH = 5
    FETCH = 6


class ActionState(IntEnum):
    """What became of an action."""

    ACCEPTED = 1
    CLIPPED = 2
    DEFERRED = 3
    REJECTED = 4
    MISSING = 5


HintID = Annotated[str, string(0, limits.MAX_HINT_ID)]
ActionKind = Annotated[int, uint(min(Action), max(Action))]


@dataclass(frozen=True, slots=True)
class HintAction:
    """One action on all chains of a Hint. ``ms``: how long, or of a drop after how long; 0: not
    told. ``peer``: host:port of the agent that has the blocks, of a fetch.
    """

    id: HintID
    kind: ActionKind
    priority: Annotated[int, uint(0, limits.MAX_PRIORITY)] = 0
    ms: Annotated[int, uint(0, limits.MAX_HINT_MS)] = 0
    peer: Annotated[str, string(0, limits.MAX_PEER_ADDRESS)] = ""


@dataclass(frozen=True, slots=True)
class HintChain:
    """A run of chained blocks of one group, ``hashes`` joined. ``own`` has a bit for each, from the
    lowest on: the session was the first to store it. Empty: none of them.
    """

    group: GroupIndex
    hash_len: HashBytes
    hashes: Hashes
    own: Annotated[bytes, binary(0, limits.MAX_JOB_BLOCKS // 8)] = b""


@dataclass(frozen=True, slots=True)
class Hint(Message):
    """Tells how blocks will be used: facts of a request's end, with its output, and actions."""

    req: U32
    session: HintID
    finish: Annotated[int, uint(min(Finish), max(Finish))]
    output: U32
    actions: Annotated[tuple[HintAction, ...], array(Record(HintAction), 0, limits.MAX_HINT_ACTIONS)]
    chains: Annotated[tuple[HintChain, ...], array(Record(HintChain), 1, limits.MAX_GROUPS)]


@dataclass(frozen=True, slots=True)
class HintReceipt:
    """What became of one action, with the blocks and bytes that it concerns."""

    id: HintID
    kind: ActionKind
    state: Annotated[int, uint(min(ActionState), max(ActionState))]
    blocks: U32
    bytes: U64
    reason: Text


@dataclass(frozen=True, slots=True)
class Hinted(Message):
    """Answers a Hint that has actions, and again when one that was deferred is over."""

    req: U32
    receipts: Annotated[tuple[HintReceipt, ...], array(Record(HintReceipt), 1, limits.MAX_HINT_ACTIONS)]


@dataclass(frozen=True, slots=True)
class BlockTokens(Message):
    """The tokens of a run of chained blocks, u32 LE; ``hashes`` and ``tokens`` are joined.
    ``parent`` is the hash of the block before the first, empty at the start of a prompt. ``extra``
    comes back as it is with each of the blocks.
    """

    group: GroupIndex
    parent: Hash
    hash_len: HashBytes
    hashes: Hashes
    tokens: Annotated[bytes, binary(limits.TOKEN_BYTES, limits.MAX_FRAME)]
    extra: Annotated[bytes, binary(0, limits.MAX_EXTRA)]


@dataclass(frozen=True, slots=True)
class NextEvents(Message):
    """Asks for the next events of the space, of at most ``blocks`` blocks. ``anew`` is 1 to be told
    everything from the beginning, else 0. The answer repeats ``req``.
    """

    req: U32
    blocks: Annotated[int, uint(1, limits.MAX_EVENT_BLOCKS)]
    anew: Flag


class EventKind(IntEnum):
    """What became of the blocks of a run."""

    STORED = 1
    REMOVED = 2


class EventsState(IntEnum):
    """What follows a BLOCK_EVENTS."""

    MORE = 0  # there is more to tell
    WHOLE = 1  # everything was told
    REFUSED = 2  # nothing is told to this session
    VOID = 3  # nothing that was told holds: everything is told from the beginning


@dataclass(frozen=True, slots=True)
class EventRun:
    """Blocks that were stored, which are chained, or removed, which have no more than hashes."""

    kind: Annotated[int, uint(EventKind.STORED, EventKind.REMOVED)]
    medium: Annotated[int, uint(1, 255)]  # 1: the agent's memory; 2: the node's disk below it
    group: GroupIndex
    parent: Hash
    hash_len: HashBytes
    hashes: Annotated[bytes, binary(1, limits.MAX_EVENT_BLOCKS * limits.MAX_HASH)]
    tokens: Annotated[bytes, binary(0, limits.MAX_FRAME)]
    extra: Annotated[bytes, binary(0, limits.MAX_EXTRA)]


@dataclass(frozen=True, slots=True)
class BlockEvents(Message):
    """Answers NEXT_EVENTS once there is something to tell."""

    req: U32
    state: Annotated[int, uint(EventsState.MORE, EventsState.VOID)]
    runs: Annotated[tuple[EventRun, ...], array(Record(EventRun), 0, limits.MAX_EVENT_BLOCKS)]


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Asks for a PONG."""

    req: U32


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """Answers PING."""

    req: U32


@dataclass(frozen=True, slots=True)
class Error(Message):
    """Tells why the session ends."""

    code: U8
    text: Text


@dataclass(frozen=True, slots=True)
class Switches(Message):
    """The agent's switches: 1 on, 0 off."""

    loads: Flag
    saves: Flag


@dataclass(frozen=True, slots=True)
class Stages(Message):
    """Declares the stages of a registered worker's segments (u16 LE each, joined, in the order of
    the registration), and ``count`` words at ``off``, in bytes, of its sync region.
    """

    off: U64
    count: Annotated[int, uint(1, limits.MAX_STAGE_WORDS)]
    stages: Annotated[bytes, binary(2, limits.MAX_SEGMENTS * 2)]


@dataclass(frozen=True, slots=True)
class StagedLoad(Message):
    """Loads blocks stage by stage; ``word`` is the index of the word that counts the stages."""

    job: U64
    epoch: U32
    step: U64
    event: U32
    lease: U64
    word: Annotated[int, uint(0, limits.MAX_STAGE_WORDS - 1)]
    sections: Sections


NUMBERS: dict[int, type[Message]] = {
    1: Hello, 2: Welcome, 3: Register, 4: Regions, 5: Segments, 6: Registered, 7: Unregister, 8: Release, 9: Save,
    10: Load, 11: Cancel, 12: Reset, 13: Ping, 14: Done, 15: Cancelled, 16: Pong, 17: ResetDone, 18: Epoch, 19:
    Error, 20: Switches, 21: Unregistered, 24: Offer, 25: Offered, 26: Delivered, 27: Stages, 28: StagedLoad, 29:
    Hint, 30: Steps, 31: Budget, 32: Hinted, 37: BlockTokens, 38: NextEvents, 39: BlockEvents,
}  # fmt: skip
"""The messages by number."""
