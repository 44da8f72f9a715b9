"""What the scheduler's thread and the tier's thread tell each other."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_BYTES = 4  # of a key, at its end
Key = bytes
"""vLLM's OffloadKey: a block hash and the number of its KV cache group, big-endian."""


def hash_of(key: Key) -> bytes:
    """Return the block hash of a key."""
    return key[:-GROUP_BYTES]


def group_of(key: Key) -> int:
    """Return the group of a key."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def kind_of(key: Key) -> tuple[int, int]:
    """Return what the keys of one question, or of one section of a job, have in common."""
    return group_of(key), len(key)


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks how many of the keys, from the first one on, are stored. All are of one group and of one
    length.
    """

    request: str
    serial: int
    """Of the generation of the weights: an answer of an older one is void."""
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Save rows of vLLM's region."""

    job: int
    keys: tuple[Key, ...]
    rows: tuple[int, ...]
    parents: tuple[bytes, ...]
    """For each key the hash before it, or empty."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load into rows of vLLM's region."""

    job: int
    request: str
    keys: tuple[Key, ...]
    rows: tuple[int, ...]


Order = Ask | Store | Load


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to an Ask: the first ``found`` keys are stored, those up to ``known`` are not, and
    the others are to be asked for again.
    """

    ask: Ask
    found: int
    known: int
    late: bool = False
    """Whether the agent did not answer: the keys count as not stored."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a Store or Load: the agent does not touch its rows any more, or cannot make
    anything of them.
    """

    job: int
    done: tuple[Key, ...]
    """The keys that were stored, or that arrived and verified."""
    seconds: float


Result = Answered | Finished
