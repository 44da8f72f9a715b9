"""An engine in Python and the real agent: saved blocks are found and loaded, whichever process is
killed.
"""

from __future__ import annotations

import ctypes
from contextlib import closing

import pytest

from kvagent import messages as m
from kvagent.errors import KVAgentError, Refused, SessionEnded, TimedOut
from kvagent.lookup import Answer, LookupClient, LookupStatus, Request, Want
from kvagent.registration import Registration
from kvagent.session import Event, Session
from tests.agent import (
    BLOCK_TOKENS,
    BLOCKS,
    IDENTITY,
    PATIENCE_S,
    AgentProcess,
    Engine,
    chain,
    eventually,
    run_of,
    wait,
)

OK = m.BlockStatus.OK


def ask(agent: AgentProcess, engine: Engine, hashes: list[bytes], want: Want = Want.PROBE) -> Answer:
    with closing(LookupClient(agent.folder / "lookup.sock", timeout_s=PATIENCE_S)) as client:
        return client.lookup(
            Request(
                space=engine.registered.space, session=engine.scheduler.limits.session, want=want,
                tokens=len(hashes) * BLOCK_TOKENS + 1, hash_len=32, hashes=b"".join(hashes), deadline_us=20_000_000,
            )
        )  # fmt: skip


def save(engine: Engine, hashes: list[bytes], blocks: list[int], salt: int) -> bytes:
    engine.compute(blocks, salt)
    event = 0
    engine.words.record(event)
    engine.words.fire(event)
    sections = run_of(hashes, blocks)
    job = engine.worker.save(sections, epoch=engine.worker.epoch, step=engine.step, event=event, revoke=0)
    return engine.done(job)


def test_what_one_engine_saved_another_loads(agent: AgentProcess) -> None:
    hashes, blocks = chain("prompt", 8), [3, 1, 4, 15, 9, 2, 6, 5]
    with closing(Engine(agent, "first")) as first, closing(Engine(agent, "second")) as second:
        assert first.registered.space == second.registered.space
        assert save(first, hashes, blocks, salt=7) == bytes([OK] * 8)
        assert save(first, hashes, blocks, salt=8) == bytes([m.BlockStatus.EXISTS] * 8)

        answer = ask(agent, second, [*hashes, b"x" * 32], Want.RESERVE)
        assert (answer.status, answer.tokens, answer.boot) == (LookupStatus.HIT, 8 * BLOCK_TOKENS, second.worker.boot)
        assert answer.lease != 0
        assert agent.status()["leases"] == 1

        targets = [20, 30, 21, 31, 22, 29, 23, 28]
        load = second.worker.load(run_of(hashes, targets), epoch=1, step=0, lease=answer.lease)
        assert second.done(load) == bytes([OK] * 8)
        assert all(second.holds(target, 7, i) for i, target in enumerate(targets))
        assert not any(second.cache.view[: 20 * 4096])  # nothing else was touched

        second.scheduler.release([answer.lease])
        second.scheduler.ping(PATIENCE_S)
        status = agent.status()
        assert (status["leases"], status["engines"], status["blocks_stored"], status["blocks_loaded"]) == (0, 2, 8, 8)


def test_a_prompt_is_never_found_to_its_last_token(agent: AgentProcess) -> None:
    hashes = chain("prompt", 4)
    lookup = LookupClient(agent.folder / "lookup.sock", PATIENCE_S)
    with closing(Engine(agent, "one")) as engine, closing(lookup) as client:
        save(engine, hashes, [0, 1, 2, 3], salt=1)
        for tokens, found in ((4 * BLOCK_TOKENS, 3), (4 * BLOCK_TOKENS + 1, 4), (2 * BLOCK_TOKENS, 1), (1, 0)):
            request = Request(
                space=engine.registered.space, tokens=tokens, hash_len=32, hashes=b"".join(hashes), deadline_us=10**7
            )
            assert client.lookup(request).tokens == found * BLOCK_TOKENS


def test_a_save_waits_for_its_step_and_its_event(agent: AgentProcess) -> None:
    with closing(Engine(agent, "one")) as engine:
        engine.words.record(1)
        job = engine.worker.save(run_of(chain("p", 1), [0]), epoch=1, step=1, event=1)
        engine.worker.ping(PATIENCE_S)
        assert ask(agent, engine, chain("p", 1)).tokens == 0
        engine.words.fire(1)  # as an event does whose process dies: the step word is not there
        engine.worker.ping(PATIENCE_S)
        assert ask(agent, engine, chain("p", 1)).tokens == 0
        assert engine.worker.jobs == (job,)
        engine.compute([0], salt=5)
        assert engine.done(job) == bytes([OK])
        assert ask(agent, engine, chain("p", 1)).tokens == BLOCK_TOKENS


def test_a_save_can_be_revoked_and_cancelled(agent: AgentProcess) -> None:
    with closing(Engine(agent, "one")) as engine:
        engine.words.record(1)
        revoked = engine.worker.save(run_of(chain("r", 2), [0, 1]), epoch=1, step=1, event=1, revoke=3)
        engine.words.revoke(3)
        engine.compute([0, 1], salt=1)
        engine.words.fire(1)
        assert engine.done(revoked) == bytes([m.BlockStatus.REVOKED] * 2)
        engine.words.clear_revoke(3)

        engine.words.record(2)
        cancelled = engine.worker.save(run_of(chain("c", 1), [0]), epoch=1, step=99, event=2)
        engine.worker.cancel(cancelled)
        assert engine.done(cancelled) == bytes([m.BlockStatus.CANCELLED])
        assert engine.wait(m.Cancelled).job == cancelled
        assert ask(agent, engine, chain("r", 2)).tokens == 0


def test_missing_blocks_are_reported_one_by_one(agent: AgentProcess) -> None:
    with closing(Engine(agent, "one")) as engine:
        save(engine, chain("p", 2), [0, 1], salt=1)
        load = engine.worker.load(run_of([*chain("p", 2), b"y" * 32], [5, 6, 7]), epoch=1, step=0)
        assert engine.done(load) == bytes([OK, OK, m.BlockStatus.MISSING])
        wrong = engine.worker.load(run_of(chain("p", 1), [2**20]), epoch=1, step=0)
        assert engine.done(wrong) == bytes([m.BlockStatus.INVALID])


def test_a_block_is_found_only_with_all_its_ranks(agent: AgentProcess) -> None:
    hashes = chain("p", 2)
    with closing(Engine(agent, "tp", rank=0, world=2)) as zero:
        assert ask(agent, zero, hashes).status == LookupStatus.NOT_REGISTERED
        with closing(Engine(agent, "tp", rank=1, world=2)) as one:
            assert save(zero, hashes, [0, 1], salt=1) == bytes([OK] * 2)
            assert ask(agent, zero, hashes).tokens == 0
            assert save(one, hashes, [8, 9], salt=1) == bytes([OK] * 2)
            assert ask(agent, zero, hashes).tokens == 2 * BLOCK_TOKENS
            load = one.worker.load(run_of(hashes, [10, 11]), epoch=1, step=0)
            assert one.done(load) == bytes([OK] * 2)
            assert one.holds(11, 1, 1)
        eventually(lambda: ask(agent, zero, hashes).status == LookupStatus.NOT_REGISTERED, "the loss of a rank")


def test_a_rank_that_lives_cannot_be_registered_twice(agent: AgentProcess) -> None:
    taken = Registration(
        instance="one", role=m.Role.SCHEDULER, identity=IDENTITY, groups=(m.Group(BLOCK_TOKENS, BLOCKS),),
        hash_tokens=BLOCK_TOKENS,
    )  # fmt: skip
    with closing(Engine(agent, "one")), closing(agent.connect()) as session, pytest.raises(Refused, match="one"):
        session.register(taken)


def test_memory_of_this_process_is_reached_by_its_address(agent: AgentProcess) -> None:
    cache = ctypes.create_string_buffer(b"".join(bytes([i]) * 512 for i in range(8)))
    with closing(agent.connect()) as session:
        session.register(
            Registration(
                instance="by address", role=m.Role.WORKER, identity=IDENTITY, groups=(m.Group(BLOCK_TOKENS, 8),),
                hash_tokens=BLOCK_TOKENS,
                regions=[(m.Region(0, m.RegionKind.PEER, 4096, addr=ctypes.addressof(cache)), None)],
                held={0: {0: [m.Segment(0, 0, 512, 512)]}},
            ), PATIENCE_S,
        )  # fmt: skip
        events: list[Event] = []
        job = session.save(run_of(chain("a", 2), [2, 3]), epoch=1, step=0)
        assert wait(session, m.Done, events) == m.Done(job, bytes([OK] * 2))
        job = session.load(run_of(chain("a", 2), [6, 7]), epoch=1, step=0)
        assert wait(session, m.Done, events) == m.Done(job, bytes([OK] * 2))
    assert cache.raw[6 * 512 : 8 * 512] == bytes([2]) * 512 + bytes([3]) * 512


def test_a_reset_forgets_and_tells_everyone(agent: AgentProcess) -> None:
    with closing(Engine(agent, "one")) as one, closing(Engine(agent, "two")) as two:
        save(one, chain("p", 2), [0, 1], salt=1)
        before = two.worker.epoch
        assert one.scheduler.reset(PATIENCE_S) == before + 1
        assert two.wait(m.Epoch).epoch == before + 1
        assert ask(agent, two, chain("p", 2)).tokens == 0
        stale = two.worker.save(run_of(chain("p", 2), [0, 1]), epoch=before, step=0)
        assert two.done(stale) == bytes([m.BlockStatus.STALE] * 2)
        assert save(two, chain("p", 2), [0, 1], salt=2) == bytes([OK] * 2)
        assert ask(agent, one, chain("p", 2)).tokens == 2 * BLOCK_TOKENS


def test_a_killed_agent_is_an_end_and_its_successor_has_another_boot(agent: AgentProcess) -> None:
    engine = Engine(agent, "one")
    engine.words.record(0)
    job = engine.worker.save(run_of(chain("p", 1), [0]), epoch=1, step=1, event=0)
    agent.kill()

    def end() -> SessionEnded | None:
        try:
            engine.worker.poll()
        except SessionEnded as ended:
            return ended
        return None

    assert eventually(end, "the end of the session").jobs == (job,)
    with closing(LookupClient(agent.folder / "lookup.sock")) as client, pytest.raises(TimedOut):
        client.lookup(Request(tokens=17, hash_len=32, hashes=chain("p", 1)[0]))
    with pytest.raises((OSError, KVAgentError)):
        agent.connect()

    agent.start()
    with closing(Engine(agent, "one")) as again:
        assert again.worker.boot != engine.worker.boot
        assert save(again, chain("p", 1), [0], salt=3) == bytes([OK])
        assert ask(agent, again, chain("p", 1)).tokens == BLOCK_TOKENS
    engine.close()


def test_a_frozen_agent_costs_time_outs_and_its_late_lease_is_returned(agent: AgentProcess) -> None:
    with closing(Engine(agent, "one")) as engine, closing(LookupClient(agent.folder / "lookup.sock")) as client:
        save(engine, chain("p", 2), [0, 1], salt=1)
        request = Request(
            space=engine.registered.space, session=engine.scheduler.limits.session, want=Want.RESERVE, tokens=33,
            hash_len=32, hashes=b"".join(chain("p", 2)), deadline_us=10_000_000,
        )  # fmt: skip
        assert client.lookup(request, PATIENCE_S).lease != 0
        agent.freeze()
        with pytest.raises(TimedOut):
            client.lookup(request)
        with pytest.raises(TimedOut):
            engine.scheduler.ping(0.02)
        with pytest.raises(TimedOut):
            Session.connect(agent.folder / "session.sock", timeout_s=0.02)
        agent.thaw()
        late = eventually(client.late_answers, "the late answer")[0].lease
        assert agent.status()["leases"] == 2
        engine.scheduler.release([late, late - 1])
        engine.scheduler.ping(PATIENCE_S)
        assert agent.status()["leases"] == 0


def test_an_engine_that_is_gone_leaves_nothing(agent: AgentProcess) -> None:
    engine = Engine(agent, "one")
    save(engine, chain("p", 2), [0, 1], salt=1)
    assert ask(agent, engine, chain("p", 2), Want.RESERVE).lease != 0
    descriptors = agent.descriptors()
    engine.close()

    def gone() -> bool:
        status = agent.status()
        return (status["engines"], status["leases"], status["regions"]) == (0, 0, 0)

    eventually(gone, "an agent without the engine")
    eventually(
        lambda: agent.descriptors() < descriptors,
        "an agent that closed the engine's descriptors",
    )


def test_another_version_is_refused(agent: AgentProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_VERSION", "VERSION"):
        monkeypatch.setattr(m, name, m.VERSION + 1)
    with pytest.raises(SessionEnded) as caught:
        Session.connect(agent.folder / "session.sock", PATIENCE_S)
    assert caught.value.code == m.ErrorCode.VERSION
