"""The session client against an agent scripted by the test, over a real socket."""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvagent import messages as m
from kvagent.errors import Busy, Malformed, Refused, SessionBroken, SessionEnded, TimedOut
from kvagent.registration import Registration
from kvagent.session import MAX_PENDING_BYTES, FrameStream, Session
from kvagent.shm import SharedMemory
from kvagent.wire import HEADER_BYTES, body_length, decode, encode, frame, packed, section
from tests.agent import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BOOT = bytes(range(16))
WELCOME = m.Welcome(3, BOOT, 7, 1 << 20, 8192, 16, 1 << 30, "")
HASHES = [b"h" * 32, b"i" * 32]
SECTION = m.Section(0, b"", 32, b"".join(HASHES), struct.pack("<2I", 4, 5))
PACKED = packed([section(0, b"", HASHES, [4, 5])], 2)


class Agent:
    """The other end of a session."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(PATIENCE_S)

    def say(self, *messages: m.Message) -> None:
        self.socket.sendall(b"".join(frame(encode(message)) for message in messages))

    def hear(self) -> m.Message:
        return self.hear_with_fds()[0]

    def hear_with_fds(self) -> tuple[m.Message, list[int]]:
        header, fds = self._receive(HEADER_BYTES)
        body, late = self._receive(body_length(header))
        assert late == [], "descriptors have to come with the first byte of their frame, once"
        return decode(body), fds

    def _receive(self, size: int) -> tuple[bytes, list[int]]:
        data, fds = b"", array.array("i")
        while len(data) < size:
            more, rights, _, _ = self.socket.recvmsg(size - len(data), socket.CMSG_SPACE(253 * 4))
            assert more, "the client's end is gone"
            data += more
            for _, _, one in rights:
                fds.frombytes(one)
        return data, list(fds)


@pytest.fixture
def ends() -> Iterator[tuple[Session, Agent]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    session = Session(ours)
    session.limits = WELCOME
    yield session, Agent(theirs)
    session.close()
    theirs.close()


def serve(path: Path, script: Callable[[Agent], object]) -> threading.Thread:
    """Run an agent that accepts one session and executes the script."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def run() -> None:
        sock, _ = listener.accept()
        with listener, sock:
            script(Agent(sock))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_hello_settles_the_version(tmp_path: Path) -> None:
    heard: list[m.Message] = []

    def script(agent: Agent) -> None:
        heard.append(agent.hear())
        agent.say(m.Welcome(m.VERSION, BOOT, 7))
        heard.append(agent.hear())

    thread = serve(tmp_path / "s", script)
    session = Session.connect(tmp_path / "s", PATIENCE_S)
    assert (session.limits.version, session.boot, session.limits.session) == (m.VERSION, BOOT, 7)
    session.save(PACKED, epoch=1, step=1)
    thread.join()
    session.close()
    assert heard == [
        m.Hello(m.MIN_VERSION, m.VERSION, "kvagent-python"),
        m.Save(1, 1, 1, m.NO_INDEX, m.NO_INDEX, (SECTION,)),
    ]


def test_transfers_are_said(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    session.send(m.Offer(b"r/e/1", 32, 30_000))
    session.send(m.Offered(b"r/e/1", 16))
    session.send(m.Delivered(b"r/e/1"))
    heard = [agent.hear() for _ in range(3)]
    assert heard == [m.Offer(b"r/e/1", 32, 30_000), m.Offered(b"r/e/1", 16), m.Delivered(b"r/e/1")]
    for name, tokens, ttl_ms in ((b"", 32, 1), (b"n" * 257, 32, 1), (b"n", 32, 0), (b"n", 32, 600_001), (b"n", -1, 1)):
        with pytest.raises(Malformed):
            session.send(m.Offer(name, tokens, ttl_ms))


def test_hints_are_said_and_answered(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    chain = m.HintChain(1, 4, b"hash", b"\1")
    hint = m.Hint(3, "chat", m.Finish.TOOL, 7, (m.HintAction("a", m.Action.RETAIN, 90, 60_000),), (chain,))
    session.send(hint)
    assert agent.hear() == hint
    answer = m.Hinted(3, (m.HintReceipt("a", m.Action.RETAIN, m.ActionState.ACCEPTED, 1, 4096, ""),))
    agent.say(answer)
    assert session.poll() == [answer]
    for bad in (
        replace(hint, chains=()), replace(hint, finish=9), replace(hint, chains=(replace(chain, own=b"\1\1"),)),
        replace(hint, chains=(replace(chain, hash_len=3),)), replace(hint, actions=(m.HintAction("a", 7),)),
        replace(hint, session="s" * 129), replace(hint, actions=(m.HintAction("a", 1, 101),)),
    ):  # fmt: skip
        with pytest.raises(Malformed):
            session.send(bad)


def test_an_agent_that_refuses_says_why(tmp_path: Path) -> None:
    thread = serve(tmp_path / "s", lambda agent: agent.say(m.Error(m.ErrorCode.PERMISSION, "uid 7")))
    with pytest.raises(SessionEnded, match="uid 7") as caught:
        Session.connect(tmp_path / "s", PATIENCE_S)
    thread.join()
    assert caught.value.code == m.ErrorCode.PERMISSION


def test_a_silent_agent_costs_the_time_given(tmp_path: Path) -> None:
    done = threading.Event()
    thread = serve(tmp_path / "s", lambda _: done.wait(PATIENCE_S))
    with pytest.raises(TimedOut):
        Session.connect(tmp_path / "s", timeout_s=0.05)
    done.set()
    thread.join()


def test_no_agent_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Session.connect(tmp_path / "s")


def registration(**changes: object) -> Registration:
    fields: dict[str, object] = {
        "instance": "engine",
        "role": m.Role.WORKER,
        "identity": (("dtype", "d"), ("model", "m"), ("tenant", "")),
        "groups": (m.Group(16, 8),),
        "hash_tokens": 16,
    }
    return Registration(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_registration_goes_in_parts_with_its_descriptors(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    memories = [SharedMemory(4096) for _ in range(260)]
    for i, memory in enumerate(memories):
        memory.view[:4] = i.to_bytes(4, "little")
    segments = [m.Segment(i % 260, i, 64, 8) for i in range(8200)]
    heard: list[tuple[m.Message, list[int]]] = []

    def script() -> None:
        heard.extend(agent.hear_with_fds() for _ in range(5))
        agent.say(m.Registered(1, 0, "", b"s" * 16, 3, "/run/x"))

    thread = threading.Thread(target=script)
    thread.start()
    answer = session.register(
        registration(
            regions=[(memory.region(i), memory.fd) for i, memory in enumerate(memories)], held={0: {0: segments}}
        )
    )
    thread.join()
    assert (answer.epoch, session.epoch) == (3, 3)
    register, first, second, one, two = (message for message, _ in heard)
    assert isinstance(register, m.Register)
    assert (register.regions, register.segments) == (260, 8200)
    assert isinstance(first, m.Regions)
    assert isinstance(second, m.Regions)
    assert [region.id for region in first.regions + second.regions] == list(range(260))
    fds = [fd for _, more in heard for fd in more]
    assert [len(more) for _, more in heard] == [0, 253, 7, 0, 0]
    assert [int.from_bytes(os.pread(fd, 4, 0), "little") for fd in fds] == list(range(260))
    assert isinstance(one, m.Segments)
    assert isinstance(two, m.Segments)
    assert list(one.segments + two.segments) == segments
    for fd in fds:
        os.close(fd)
    for memory in memories:
        memory.close()


def test_descriptors_go_once_also_if_their_frame_goes_in_pieces(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    session._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel makes it its least
    memory = SharedMemory(4096)
    regions = [(m.Region(i, m.RegionKind.FD, 4096, handle=bytes(256)), memory.fd) for i in range(253)]
    heard: list[tuple[m.Message, list[int]]] = []

    def script() -> None:
        heard.extend(agent.hear_with_fds() for _ in range(2))
        agent.say(m.Registered(1, 0, "", b"s" * 16, 1, ""))

    thread = threading.Thread(target=script)
    thread.start()
    session.register(registration(regions=regions))
    thread.join()
    assert [len(fds) for _, fds in heard] == [0, 253]
    for fd in heard[1][1]:
        os.close(fd)
    memory.close()


def test_a_refused_registration_tells_the_text(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    agent.say(m.Registered(1, m.RegStatus.REFUSED, "world: 65, allowed is 1 to 64", bytes(16), 0, ""))
    with pytest.raises(Refused, match="allowed is 1 to 64") as caught:
        session.register(registration())
    assert caught.value.status == m.RegStatus.REFUSED


def test_jobs_are_reported_once_and_in_full(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    save, load = (
        session.save(PACKED, epoch=1, step=3, event=1, revoke=2),
        session.load(PACKED, epoch=1, step=4, lease=9),
    )
    assert agent.hear() == m.Save(save, 1, 3, 1, 2, (SECTION,))
    assert agent.hear() == m.Load(load, 1, 4, m.NO_INDEX, 9, (SECTION,))
    session.cancel(load)
    session.cancel(load)  # says nothing: one is under way
    agent.say(m.Done(save, b"\0\1"), m.Epoch(5), m.Done(load, b"\x11\x11"), m.Cancelled(load), m.Switches(0, 1))
    assert session.poll() == [
        m.Done(save, b"\0\1"), m.Epoch(5), m.Done(load, b"\x11\x11"), m.Cancelled(load), m.Switches(0, 1),
    ]  # fmt: skip
    assert (session.jobs, session.epoch) == ((), 5)
    assert session.poll() == []


def test_what_is_held_goes_out_in_one_piece(ends: tuple[Session, Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    session, agent = ends
    pieces: list[int] = []
    write = FrameStream._write

    def count(stream: FrameStream, data: memoryview, fds: tuple[int, ...] = ()) -> int:
        pieces.append(len(data))
        return write(stream, data, fds)

    monkeypatch.setattr(FrameStream, "_write", count)
    session.cork()
    jobs = [session.save(PACKED, epoch=1, step=step) for step in (3, 4, 5)]
    assert session.poll() == []  # which sends what waits, but not what is held
    assert pieces == []
    session.uncork()
    assert len(pieces) == 1
    for job, step in zip(jobs, (3, 4, 5), strict=True):
        assert agent.hear() == m.Save(job, 1, step, m.NO_INDEX, m.NO_INDEX, (SECTION,))
    session.save(PACKED, epoch=1, step=6)
    assert len(pieces) == 2, "nothing is held any more"


def test_a_late_epoch_is_no_step_back(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    agent.say(m.Epoch(5), m.Epoch(4))
    session.poll()
    assert session.epoch == 5
    agent.say(m.ResetDone(1, 0, "", 3))  # the answer to reset, which another's overtook
    assert session.reset() == 3
    assert session.epoch == 5


def test_frames_may_come_in_any_pieces(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    events: list[object] = []
    for byte in frame(encode(m.Epoch(1))) + frame(encode(m.Epoch(2))):
        agent.socket.sendall(bytes([byte]))
        events += session.poll()
    assert events == [m.Epoch(1), m.Epoch(2)]


def test_completions_are_returned_before_the_end(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    done, lost = session.save(PACKED, epoch=1, step=1), session.save(PACKED, epoch=1, step=2)
    agent.say(m.Done(done, b"\0\0"), m.Error(m.ErrorCode.SHUTDOWN, "stopping"))
    agent.socket.shutdown(socket.SHUT_WR)
    assert session.poll() == [m.Done(done, b"\0\0")]
    with pytest.raises(SessionEnded, match="stopping") as caught:
        session.poll()
    assert caught.value.jobs == (lost,)
    with pytest.raises(SessionEnded):
        session.save(PACKED, epoch=1, step=3)


def test_a_killed_agent_is_seen_also_while_sending(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    agent.socket.close()
    job = session.save(PACKED, epoch=1, step=1)  # the socket is gone, but only what is received tells how it ended
    with pytest.raises(SessionEnded) as caught:
        session.poll()
    assert caught.value.jobs == (job,)


@pytest.mark.parametrize(
    "nonsense",
    [
        frame(encode(m.Done(99, b"\0"))),
        frame(encode(m.Done(1, b"\0"))),  # of two blocks
        frame(encode(m.Cancelled(1))),
        frame(encode(m.Hello(1, 2, "x"))),
        frame(b"\x91\xcc\x10"),
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
    ],
)
def test_an_agent_that_talks_nonsense_is_heard_no_more_but_its_end_is_awaited(
    ends: tuple[Session, Agent], nonsense: bytes
) -> None:
    session, agent = ends
    job = session.save(PACKED, epoch=1, step=1)
    agent.socket.sendall(nonsense + frame(encode(m.Done(job, b"\0\0"))))
    assert session.poll() == []
    with pytest.raises(SessionBroken):
        session.save(PACKED, epoch=1, step=2)
    assert agent.hear() == m.Save(job, 1, 1, m.NO_INDEX, m.NO_INDEX, (SECTION,))
    assert agent.socket.recv(1) == b""  # we say no more
    assert session.poll() == []  # no fence yet
    agent.socket.close()
    with pytest.raises(SessionEnded) as caught:
        session.poll()
    assert caught.value.jobs == (job,)


def test_what_the_agent_does_not_read_is_bounded(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    leases = list(range(2**40, 2**40 + 4096))
    sent = 0

    def release() -> None:
        nonlocal sent
        while sent < 1000:
            session.release(leases)
            sent += 1

    with pytest.raises(Busy):
        release()
    assert session.pending <= MAX_PENDING_BYTES
    heard = 0
    while heard < sent:  # nothing that was taken is lost
        session.poll()
        assert agent.hear() == m.Release(tuple(leases))
        heard += 1


def test_jobs_in_flight_are_bounded_by_the_agents_queue(ends: tuple[Session, Agent]) -> None:
    session, _ = ends
    for _ in range(WELCOME.max_queue):
        session.save(PACKED, epoch=1, step=1)
    with pytest.raises(Busy, match="16 jobs"):
        session.load(PACKED, epoch=1, step=1)


def test_an_answer_that_was_given_up_is_not_taken_for_another(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    with pytest.raises(TimedOut):
        session.ping(timeout_s=0.01)
    agent.say(m.Pong(1), m.Epoch(2))
    with pytest.raises(TimedOut):
        session.ping(timeout_s=0.01)
    agent.say(m.Pong(3))
    session.ping()
    assert session.poll() == [m.Epoch(2)]


def test_a_flood_of_pushes_does_not_hold_up_a_time_out(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    stop = threading.Event()

    def flood() -> None:
        data = frame(encode(m.Epoch(1))) * 100
        while not stop.is_set():
            try:
                agent.socket.send(data)
            except (TimeoutError, OSError):
                return

    thread = threading.Thread(target=flood)
    thread.start()
    with pytest.raises((TimedOut, SessionBroken)):
        session.ping(timeout_s=0.2)
    stop.set()
    session.close()
    thread.join()


def test_drain_waits_for_the_agents_end(ends: tuple[Session, Agent]) -> None:
    session, agent = ends
    assert not session.drain(0.01)
    assert agent.socket.recv(1) == b""
    agent.say(m.Epoch(1))
    agent.socket.close()
    assert session.drain(1)
