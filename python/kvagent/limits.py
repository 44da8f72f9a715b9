"""Limits of the session socket's messages (docs/PROTOCOL.md, section 3)."""

from __future__ import annotations

MAX_FRAME = 1 << 20  # bytes
MAX_NAME = 128  # bytes of an instance, look-up or software name
MAX_TEXT = 1024  # bytes
MAX_PATH = 107  # bytes of a socket's path
MAX_HASH = 32  # bytes
MAX_HANDLE = 256  # bytes of a region's handle
MAX_IDENTITY_PAIRS = 64
MAX_IDENTITY_BYTES = 16 << 10
MAX_GROUPS = 16
CHUNKED = 1 << 31  # added to the tokens of a chunk in the window of a group
MAX_WORLD = 64  # ranks
MAX_SHARDS = 256
MAX_EVENTS = 65536  # events of a worker, and as many revocation words
MAX_REGIONS = 4096  # of one registration
MAX_REGIONS_MESSAGE = 253  # of one REGIONS: the kernel passes that many descriptors
MAX_SEGMENTS = 65536  # of one registration
MAX_SEGMENTS_MESSAGE = 8192
MAX_SECTIONS = 64
MAX_JOB_BLOCKS = 8192
MAX_RELEASES = 4096  # leases in one RELEASE
MAX_TRANSFER_NAME = 256  # bytes
MAX_TRANSFER_MS = 600_000  # of a transfer's time to live
MAX_STAGES = 4096  # of a worker
MAX_STAGE_WORDS = 1024  # of a worker, and so the most staged loads in flight
MAX_STEPS = 64  # decode steps in one STEPS
STEP_BYTES = 12  # of one of them
MAX_BUDGET = 1 << 46  # bytes of a worker's budget
MAX_EXTRA = 4096  # bytes of what a run's events have besides tokens
MAX_EVENT_BLOCKS = 4096  # of one BLOCK_EVENTS
TOKEN_BYTES = 4
MAX_HINT_MS = 86_400_000  # of an action's time
MAX_HINT_ACTIONS = 16  # of one HINT
MAX_HINT_ID = 128  # bytes of an action's name, and of a session's
MAX_PRIORITY = 100
MAX_PEER_ADDRESS = 128  # bytes of the address of an agent's peer listener
