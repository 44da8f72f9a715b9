"""The look-up client against a socket whose answers the test controls."""

from __future__ import annotations

import errno
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import zmq

from kvagent.errors import Busy, Malformed, TimedOut
from kvagent.fields import pack, unpack
from kvagent.lookup import (
    ANSWER_FORM,
    MAX_OUTSTANDING,
    REQUEST_FORM,
    Answer,
    LookupClient,
    LookupStatus,
    Request,
    Ticket,
    Want,
)
from tests.agent import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REQUEST = Request(hashes=b"h" * 64, hash_len=32, tokens=33)
RESERVE = Request(hashes=b"h" * 64, hash_len=32, tokens=33, want=Want.RESERVE, session=7)
HIT = Answer(3, LookupStatus.HIT, 32, 0, bytes(16))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    socket.bind(f"ipc://{tmp_path}/lookup.sock")
    yield socket
    context.destroy(linger=0)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LookupClient]:
    with closing(LookupClient(tmp_path / "lookup.sock", timeout_s=PATIENCE_S)) as client:
        yield client


def hear(agent: zmq.Socket[bytes]) -> tuple[list[bytes], Request]:
    *envelope, frame = agent.recv_multipart()
    request: Request = REQUEST_FORM.read(unpack(frame), "Request")
    return envelope, request


def say(agent: zmq.Socket[bytes], envelope: list[bytes], answer: Answer) -> None:
    agent.send_multipart([*envelope, pack(ANSWER_FORM.write(answer, "Answer"))])


def wait(client: LookupClient, ticket: Ticket) -> Answer:
    while (answer := client.poll(ticket, 1)) is None:  # the ticket's deadline ends it
        pass
    return answer


def wait_leases(client: LookupClient) -> list[int]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if late := client.late_answers():
            return [answer.lease for answer in late]
    return []


def test_answers_find_their_questions_in_any_order(agent: zmq.Socket[bytes], client: LookupClient) -> None:
    tickets = [client.submit(Request(hashes=b"", hash_len=0, tokens=i)) for i in range(MAX_OUTSTANDING)]
    assert all(client.poll(ticket) is None for ticket in tickets)
    with pytest.raises(Busy):
        client.submit(REQUEST)
    asked = [hear(agent) for _ in tickets]
    for envelope, request in reversed(asked):
        say(agent, envelope, Answer(3, 0, request.tokens * 2, 0, bytes(16)))
    assert [wait(client, ticket).tokens for ticket in tickets] == [2 * i for i in range(MAX_OUTSTANDING)]


def test_a_process_without_descriptors_is_busy(client: LookupClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up that fails otherwise would end the engine's scheduler."""

    def fail(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Context, "socket", fail)
        for _ in range(2):
            with pytest.raises(Busy, match="Too many open files"):
                client.submit(REQUEST)
    assert client.outstanding == 0
    ticket = client.submit(REQUEST)
    assert client.poll(ticket) is None
    client.abandon(ticket)


def test_a_socket_that_timed_out_is_not_used_again(agent: zmq.Socket[bytes], client: LookupClient) -> None:
    first = client.submit(REQUEST, timeout_s=0.02)
    late, _ = hear(agent)  # a socket that is given up before it has connected never sends
    with pytest.raises(TimedOut):
        wait(client, first)
    ticket = client.submit(REQUEST)
    say(agent, late, Answer(3, 0, 1, 0, bytes(16)))  # for the one that was given up
    envelope, _ = hear(agent)
    assert envelope != late
    say(agent, envelope, HIT)
    assert wait(client, ticket) == HIT


def test_without_an_agent_a_look_up_times_out_and_works_once_it_is_there(tmp_path: Path) -> None:
    with closing(LookupClient(tmp_path / "lookup.sock")) as client:
        began = time.monotonic()
        for _ in range(20):
            with pytest.raises(TimedOut):
                client.lookup(REQUEST)
        assert time.monotonic() - began < PATIENCE_S, "each waited a second"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(f"ipc://{tmp_path}/lookup.sock")
        ticket = client.submit(REQUEST, timeout_s=PATIENCE_S)
        envelope, _ = hear(socket)
        say(socket, envelope, HIT)
        assert wait(client, ticket) == HIT
        context.destroy(linger=0)


def test_a_question_can_be_waited_for_in_parts(agent: zmq.Socket[bytes], client: LookupClient) -> None:
    ticket = client.submit(REQUEST)
    assert client.poll(ticket, 0.001) is None  # the scheduler goes on, and asks again in its next step
    envelope, _ = hear(agent)
    say(agent, envelope, HIT)
    assert client.poll(ticket, PATIENCE_S) == HIT


def test_a_late_lease_is_returned(agent: zmq.Socket[bytes], client: LookupClient) -> None:
    with pytest.raises(TimedOut):
        client.lookup(RESERVE, timeout_s=0.01)
    envelope, request = hear(agent)
    assert (request.want, request.session) == (Want.RESERVE, 7)
    assert client.late_answers() == []
    say(agent, envelope, Answer(3, LookupStatus.HIT, 32, 77, bytes(16)))
    assert wait_leases(client) == [77]
    assert client.late_answers() == []


def test_an_abandoned_reservation_returns_its_lease(agent: zmq.Socket[bytes], client: LookupClient) -> None:
    ticket = client.submit(RESERVE)
    client.abandon(ticket)
    envelope, _ = hear(agent)
    say(agent, envelope, Answer(3, LookupStatus.HIT, 32, 78, bytes(16)))
    assert wait_leases(client) == [78]
    with pytest.raises(ValueError, match="ended"):
        client.poll(ticket)


def test_nonsense_is_malformed_and_the_client_goes_on(agent: zmq.Socket[bytes], client: LookupClient) -> None:
    for nonsense in ([b""], [b"\x95\x02"], [b"\0\0\0\0"], [pack(ANSWER_FORM.write(HIT, "Answer")), b""]):
        ticket = client.submit(REQUEST)
        envelope, _ = hear(agent)
        agent.send_multipart([*envelope, *nonsense])
        with pytest.raises(Malformed):
            wait(client, ticket)
    ticket = client.submit(REQUEST)
    envelope, _ = hear(agent)
    say(agent, envelope, HIT)
    assert wait(client, ticket) == HIT


def test_a_request_out_of_range_is_not_sent(client: LookupClient) -> None:
    for wrong in (
        Request(hashes=b"h" * 33, hash_len=32, tokens=1),
        Request(hashes=b"h" * 33, hash_len=33, tokens=1),
        Request(hashes=b"h", hash_len=0, tokens=1),
        Request(hashes=b"h" * 65537, hash_len=1, tokens=1),
        Request(hashes=b"", hash_len=0, tokens=2**32),
        Request(hashes=b"", hash_len=0, tokens=1, space=b"short"),
        Request(hashes=b"", hash_len=0, tokens=1, version=2),
        Request(hashes=b"", hash_len=0, tokens=1, transfer=b"t" * 257),
        Request(hashes=b"", hash_len=0, tokens=1, transfer=b"t", peer="p" * 129),
        Request(hashes=b"", hash_len=0, tokens=1, transfer=b"t", early=2),
    ):
        with pytest.raises(Malformed):
            client.submit(wrong)
