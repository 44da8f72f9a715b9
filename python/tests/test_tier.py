"""The tier's thread and the real agent: what is stored is found and loaded, and what becomes of
jobs when the agent dies, stops or has lost a chunk.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvagent import messages as m
from kvagent.registration import Registration, identity_pairs
from kvagent.session import Session
from kvagent.vllm.link import Link
from kvagent.vllm.options import OptionError
from kvagent.vllm.scheduler.agent_session import AgentSession
from kvagent.vllm.tier.options import parse
from kvagent.vllm.tier.questions import Ask
from tests.agent import eventually
from tests.tier_rig import Rig, keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.agent import AgentProcess


@pytest.fixture
def rigs(agent: AgentProcess) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(agent.folder, f"rig {len(made)}", **options))
        made[-1].ready()
        return made[-1]

    yield make
    agent.thaw()
    for rig in made:
        rig.close()


@pytest.mark.parametrize("descriptor", [True, False])
def test_what_one_engine_stores_another_one_loads(rigs: Callable[..., Rig], *, descriptor: bool) -> None:
    one, two = rigs(descriptor=descriptor), rigs(descriptor=descriptor)
    chunks = keys("p", 8)
    contents = [one.fill(i, f"p{i}") for i in range(8)]
    assert one.ask(chunks).found == 0
    assert one.finished(one.store(chunks, range(8))).done == tuple(chunks)
    answered = two.ask([*chunks, *keys("q", 2)])
    assert (answered.found, answered.known, answered.late) == (8, 9, False)
    loaded = two.finished(two.load(chunks, range(20, 28)))
    assert set(loaded.done) == set(chunks)
    assert [two.row(20 + i) for i in range(8)] == contents


def test_chunks_of_several_groups_need_not_follow_each_other(rigs: Callable[..., Rig]) -> None:
    rig = rigs(groups=3)
    chunks = [*keys("a", 3, 0), *keys("a", 2, 2)]
    contents = [rig.fill(i, f"a{i}") for i in range(5)]
    assert set(rig.finished(rig.store(chunks, range(5))).done) == set(chunks)
    backwards = list(reversed(keys("a", 4, 2)))
    assert (rig.ask(backwards).found, rig.ask(backwards[2:]).found) == (0, 2)
    assert rig.ask(keys("a", 2, 1)).found == 0, "of another group"
    assert set(rig.finished(rig.load(chunks, range(40, 45))).done) == set(chunks)
    assert [rig.row(40 + i) for i in range(5)] == contents


def test_a_load_larger_than_the_staging_memory_comes_in_parts(rigs: Callable[..., Rig]) -> None:
    rig = rigs(staging_bytes=1 << 20)
    rig.courier._slots = 3  # for the next session
    rig.courier._loads._most = 3
    rig.courier._loads.memory.free = [0, 1, 2]  # type: ignore[union-attr]
    chunks = keys("p", 20)
    contents = [rig.fill(i, f"p{i}") for i in range(20)]
    rig.finished(rig.store(chunks, range(20)))
    assert set(rig.finished(rig.load(chunks, range(30, 50))).done) == set(chunks)
    assert [rig.row(30 + i) for i in range(20)] == contents


def test_a_chunk_that_is_not_stored_does_not_arrive(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    stored, missing = keys("p", 2), keys("q", 2)
    rig.fill(0, "p0")
    rig.fill(1, "p1")
    rig.finished(rig.store(stored, range(2)))
    before = [rig.fill(row, f"other{row}") for row in (12, 13)]
    assert set(rig.finished(rig.load([*stored, *missing], [10, 11, 12, 13])).done) == set(stored)
    assert [rig.row(12), rig.row(13)] == before


def test_a_missing_chunk_between_those_of_other_groups_does_not_arrive(rigs: Callable[..., Rig]) -> None:
    rig = rigs(groups=2)
    first, second = keys("p", 2, 0), keys("p", 2, 1)
    stored = [first[0], *second]
    contents = [rig.fill(i, f"p{i}") for i in range(3)]
    rig.finished(rig.store(stored, range(3)))
    before = rig.fill(12, "other")
    loaded = rig.finished(rig.load([first[0], second[0], first[1], second[1]], range(10, 14)))
    assert set(loaded.done) == set(stored)
    assert [rig.row(row) for row in (10, 11, 13)] == contents
    assert rig.row(12) == before


def test_engines_of_other_weights_find_nothing(rigs: Callable[..., Rig]) -> None:
    one, two = rigs(weights="w"), rigs(weights="v")
    one.fill(0, "p")
    one.finished(one.store(keys("p", 1), [0]))
    assert (one.ask(keys("p", 1)).found, two.ask(keys("p", 1)).found) == (1, 0)


def test_without_an_agent_jobs_fail_at_once_and_another_agent_serves(agent: AgentProcess) -> None:
    agent.kill()
    rig = Rig(agent.folder)
    assert rig.finished(rig.store(keys("p", 1), [0])).done == ()
    assert rig.finished(rig.load(keys("p", 1), [0])).done == ()
    assert rig.ask(keys("p", 1)).late
    agent.start()
    rig.ready()
    content = rig.fill(0, "p")
    assert rig.finished(rig.store(keys("p", 1), [0])).done == tuple(keys("p", 1))
    rig.finished(rig.load(keys("p", 1), [1]))
    assert rig.row(1) == content
    rig.close()


def test_the_death_of_the_agent_ends_all_jobs(rigs: Callable[..., Rig], agent: AgentProcess) -> None:
    rig = rigs()
    rig.fill(0, "p")
    rig.finished(rig.store(keys("p", 1), [0]))
    agent.freeze()
    jobs = [rig.store(keys("q", 4), range(4)), rig.load(keys("p", 1), [9])]
    agent.kill()
    assert [rig.finished(job).done for job in jobs] == [(), ()]
    agent.start()


@pytest.mark.stops
def test_a_frozen_agent_neither_holds_rows_nor_writes_to_them_when_it_wakes(
    rigs: Callable[..., Rig], agent: AgentProcess
) -> None:
    rig = rigs(load_deadline_ms=600_000)
    chunks = keys("p", 16)
    for i in range(16):
        rig.fill(i, f"p{i}")
    rig.finished(rig.store(chunks, range(16)))
    agent.freeze()
    save, load = rig.store(keys("q", 4), range(40, 44)), rig.load(chunks, range(20, 36))
    assert (rig.finished(save).done, rig.finished(load).done) == ((), ())
    assert not rig.courier.loading
    reused = [rig.fill(row, f"reused{row}") for row in range(20, 44)]
    agent.thaw()
    rig.ready()
    assert rig.ask(keys("q", 4)).found == 0, "a save that was given up is stored with the bytes of another chunk"
    again = rig.finished(rig.load(chunks, range(44, 60)))  # after whatever the agent still did with the first
    assert set(again.done) == set(chunks)
    assert [rig.row(row) for row in range(20, 44)] == reused


def test_a_reset_does_not_wait_for_a_frozen_agent(
    rigs: Callable[..., Rig], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentSession, "stopped", lambda *_: False)  # nothing but the bound of the drain ends the jobs
    rig = rigs(load_deadline_ms=600_000)
    agent.freeze()
    jobs = [rig.store(keys("q", 4), range(4)), rig.load(keys("p", 1), [9])]
    drain = threading.Thread(target=rig.courier.drain, args=[0.05], daemon=True)
    drain.start()
    eventually(lambda: not drain.is_alive(), "the end of the drain")
    assert [rig.finished(job).done for job in jobs] == [(), ()]


@pytest.mark.stops
def test_the_end_of_the_thread_gives_all_jobs_up(rigs: Callable[..., Rig], agent: AgentProcess) -> None:
    rig, other = rigs(load_deadline_ms=600_000), rigs()
    chunks = keys("p", 4)
    for i in range(4):
        rig.fill(i, f"p{i}")
    rig.finished(rig.store(chunks, range(4)))
    agent.freeze()
    save, load = rig.store(keys("q", 4), range(40, 44)), rig.load(chunks, range(20, 24))
    rig.courier.post(Ask("r", 1, ()))  # of which no question can be made
    eventually(lambda: not rig.courier.alive, "the end of the thread")
    assert (rig.courier.loading, rig.courier.saving) == (False, False)
    rig.courier.drain(600.0)  # it does not wait for what nobody ends
    assert (rig.finished(save).done, rig.finished(load).done) == ((), ())
    reused = [rig.fill(row, f"reused{row}") for row in [*range(20, 24), *range(40, 44)]]
    agent.thaw()
    other.ready()
    assert other.ask(keys("q", 4)).found == 0, "a save that was given up is stored with the bytes of another chunk"
    assert [rig.row(row) for row in [*range(20, 24), *range(40, 44)]] == reused


def test_a_registration_that_outlives_its_link_does_not_hold_the_memory(
    agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped agent may answer REGISTER after the engine has left."""
    monkeypatch.setattr("kvagent.vllm.link.JOIN_S", 0.0)
    connect, sessions, begun, left = Session.connect, list[Session](), threading.Event(), threading.Event()

    def connected(*given: Any) -> Session:
        sessions.append(connect(*given))
        begun.set()
        assert left.wait(60)
        return sessions[-1]

    monkeypatch.setattr(Session, "connect", connected)
    asked = Registration(
        instance="late", role=m.Role.SCHEDULER, groups=(m.Group(16, 1),), hash_tokens=16,
        identity=identity_pairs(dict.fromkeys(("model", "dtype", "tenant"), "t")),
    )  # fmt: skip
    link = Link(str(agent.folder), "late", lambda: asked)
    assert begun.wait(60)
    assert link.close() is None
    left.set()
    eventually(lambda: not link.busy, "the end of the link's thread")
    assert [(one.registered is not None, one.ended) for one in sessions] == [(True, True)]


def test_an_option_out_of_range_is_named_with_its_range() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"staging_bytes": 1}, "staging_bytes: 1, allowed is an integer 1048576 to"),
        ({"socket_dri": ""}, "socket_dri: no such option of KVAgentTier; did you mean socket_dir?"),
        ({"lookup_age_ms": -1}, "lookup_age_ms: -1, allowed is a number 0 to 60000"),
        ({"trust_media": 1}, "trust_media: 1, allowed is true or false"),
        ({"weights_version": "a b"}, "weights_version: 'a b', allowed is 1 to 128 letters"),
    ]
    for given, text in cases:
        with pytest.raises(OptionError, match=text.replace("?", r"\?")):
            parse(given)
