"""KV events: what routers are told of the blocks that the agent's memory and disk hold.

The agent knows which blocks it holds, and the engines know their tokens. Each engine says the
tokens of what it saves and loads, asks the agent what has changed, and publishes that in its own
stream of events, in the form of the running vLLM.

In each step vLLM takes the events. What was published is remembered: a block is stored once in
each medium, after the one before it, and removed once. When the agent's session ends, nothing of
what it held can be loaded, so all of it is removed, and the next session begins anew; likewise when
the agent says that what it told is void. After an AllBlocksCleared of vLLM's, by which routers
forget all media, everything that is held is asked for and told again.

The agent is told the tokens of the blocks that the engine saves and loads (BLOCK_TOKENS). Only
blocks of text that vLLM hashes by their tokens and a cache salt are said. Blocks with images, LoRA
adapters, prompt embeddings or the next token in their keys have other names in the agent than in
the engine's own events, so routers hear nothing of them.

vLLM's engine core steps only while it has requests or its connector has work. Else it sleeps in its
queue of input, and would publish an eviction with the next request. A thread watches the session's
socket meanwhile, without reading from it, and puts vLLM's own WAKEUP into that queue (internals).
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from array import array
from collections import Counter, deque
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvagent.errors import Busy, SessionBroken, SessionEnded
from kvagent.limits import MAX_EXTRA, TOKEN_BYTES
from kvagent.messages import BlockEvents, BlockTokens, EventKind, EventsState, NextEvents
from kvagent.vllm.hooks import Guest, Reset

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvagent.messages import EventRun
    from kvagent.session import Session
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.scheduler.agent_session import AgentSession
    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.side import SchedulerSide

    HashBlock = Callable[[bytes | None, list[int], tuple[str] | None], bytes]
    """Returns a block's hash, from that of the one before it, its tokens and its extra keys."""

MEDIA = (1, 2)  # of an EventRun: the agent's memory, and its disk
MEDIA_NAMES = {1: "CPU", 2: "STORAGE"}  # as vLLM names them


class EventForm:
    """Makes events. It is bound to vLLM's KV cache manager, which knows the kinds of its groups."""

    def __init__(self, media: Mapping[int, str] = MEDIA_NAMES) -> None:
        """``media``: names by the agent's numbers."""
        from vllm.distributed.kv_events import BlockRemoved, BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        self._stored, self._removed = BlockStored, BlockRemoved
        self.hash: Callable[[bytes], Any] = maybe_convert_block_hash
        """Returns a block hash as events name it: an integer, unless vLLM is told otherwise."""
        self.media = media
        self._kinds: Sequence[tuple[str, int | None]] = ()

    def bind(self, manager: Any) -> None:
        """Take the kinds of the KV cache groups."""
        self._kinds = getattr(manager, "kv_cache_event_metadata", ())

    def stored(
        self, group: int, parent: Any, hashes: list[Any], tokens: list[int], size: int,
        keys: list[tuple[str] | None], medium: int,
    ) -> Any:  # fmt: skip
        """Return the event that chained blocks of ``size`` tokens are stored, after the block
        ``parent`` or None. ``keys``: the extra keys of each block.
        """
        kind, window = self._kinds[group] if group < len(self._kinds) else (None, None)
        optional = {
            "extra_keys": keys, "group_idx": group, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window,
        }  # fmt: skip
        return self._stored(
            block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=size, lora_id=None,
            medium=self.media[medium], lora_name=None,
            **{name: value for name, value in optional.items() if name in self._stored.__struct_fields__},
        )  # fmt: skip

    def removed(self, group: int, hashes: list[Any], medium: int) -> Any:
        """Return the event that blocks are no longer stored there."""
        optional = {"group_idx": group} if "group_idx" in self._removed.__struct_fields__ else {}
        return self._removed(block_hashes=hashes, medium=self.media[medium], **optional)


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


class _Watched(NamedTuple):
    session: Session | None
    timeout_s: float | None
    writes: bool
    """Whether something waits to be sent."""

    def covers(self, other: _Watched) -> bool:
        """Return whether what wakes for the other wakes for this one too, no later."""
        timed = other.timeout_s is None or self.timeout_s is not None
        return self.session is other.session and timed and self.writes >= other.writes


class Waker:
    """Watches a session's socket, once for each call of ``watch``."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        """Wakes the engine. May be called from any thread."""
        self._lock = threading.Lock()
        self._watched: _Watched | None = None
        self._closed = False
        self._poked = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvagent waker", daemon=True)
        self._thread.start()

    def watch(self, session: Session | None, timeout_s: float | None) -> None:
        """Wake the engine once, when the session's socket is readable or has ended, or accepts what
        waits to be sent, or after ``timeout_s``. A further call replaces what is watched.
        """
        watched = _Watched(session, timeout_s, session is not None and session.unsent())
        with self._lock:
            if self._closed or (self._watched is not None and self._watched.covers(watched)):
                return
            self._watched = watched
        os.eventfd_write(self._poked, 1)

    def close(self) -> None:
        """End the thread. Repeated calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.eventfd_write(self._poked, 1)
        self._thread.join()
        os.close(self._poked)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                watched = self._watched
            if self._wait(watched):
                with self._lock:
                    if self._watched is not watched:
                        continue
                    self._watched = None
                self.wake()

    def _wait(self, watched: _Watched | None) -> bool:
        """Return whether the engine is to be woken; False after a poke."""
        poller = select.poll()
        poller.register(self._poked, select.POLLIN)
        session, timeout_s, writes = watched or _Watched(None, None, writes=False)
        if session is not None and (fd := session.fileno()) >= 0:
            poller.register(fd, select.POLLIN | (select.POLLOUT if writes else 0))
        ready = poller.poll(None if timeout_s is None else timeout_s * 1e3)
        if any(fd == self._poked for fd, _ in ready):
            os.eventfd_read(self._poked)
            return False
        return True


ASK_BLOCKS = 256  # of one answer, which one step publishes
REMOVE_BLOCKS = 4096  # that one step removes after the end of a session
REFUSED_S = 1.0  # between questions that the agent refuses

log = logging.getLogger("vllm.kvagent")


class EventCounts(Protocol):
    """What is counted, in blocks (counters)."""

    events_stored: int
    events_removed: int
    events_unsaid: int


class Published:
    """What the engine's stream says is stored: chunks of one or more of vLLM's blocks. The agent
    knows a chunk by the hash of its last block.

    A chunk is told once under each name of a medium, after the one before it, and removed when the
    last medium with that name has lost it. The hashes of its other blocks follow from its tokens.
    Prompts that part within a chunk have two chunks that begin with the same blocks: these are
    stored with the first chunk that has them, and removed with the last.
    """

    def __init__(
        self, form: EventForm, sizes: Mapping[int, int], counts: EventCounts, blocks: int = 1,
        hash_block: HashBlock | None = None,
    ) -> None:  # fmt: skip
        """``sizes``: tokens of a chunk, by group of which events tell. ``blocks`` of vLLM in a
        chunk; those of several are told under one name. ``hash_block``: needed for several.
        """
        self._form, self._sizes, self._counts = form, sizes, counts
        self._blocks, self._hash_block = blocks, hash_block
        self._alike = {  # by medium, a bit for each medium with its name
            medium: sum(1 << other for other in MEDIA if form.media[other] == form.media[medium]) for medium in MEDIA
        }
        # By group: the media of each chunk, a bit each, a chunk before those after it; the blocks
        # of each chunk of several, as events name them; and how many chunks have each of these.
        self._stored: dict[int, dict[bytes, int]] = {group: {} for group in sizes}
        self._hashes: dict[int, dict[bytes, list[Any]]] = {group: {} for group in sizes}
        self._holders: dict[int, Counter[Any]] = {group: Counter() for group in sizes}

    def __len__(self) -> int:
        return sum(map(len, self._stored.values()))

    def clear(self) -> None:
        """Forget all: the stream says that nothing is stored."""
        for group in self._stored:
            for one in (self._stored[group], self._hashes[group], self._holders[group]):
                one.clear()

    def remove(self, most: int) -> list[Any]:
        """Return events that remove chunks, at most that many, each before the one before it."""
        events = []
        for group, stored in self._stored.items():
            gone = [stored.popitem() for _ in range(min(most, len(stored)))]
            most -= len(gone)
            for media, some in groupby(gone, itemgetter(1)):
                keys = [key for key, _ in some]
                names = {alike: medium for medium, alike in self._alike.items() if media & alike}
                for medium in names.values():
                    events += self._removed(group, keys, medium)
        return events

    def take(self, run: EventRun) -> list[Any]:
        """Return the events of a run: none if it says nothing new."""
        stored = self._stored.get(run.group)
        if stored is None or run.medium not in MEDIA:
            return []
        n, bit, gone = run.hash_len, 1 << run.medium, list[bytes]()
        keys = [run.hashes[at : at + n] for at in range(0, len(run.hashes), n)]
        if run.kind != EventKind.REMOVED:
            return self._take_stored(run, stored, keys)
        for key in keys:
            media = stored.get(key, 0)
            if media == bit:
                del stored[key]
            elif media & bit:
                stored[key] = media & ~bit
            if media & self._alike[run.medium] == bit:
                gone.append(key)
        return self._removed(run.group, gone, run.medium)

    def _take_stored(self, run: EventRun, stored: dict[bytes, int], keys: list[bytes]) -> list[Any]:
        size, bit, ids = self._sizes[run.group], 1 << run.medium, unpacked(run.tokens)
        salt, salted = salt_of(run.extra) if run.extra else None, bool(run.extra)
        if len(ids) != len(keys) * size or (salted and salt is None) or (run.parent and run.parent not in stored):
            return []
        if any(stored.get(key, 0) & bit for key in keys):
            return []
        before, parent, named = run.parent, None, self._form.hash
        hashes, tokens, extra = list[Any](), list[int](), list[tuple[str] | None]()
        for i, key in enumerate(keys):
            media = stored.get(key, 0)
            if media & self._alike[run.medium]:
                if hashes:
                    break  # a chunk that is told follows one that is not
            else:
                some = ids[i * size : (i + 1) * size]
                blocks = self._blocks_of(before, key, some, salt)
                if not blocks:
                    break
                first = self._hold(run.group, key, blocks)
                if not hashes:
                    parent = blocks[first - 1] if first else named(before) if before else None
                hashes += blocks[first:]
                tokens += some[first * (size // self._blocks) :]
                extra += [None if at else salt for at in range(first, len(blocks))]
            stored[key] = media | bit
            before = key
        if not hashes:
            return []
        self._counts.events_stored += len(hashes)
        return [self._form.stored(run.group, parent, hashes, tokens, size // self._blocks, extra, run.medium)]

    def _blocks_of(self, parent: bytes, key: bytes, ids: list[int], salt: tuple[str] | None) -> list[Any]:
        """Return a chunk's blocks as events name them; none if its key has other tokens."""
        if self._hash_block is None or self._blocks == 1:
            return [self._form.hash(key)]
        size, raw = len(ids) // self._blocks, list[bytes]()
        for at in range(0, len(ids), size):
            raw.append(self._hash_block(raw[-1] if raw else parent or None, ids[at : at + size], None if raw else salt))
        return list(map(self._form.hash, raw)) if raw[-1] == key else []

    def _hold(self, group: int, key: bytes, blocks: list[Any]) -> int:
        """Note a chunk's blocks. Return the first one that no other chunk has."""
        if self._blocks == 1:
            return 0
        holders = self._holders[group]
        first = sum(1 for one in blocks if holders[one])
        holders.update(blocks)
        self._hashes[group][key] = blocks
        return first

    def _removed(self, group: int, keys: list[bytes], medium: int) -> list[Any]:
        """Return the event that chunks are gone, if they had blocks that no other has."""
        hashes, holders = list[Any](), self._holders[group]
        for key in keys:
            for one in reversed(self._hashes[group].pop(key, ())):
                holders[one] -= 1
                if not holders[one]:
                    del holders[one]
                    hashes.append(one)
        if self._blocks == 1:
            hashes = list(map(self._form.hash, keys))
        self._counts.events_removed += len(hashes)
        return [self._form.removed(group, hashes, medium)] if hashes else []


class Publication:
    """Asks the agent, and publishes its answers."""

    def __init__(
        self, agent: AgentSession, tokens: Tokens, published: Published, waker: Waker | None = None, scale: int = 1
    ) -> None:
        """``waker``: what wakes an idle engine for events, if anything can. ``scale``: blocks of
        vLLM in one of the agent.
        """
        self.tokens = tokens
        self._agent = agent
        self._published = published
        self._scale = scale
        self._waker = waker
        self._session: Session | None = None  # whose events are published
        self._requests = 0
        self._asked = 0  # the request whose answer is awaited
        self._anew = False
        self._not_before = 0.0  # no question is asked before
        self._leaving = False  # what is published is of a session that has ended, or void
        self._full = False  # the session did not accept the last question
        self._open = False  # the agent keeps the tokens that it is told: it has answered a question

    def take(self) -> list[Any]:
        """Return the next events. Called once in each step."""
        self.follow()
        session = self._session
        events: list[Any] = []
        if self._leaving:
            events = self._published.remove(max(1, REMOVE_BLOCKS // self._scale))
            self._leaving = len(self._published) > 0
        elif session is not None:
            for answer in self._agent.take(BlockEvents):
                if answer.req == self._asked:
                    events = self._publish(answer)
        if session is not None:
            if self._open:
                self.tokens.send(session)
            if not self._leaving:
                self._ask(session)
        return events

    def follow(self) -> None:
        """Handle that the session has changed, if it has. Called before tokens are said to a new
        one.
        """
        session = self._agent.session
        if session is self._session:
            return
        self._session = session
        self._asked, self._anew, self._full, self._open, self._not_before = 0, False, False, False, 0.0
        self._leaving = len(self._published) > 0
        self.tokens.clear()

    def cleared(self) -> None:
        """Handle that vLLM's stream says that all blocks are gone, in all media."""
        self._published.clear()
        self._leaving = False
        self._asked = 0  # an answer to what was asked before is not published
        self._anew = True

    def pending(self) -> bool:
        """Return whether a step has something to publish or to ask. If not, the waker wakes the
        engine as soon as there is.
        """
        session = self._agent.session
        if self._agent.unread() or session is not self._session or self._leaving or self._agent.messages:
            return True
        asks = session is not None and not self._asked and not self._full
        wait_s = self._not_before - time.monotonic()
        if asks and wait_s <= 0:
            return True
        if self._waker is not None:
            self._waker.watch(self._agent.session, wait_s if asks else None)
        return False

    def close(self) -> None:
        """Stop waking the engine."""
        if self._waker is not None:
            self._waker.close()

    def _publish(self, answer: BlockEvents) -> list[Any]:
        self._asked = 0
        if answer.state == EventsState.REFUSED:
            self._not_before = time.monotonic() + REFUSED_S
            return []
        self._open = True
        if answer.state == EventsState.VOID:
            self._leaving = len(self._published) > 0
        return [event for run in answer.runs for event in self._published.take(run)]

    def _ask(self, session: Session) -> None:
        if self._asked or time.monotonic() < self._not_before:
            return
        self._requests = self._requests % 0xFFFFFFFF + 1
        try:
            session.send(NextEvents(self._requests, max(1, ASK_BLOCKS // self._scale), int(self._anew)))
        except (Busy, SessionEnded, SessionBroken):  # the next poll of the session shows an end
            self._full = True
        else:
            self._asked, self._anew, self._full = self._requests, False, False


class Events(Guest):
    """The events of an engine's own blocks."""

    def __init__(self, form: EventForm, waker: Waker | None = None) -> None:
        self._form, self.waker = form, waker

    def begin(self, side: SchedulerSide, manager: Any) -> None:
        """Begin with the side's agent, and answer vLLM when it takes events."""
        super().begin(side, manager)
        tokens = Tokens(side.geometry, side.counts)
        self._publication = Publication(
            side.agent, tokens, Published(self._form, tokens.sizes, side.counts), self.waker
        )  # fmt: skip
        side.take_events = self._publication.take
        self._form.bind(manager)  # it has the groups that vLLM's own events name

    def named(self, tracked: Tracked, group: int, first: int, blocks: int) -> None:
        """Say the tokens of blocks. The agent may have lost those of loaded ones by a restart."""
        extra = None if self.side.geometry.following else extra_of(tracked.request)
        self._publication.tokens.say(tracked.request, extra, group, first, blocks)

    def reset(self, what: Reset) -> None:
        """Follow the session, and what vLLM's own events say."""
        if what in (Reset.ENDED, Reset.BEGAN):
            self._publication.follow()
        elif what is Reset.CACHE:
            self._publication.cleared()

    def busy(self) -> bool:
        """Return whether there are events to publish."""
        return self._publication.pending()

    def close(self) -> None:
        """Stop waking the engine."""
        self._publication.close()
