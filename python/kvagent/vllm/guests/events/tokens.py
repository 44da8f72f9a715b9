"""Says to the agent the tokens of the blocks that the engine saves and loads (BLOCK_TOKENS).

Only blocks of text that vLLM hashes by their tokens and a cache salt are said. Blocks with images,
LoRA adapters, prompt embeddings or the next token in their keys have other names in the agent than
in the engine's own events, so routers hear nothing of them.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

from kvagent.errors import Busy, SessionBroken, SessionEnded
from kvagent.limits import MAX_EXTRA, TOKEN_BYTES
from kvagent.messages import BlockTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.session import Session
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.guests.events.publication import EventCounts

RUN_BYTES = 64 << 10  # tokens in one message
MAX_WAITING_BYTES = 16 << 20  # tokens that wait until the agent reads; more are lost
MAX_BLOCK_TOKENS = 1 << 14  # of a block of which the agent keeps tokens (docs/PROTOCOL.md)
SALT = b"\x01"  # the first byte of ``extra`` of a block whose extra key is a cache salt, which follows


def extra_of(request: Any) -> bytes | None:
    """Return ``extra`` of a request's first block, or None if its blocks are not said."""
    if (
        getattr(request, "lora_request", None) is not None
        or getattr(request, "mm_features", None)
        or getattr(request, "prompt_embeds", None) is not None
        or getattr(request, "resumable", False)  # its later turns replace hashes
    ):
        return None
    salt = getattr(request, "cache_salt", None)
    try:
        extra = SALT + str(salt).encode() if salt else b""
    except UnicodeEncodeError:
        return None  # nor can vLLM's publisher encode it
    return extra if len(extra) <= MAX_EXTRA else None


def salt_of(extra: bytes) -> tuple[str] | None:
    """Return the extra keys of a block from its ``extra``, which is not empty; None if it is of
    another kind. It is another engine's word: no exception of it may reach vLLM's scheduler.
    """
    if extra[:1] != SALT:
        return None
    try:
        return (extra[1:].decode(),)
    except UnicodeDecodeError:
        return None


class Tokens:
    """The tokens that are to be said."""

    def __init__(self, geometry: Geometry, counts: EventCounts) -> None:
        self.sizes = {
            group: spec.block_tokens
            for group, spec in enumerate(geometry.groups)
            if not spec.window and group not in geometry.states and spec.block_tokens <= MAX_BLOCK_TOKENS
        }
        """Tokens of a block, by group of which events tell: those of whole prefixes."""
        self._scales = {group: geometry.scale(group) for group in self.sizes}
        self._counts = counts
        self._waiting: deque[BlockTokens] = deque()
        self._bytes = 0

    def say(self, request: Any, extra: bytes | None, group: int, first: int, blocks: int) -> None:
        """Say the tokens of a request's blocks of a group from the block ``first`` on, unless
        ``extra`` of its first block is None.
        """
        size = self.sizes.get(group)
        if extra is None or size is None or blocks <= 0:
            return
        scale, hashes = self._scales[group], request.block_hashes
        ids = request.all_token_ids[first * size : (first + blocks) * size]
        if len(ids) < blocks * size:
            return
        tokens = _packed(ids)
        keys = hashes[(first + 1) * scale - 1 : (first + blocks) * scale : scale]
        parent = hashes[first * scale - 1] if first else b""
        at = 0
        while at < blocks:
            own = extra if first + at == 0 else b""
            n = 1 if own else max(RUN_BYTES // (size * TOKEN_BYTES), 1)
            data = tokens[at * size * TOKEN_BYTES : (at + n) * size * TOKEN_BYTES]
            some = keys[at : at + n]
            if self._bytes + len(data) > MAX_WAITING_BYTES:
                self._counts.events_unsaid += len(some)
            else:
                self._waiting.append(BlockTokens(group, parent, len(some[0]), b"".join(some), data, own))
                self._bytes += len(data)
            parent = some[-1]
            at += n

    def send(self, session: Session) -> None:
        """Send what is to be said, as far as the session accepts it now."""
        if not self._waiting:
            return
        session.cork()
        try:
            while self._waiting:
                session.send(self._waiting[0])
                self._bytes -= len(self._waiting.popleft().tokens)
        except Busy:
            pass  # the rest is sent in another step
        except (SessionEnded, SessionBroken):
            self.clear()
        finally:
            session.uncork()

    def clear(self) -> None:
        """Say nothing of what was to be said: its session has ended."""
        self._waiting.clear()
        self._bytes = 0


def _packed(ids: Sequence[int]) -> bytes:
    """Return token ids as u32 LE."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpacked(tokens: bytes) -> list[int]:
    """Return token ids from u32 LE."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
