"""What the connector publishes of the agent's events, with a session and vLLM's events in their
places.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from kvagent import messages as m
from kvagent.errors import Busy, Malformed, SessionEnded
from kvagent.session import FrameStream
from kvagent.vllm.counters import Counts
from kvagent.vllm.guests import events as publication
from kvagent.vllm.guests import events as tokens
from kvagent.vllm.guests.events import (
    ASK_BLOCKS,
    MEDIA_NAMES,
    RUN_BYTES,
    Publication,
    Published,
    Tokens,
    Waker,
    extra_of,
    salt_of,
    unpacked,
)
from kvagent.vllm.internals import waker
from kvagent.vllm.options import Options
from kvagent.vllm.scheduler.agent_session import AgentSession
from kvagent.wire import HEADER_BYTES, encode, frame
from tests.agent import PATIENCE_S, eventually

SIZE = 16
GEOMETRY: Any = SimpleNamespace(
    groups=(m.Group(SIZE, 64), m.Group(SIZE, 64, window=32), m.Group(2 * SIZE, 64)),
    states=(),
    scale=lambda g: 1 + g // 2,
)


class Form:
    """Events as tuples."""

    media = MEDIA_NAMES

    def bind(self, manager: Any) -> None: ...

    def hash(self, block_hash: bytes) -> Any:
        return block_hash.decode()

    def stored(self, group: int, parent: Any, hashes: Any, ids: Any, size: int, keys: Any, medium: int) -> Any:
        assert len(ids) == size * len(hashes)
        assert len(keys) == len(hashes)
        return "stored", group, parent, tuple(hashes), keys[0], *self._below(medium)

    def removed(self, group: int, hashes: Any, medium: int) -> Any:
        return "removed", group, tuple(hashes), *self._below(medium)

    def _below(self, medium: int) -> tuple[str, ...]:
        return () if medium == 1 else ("STORAGE",)


class FakeSession:
    """A session that records what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.busy = False
        self.corked = 0

    def send(self, message: m.Message) -> None:
        if self.busy:
            raise Busy("full")
        if isinstance(message, m.NextEvents):
            self.sent.append(("next", message.req, message.blocks, message.anew == 1))
        elif isinstance(message, m.BlockTokens):
            n = message.hash_len
            keys = [message.hashes[at : at + n] for at in range(0, len(message.hashes), n)]
            self.sent.append((message.group, message.parent, keys, message.tokens, message.extra))

    def cork(self) -> None:
        self.corked += 1

    def uncork(self) -> None:
        self.corked -= 1


class FakeAgent:
    """The scheduler's session, as far as events need it."""

    def __init__(self) -> None:
        self.session: Any = FakeSession()
        self.messages: list[m.BlockEvents] = []
        self.more = False

    def take(self, _: object) -> list[m.BlockEvents]:
        taken, self.messages = self.messages, []
        return taken

    def unread(self) -> bool:
        return self.more


def stored(parent: str, *hashes: str, group: int = 0, extra: bytes = b"", medium: int = 1) -> m.EventRun:
    ids = array("I", range(SIZE * len(hashes))).tobytes()
    return m.EventRun(1, medium, group, parent.encode(), 1, "".join(hashes).encode(), ids, extra)


def removed(*hashes: str, medium: int = 1) -> m.EventRun:
    return m.EventRun(2, medium, 0, b"", 1, "".join(hashes).encode(), b"", b"")


class Case:
    def __init__(self) -> None:
        self.agent = FakeAgent()
        self.counts = Counts()
        form: Any = Form()
        agent: Any = self.agent
        said = Tokens(GEOMETRY, self.counts)
        self.it = Publication(agent, said, Published(form, said.sizes, self.counts))

    @property
    def asked(self) -> tuple[Any, ...]:
        return next(one for one in reversed(self.agent.session.sent) if one[0] == "next")

    def answer(self, *runs: m.EventRun, req: int = 0, state: int = 1) -> list[Any]:
        """Answer the last question, or ``req``, and take a step."""
        self.agent.messages.append(m.BlockEvents(req or self.asked[1], state, runs))
        return self.it.take()


@pytest.fixture
def case() -> Case:
    made = Case()
    assert made.it.pending(), "a new session is asked"
    assert made.it.take() == []
    assert made.asked == ("next", 1, ASK_BLOCKS, False)
    assert not made.it.pending()
    return made


def test_what_the_agent_says_is_published_once(case: Case) -> None:
    salt = tokens.SALT + b"abc"
    assert case.answer(stored("", "a", extra=salt), stored("a", "b", "c")) == [
        ("stored", 0, None, ("a",), ("abc",)), ("stored", 0, "a", ("b", "c"), None),
    ]  # fmt: skip
    assert case.asked[1] == 2, "it asks again"
    assert case.it.take() == []
    assert case.asked[1] == 2, "once"
    assert case.answer(removed("c"), stored("b", "d")) == [("removed", 0, ("c",)), ("stored", 0, "b", ("d",), None)]
    assert (case.counts.events_stored, case.counts.events_removed) == (4, 1)


def test_what_no_router_could_use_is_left_out(case: Case) -> None:
    case.answer(stored("", "a"))
    for run in (
        stored("", "a"), stored("x", "b"), removed("b"), stored("a", "b", extra=b"\x07new"), stored("a", "b", medium=3),
        removed("a", medium=2), removed("a", medium=3),
        stored("", "b", group=1), stored("", "b", group=2), stored("", "b", group=9),
        stored("a", "b", extra=tokens.SALT + b"\xff"), stored("a", "b", extra=tokens.SALT + b"\xed\xa0\x80"),
    ):  # fmt: skip
        assert case.answer(run) == [], run
    assert case.answer(removed("a", "b")) == [("removed", 0, ("a",))]


def test_the_end_of_a_session_removes_all_from_the_leaf_on(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "REMOVE_BLOCKS", 2)
    case.answer(stored("", "a", "b", "c"))
    case.agent.messages.append(m.BlockEvents(case.asked[1], 1, (removed("c"),)))  # of the session that ended
    case.agent.session = None
    case.agent.messages.clear()
    assert case.it.pending()
    assert case.it.take() == [("removed", 0, ("c", "b"))]
    case.agent.session = FakeSession()
    assert case.it.pending()
    assert case.it.take() == [("removed", 0, ("a",))]
    assert case.asked[3] is False, "a new registration begins anew by itself"
    assert case.answer(stored("", "a")) == [("stored", 0, None, ("a",), None)]


def test_what_is_void_is_removed_before_it_is_told_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "REMOVE_BLOCKS", 1)
    case.answer(stored("", "a", "b"))
    asked = case.asked
    assert case.answer(state=m.EventsState.VOID) == []
    assert case.it.pending()
    assert case.it.take() == [("removed", 0, ("b",))]
    assert case.asked == asked, "nothing is asked before all is removed"
    assert case.it.take() == [("removed", 0, ("a",))]
    assert case.asked == ("next", asked[1] + 1, ASK_BLOCKS, False)
    assert case.answer(stored("", "a")) == [("stored", 0, None, ("a",), None)]


def test_a_block_moves_to_the_disk_and_is_never_gone(case: Case) -> None:
    case.answer(stored("", "a", "b"))
    moves = stored("", "a", medium=2), removed("a"), stored("a", "b", medium=2), removed("b")
    assert case.answer(*moves) == [
        ("stored", 0, None, ("a",), None, "STORAGE"), ("removed", 0, ("a",)),
        ("stored", 0, "a", ("b",), None, "STORAGE"), ("removed", 0, ("b",)),
    ]  # fmt: skip
    assert case.answer(*moves) == [], "each transition once"
    assert case.answer(stored("b", "c")) == [("stored", 0, "b", ("c",), None)], "whose parent is on the disk"
    assert case.answer(stored("", "a")) == [("stored", 0, None, ("a",), None)], "fetched, and on the disk as well"
    assert (case.counts.events_stored, case.counts.events_removed) == (6, 2)
    case.agent.session = None
    assert case.it.take() == [
        ("removed", 0, ("c",)), ("removed", 0, ("b",), "STORAGE"), ("removed", 0, ("a",)),
        ("removed", 0, ("a",), "STORAGE"),
    ]  # fmt: skip
    assert (case.counts.events_stored, case.counts.events_removed) == (6, 6)


def test_after_all_blocks_are_cleared_everything_is_asked_anew(case: Case) -> None:
    case.answer(stored("", "a", "b"))
    old = case.asked[1]
    case.it.cleared()
    assert case.it.pending()
    assert case.answer(stored("", "c"), req=old) == [], "an answer to what was asked before"
    assert case.asked == ("next", old + 1, ASK_BLOCKS, True)
    assert case.answer(removed("a"), req=old) == []
    assert case.answer(stored("", "a", "b", "c")) == [("stored", 0, None, ("a", "b", "c"), None)]
    assert case.asked[3] is False


def test_a_clear_ends_the_removal_of_a_session_that_ended(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "REMOVE_BLOCKS", 1)
    case.answer(stored("", "a", "b"))
    case.agent.session = FakeSession()
    assert case.it.take() == [("removed", 0, ("b",))]
    case.it.cleared()
    assert case.it.take() == []
    assert case.answer(stored("", "a")) == [("stored", 0, None, ("a",), None)]


def test_a_session_that_accepts_nothing_is_asked_later(case: Case) -> None:
    case.agent.session.busy = True
    assert case.answer(stored("", "a")) == [("stored", 0, None, ("a",), None)]
    assert not case.it.pending(), "an idle engine does not spin"
    case.agent.session.busy = False
    case.it.take()
    assert case.asked[1] == 3


def test_a_refusal_is_asked_again_after_a_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(publication, "time", SimpleNamespace(monotonic=lambda: now))
    assert case.answer(state=2) == []
    asked = case.asked
    case.it.take()
    assert case.asked == asked
    assert not case.it.pending()
    now += publication.REFUSED_S
    assert case.it.pending()
    case.it.take()
    assert case.asked[1] == asked[1] + 1


def test_an_engine_with_nothing_to_ask_is_woken_at_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be woken again as soon as it came to rest."""
    monkeypatch.setattr(publication, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    watched: list[tuple[Any, ...]] = []
    case = Case()
    waker: Any = SimpleNamespace(watch=lambda *what: watched.append(what))
    case.it._waker = waker
    case.it.take()
    assert not case.it.pending(), "it has asked"
    case.agent.session.busy = True
    case.answer()
    assert not case.it.pending(), "the session accepts no question"
    assert watched == [(case.agent.session, None)] * 2
    case.agent.session.busy = False
    case.it.take()
    case.answer(state=2)
    assert not case.it.pending(), "it was refused"
    assert watched.pop() == (case.agent.session, publication.REFUSED_S)


def request(blocks: int, **more: Any) -> Any:
    return SimpleNamespace(
        request_id="r", block_hashes=[i.to_bytes(8, "big") for i in range(blocks)],
        all_token_ids=list(range(1000, 1000 + blocks * SIZE)), **more,
    )  # fmt: skip


def tracked(made: Any) -> tuple[Any, bytes | None]:
    return made, extra_of(made)


def test_tokens_are_said_of_whole_blocks() -> None:
    session: Any = FakeSession()
    said = Tokens(GEOMETRY, Counts())
    of = tracked(request(6, cache_salt="s"))
    said.say(*of, 0, 0, 3)
    said.say(*of, 0, 3, 2)
    said.say(*of, 1, 0, 6)  # a window
    said.say(*of, 2, 1, 2)  # blocks of two hashes
    said.say(*of, 0, 5, 2)  # one has no tokens yet
    said.send(session)
    hashes = of[0].block_hashes
    got = [(group, parent, list(keys), unpacked(ids), salt_of(extra) if extra else None)
           for group, parent, keys, ids, extra in session.sent]  # fmt: skip
    ids = of[0].all_token_ids
    assert got == [
        (0, b"", hashes[:1], ids[:SIZE], ("s",)),
        (0, hashes[0], hashes[1:3], ids[SIZE : 3 * SIZE], None),
        (0, hashes[2], hashes[3:5], ids[3 * SIZE : 5 * SIZE], None),
        (2, hashes[1], [hashes[3], hashes[5]], ids[2 * SIZE : 6 * SIZE], None),
    ]
    assert session.corked == 0


def test_tokens_wait_for_the_session_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = FakeSession()
    counts = Counts()
    said = Tokens(GEOMETRY, counts)
    of = tracked(request(RUN_BYTES // (4 * SIZE) + 1))
    blocks = len(of[0].block_hashes)
    said.say(*of, 0, 0, blocks)
    session.busy = True
    said.send(session)
    assert session.sent == []
    monkeypatch.setattr(tokens, "MAX_WAITING_BYTES", RUN_BYTES + 8 * SIZE)
    said.say(*of, 0, 0, 2)
    assert counts.events_unsaid == 2
    session.busy = False
    said.send(session)
    assert [len(run[2]) for run in session.sent] == [blocks - 1, 1]
    said.say(*of, 0, 0, 2)
    said.clear()
    said.send(session)
    assert len(session.sent) == 2


def test_a_session_that_ended_is_sent_nothing_more() -> None:
    session: Any = FakeSession()

    def ended(*_: Any) -> None:
        raise SessionEnded(())

    session.send = ended
    said = Tokens(GEOMETRY, Counts())
    said.say(*tracked(request(1)), 0, 0, 1)
    said.send(session)
    session.send = lambda *_: pytest.fail("said again")
    said.send(session)


@pytest.mark.parametrize(
    "more",
    [
        {"lora_request": object()}, {"mm_features": [object()]}, {"prompt_embeds": object()}, {"resumable": True},
        {"cache_salt": "x" * 5000}, {"cache_salt": "\ud800"},
    ],
)  # fmt: skip
def test_requests_that_are_not_said(more: dict[str, Any]) -> None:
    session: Any = FakeSession()
    said = Tokens(GEOMETRY, Counts())
    said.say(*tracked(request(2, **more)), 0, 0, 2)
    said.send(session)
    assert session.sent == []


class Watched:
    """A session whose socket is one end of a pair."""

    def __init__(self, end: Any) -> None:
        self.fileno = end.fileno
        self.waits = False

    def unsent(self) -> bool:
        return self.waits


def test_the_waker_wakes_once_for_what_arrives() -> None:
    here, there = socket.socketpair()
    woken = threading.Semaphore(0)
    waker = Waker(woken.release)
    session: Any = Watched(here)
    waker.watch(session, None)
    waker.watch(session, None)
    there.send(b"x")
    assert woken.acquire(timeout=PATIENCE_S)
    waker.watch(None, None)  # after it, the socket is not looked at
    eventually(lambda: waker._watched is not None, "the watch of nothing")
    assert not woken.acquire(blocking=False)
    waker.watch(session, None)
    assert woken.acquire(timeout=PATIENCE_S), "what was not read wakes again"
    here.recv(1)
    waker.watch(session, 0.001)
    assert woken.acquire(timeout=PATIENCE_S), "the time is over"
    waker.watch(session, None)
    there.close()
    assert woken.acquire(timeout=PATIENCE_S), "the end of the session"
    waker.close()
    waker.close()
    waker.watch(session, None)
    assert not waker._thread.is_alive()
    here.close()


def test_the_waker_wakes_when_what_waits_can_be_sent() -> None:
    """And a time that is over still wakes, where the socket alone was watched before."""
    here, there = socket.socketpair()
    here.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += here.send(bytes(1 << 16))
    woken = threading.Semaphore(0)
    waker = Waker(woken.release)
    session: Any = Watched(here)
    waker.watch(session, None)
    session.waits = True
    waker.watch(session, None)
    assert not woken.acquire(blocking=False)
    while sent:
        sent -= len(there.recv(1 << 16))
    assert woken.acquire(timeout=PATIENCE_S), "the agent has read"
    session.waits = False
    waker.watch(session, None)
    waker.watch(session, 0.001)
    waker.watch(session, None)
    assert woken.acquire(timeout=PATIENCE_S), "the time is over"
    waker.close()
    here.close()
    there.close()


def test_what_an_idle_engine_can_do_nothing_about_is_not_pending() -> None:
    """The beginning of a frame, and what a full socket does not accept, keep no engine stepping."""
    here, there = socket.socketpair()
    stream = FrameStream(here)
    made: Any = SimpleNamespace(unread=stream.unread, sendable=stream.sendable)
    link: Any = SimpleNamespace(current=lambda: made)
    session = AgentSession(link, Options())
    assert session.unread(), "a session to adopt"
    session._session = made
    data = frame(encode(m.Pong(1)))
    for byte in data:
        assert not session.unread()
        there.send(bytes([byte]))
        assert session.unread()
        received = [*stream.receive()]
    assert received == [m.Pong(1)]
    assert not session.unread()
    there.send(data + data)
    assert [*stream.receive()] == [m.Pong(1)] * 2
    there.send(bytes(HEADER_BYTES))
    with pytest.raises(Malformed):
        next(stream.receive())
    stream.discard()
    while not stream.pending:
        stream.send(m.Ping(1))
    assert not session.unread()
    while not session.unread():
        there.recv(1 << 16)
    stream.flush()
    assert not session.unread()
    there.close()
    assert session.unread(), "the end"
    stream.close()


def test_an_engine_without_a_loop_of_its_own_is_not_woken() -> None:
    core: Any = SimpleNamespace(
        EngineCore=type("EngineCore", (), {}), EngineCoreRequestType=SimpleNamespace(WAKEUP=b"w")
    )
    core.EngineCoreProc = type("EngineCoreProc", (core.EngineCore,), {})
    assert waker(core) is None


def test_tokens_are_said_once_the_agent_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "REMOVE_BLOCKS", 1)
    case = Case()
    of = tracked(request(1))

    def said() -> int:
        return sum(one[0] == 0 for one in case.agent.session.sent)

    case.it.tokens.say(*of, 0, 0, 1)  # before the first question
    case.it.follow()  # the side does, as soon as there is a session
    case.it.tokens.say(*of, 0, 0, 1)
    case.it.take()
    assert said() == 0
    case.answer(state=2)
    assert said() == 0, "the agent has no place for them yet"
    case.it._not_before = 0.0
    case.it.take()
    case.answer(stored("", "a", "b"))
    assert said() == 1
    case.agent.session = FakeSession()
    case.it.follow()
    case.it.tokens.say(*of, 0, 0, 1)
    case.it.take()  # removes b
    case.it.take()  # removes a, and asks
    assert said() == 0
    case.answer()
    assert said() == 1
