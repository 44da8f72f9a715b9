"""Transfers between engines that a test drives, with the real agent."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent import messages as m
from kvagent.messages import BlockStatus
from kvagent.vllm.guests import transfers as tr
from kvagent.vllm.guests.transfers import Transfers
from kvagent.vllm.options import Options
from kvagent.vllm.scheduler.loads import LookupWaits
from kvagent.vllm.scheduler.requests import ANSWER_S
from kvagent.vllm.scheduler.saves import HOLD_S
from tests.agent import eventually
from tests.sides import guest, side_of
from tests.simulated import BLOCK, Clock, SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvagent.session import Session
    from kvagent.vllm.plan import Report
    from tests.agent import AgentProcess

SENDS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
RECEIVES = {"do_remote_decode": False, "do_remote_prefill": True}


# ---- names


@pytest.mark.parametrize(
    ("request_id", "expected"),
    [
        ("cmpl-5f-0-0123abcd", "cmpl-5f-0"),
        ("cmpl-5f-0", "cmpl-5f-0"),
        ("chatcmpl-0123abcd", "chatcmpl"),  # both sides take off the same
        ("cmpl-5f-0-0123ABCD", "cmpl-5f-0-0123ABCD"),
    ],
)
def test_what_vllm_appends_to_a_request_id_is_taken_off(request_id: str, expected: str) -> None:
    assert tr.base(request_id) == expected


def test_names_agree_where_the_decode_engine_gets_what_the_prefill_engine_returned() -> None:
    offered = tr.offered_name(SENDS, "engine-1", "cmpl-uuid-0-0123abcd")
    params = {"remote_engine_id": "engine-1", "remote_request_id": "cmpl-uuid-0-0123abcd", "remote_num_tokens": 9}
    got = tr.wanted(RECEIVES | params, "cmpl-uuid-0-89abcdef")
    assert got == tr.Wanted(offered, "", early=False)
    assert offered == b"r/engine-1/cmpl-uuid-0"


@pytest.mark.parametrize("request_id", ["cmpl-uuid-0", "cmpl-uuid-3", "1_cmpl-uuid-0", "chatcmpl-uuid"])
def test_names_agree_where_a_proxy_knows_only_its_own_request(request_id: str) -> None:
    """The push proxy asks both at once, and gives the decode engine the ID that both get as
    X-Request-Id.
    """
    offered = tr.offered_name(SENDS, "engine-1", f"{request_id}-0123abcd")
    params = RECEIVES | {
        "remote_engine_id": "engine-1", "remote_request_id": "uuid", "remote_host": "10.0.0.1", "remote_port": 9,
    }  # fmt: skip
    assert tr.wanted(params, f"{request_id}-89abcdef") == tr.Wanted(offered, "10.0.0.1:9", early=True)


@pytest.mark.parametrize("request_id", ["cmpl-uuid-0", "cmpl-uuid-3", "1_cmpl-uuid-2", "chatcmpl-uuid"])
def test_names_agree_where_a_proxy_names_the_transfer(request_id: str) -> None:
    """Several prompts or samples of one request of the proxy have the same transfer_id."""
    offered = tr.offered_name(SENDS | {"transfer_id": "xfer-uuid"}, "engine-1", f"{request_id}-0123abcd")
    params = RECEIVES | {
        "transfer_id": "xfer-uuid", "remote_engine_id": "engine-1@node:9", "remote_bootstrap_addr": "http://node:8998",
    }  # fmt: skip
    assert tr.wanted(params, f"{request_id}-89abcdef") == tr.Wanted(offered, "node:9", early=True)
    names = {tr.offered_name({"transfer_id": "x"}, "e", one) for one in ("cmpl-u-0", "cmpl-u-1", "1_cmpl-u-0", "c")}
    assert len(names) == 3, "prompts of one request share a name"


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"remote_engine_id": "e"},
        {"remote_request_id": "r"},
        {"remote_engine_id": None, "remote_request_id": "r"},
        {"remote_engine_id": ["e"], "remote_request_id": {}},
        {"transfer_id": ""},
        {"transfer_id": True},
    ],
)
def test_params_that_name_nothing_are_not_a_transfer(params: dict[str, Any]) -> None:
    assert tr.wanted(RECEIVES | params, "cmpl-uuid-0") is None


@pytest.mark.parametrize(
    ("host", "port", "peer"),
    [
        ("node", 9, "node:9"), ("fd00::1", 9, "[fd00::1]:9"), ("", 0, ""), (None, None, ""), ("node", 0, ""),
        ("node", 65536, ""), ("node", "9", ""), (5, 9, ""), ("n" * 200, 9, ""),
    ],
)  # fmt: skip
def test_the_address_of_the_other_agent(host: Any, port: Any, peer: str) -> None:
    params = {"remote_engine_id": "e", "remote_request_id": "r", "remote_host": host, "remote_port": port}
    got = tr.wanted(RECEIVES | params, "x")
    assert got is not None
    assert got.peer == peer
    assert tr.split(peer) == ((str(host), port) if peer else ("", 0))


def test_a_long_name_is_shortened_alike_on_both_sides() -> None:
    offered = tr.offered_name(SENDS, "e" * 300, "cmpl-uuid-0")
    got = tr.wanted(RECEIVES | {"remote_engine_id": "e" * 300, "remote_request_id": "cmpl-uuid-0"}, "x")
    assert got is not None
    assert got.name == offered
    assert len(offered) <= 256


# ---- with engines


class Pair:
    """A prefill engine and a decode engine at one agent."""

    def __init__(self, agent: AgentProcess, **options: Any) -> None:
        self.agent = agent
        self.prefill = SimulatedEngine(agent, "p", **options)
        self.decode = SimulatedEngine(agent, "d", saves=False, **options)

    def offer(self, name: str, prompt: str, blocks: int, **params: Any) -> Any:
        """Let a request arrive at the prefill engine."""
        request = self.prefill.request(f"{name}", prompt, blocks, kv_transfer_params=SENDS | params)
        self.prefill.scheduler.on_new_request(request)
        return request

    def compute(self, request: Any, salt: int) -> None:
        """Compute its prompt in one step."""
        self.prefill.admit(request)
        self.prefill.fill(request, salt)
        self.prefill.step((request, request.num_tokens))
        request.num_tokens += 1  # the one that was sampled

    def end(self, request: Any, *, normally: bool = True) -> Any:
        """End a prefill request. Return its params."""
        return self.prefill.scheduler.finished(request, normally=normally)

    def receive(self, name: str, prompt: str, blocks: int) -> Any:
        """Let a request arrive at the decode engine, as a proxy sends it that asks both at once."""
        params = RECEIVES | {"remote_engine_id": "p", "remote_request_id": name}
        request = self.decode.request(name, prompt, blocks, kv_transfer_params=params)
        self.decode.scheduler.on_new_request(request)
        return request

    def hold(self) -> Callable[[], None]:
        """Keep the prefill engine's steps from ending until the returned function is called."""
        clock: Any = self.prefill.sync
        running: list[int] = []
        end, clock.end = clock.end, running.append

        def release() -> None:
            clock.end = end
            for step in running:
                end(step)

        return release

    def ask(self, request: Any) -> int | None:
        """Return what is promised to it once the agent has answered; None if it is to wait."""
        got: list[int | None] = []
        tracked = self.decode.scheduler.requests[request.request_id]
        before = tracked.asking.after

        def answered() -> bool:
            got[:] = [self.decode.scheduler.matched(request, 0)[0]]
            self.decode.step()
            return got[0] is not None or tracked.asking.after > before

        eventually(answered, "an answer of the agent")
        return got[0]

    def load(self, request: Any, tokens: int) -> None:
        """Load what was promised."""
        self.decode.admit(request, tokens)
        results = self.decode.until_received(request)
        assert not results.failed
        assert not results.bad_blocks
        self.decode.quiet()

    def table(self) -> dict[str, int]:
        """Return the agent's figures about transfers, with all that was sent to it before."""
        for engine in (self.prefill, self.decode):
            session = engine.scheduler.agent.session
            if session is not None:
                session.start_ping()
                eventually(partial(heard, engine, session), "an answer of the agent")
        told = self.agent.status()["transfers"]
        return {name: told[name] for name in ("open", "complete", "delivered")}

    def close(self) -> None:
        """End both."""
        self.agent.thaw()
        self.prefill.close()
        self.decode.close()


def heard(engine: SimulatedEngine, session: Session) -> bool:
    """Return whether the agent has answered a ping, after a step."""
    engine.step()
    return not session.pinging


@pytest.fixture
def pairs(agent: AgentProcess) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(**options: Any) -> Pair:
        made.append(Pair(agent, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_decode_request_waits_for_the_blocks_of_a_prefill_request(pairs: Callable[..., Pair]) -> None:
    """It is asked before they are computed, and gets all of them, also of a prompt of whole
    blocks.
    """
    pair = pairs()
    request = pair.offer("cmpl-a-0", "p", 4)
    wants = pair.receive("cmpl-a-0", "p", 4)
    wants.num_tokens = 4 * BLOCK
    for _ in range(3):
        assert pair.ask(wants) is None, "an open transfer is not waited for"
    pair.compute(request, 3)
    params = pair.end(request)
    assert params["remote_num_tokens"] == request.num_prompt_tokens
    pair.prefill.quiet()
    assert pair.ask(wants) == 4 * BLOCK
    pair.load(wants, 4 * BLOCK)
    assert wants.kv_transfer_params["do_remote_prefill"] is False, "it would be received again after a preemption"
    assert pair.decode.holds(wants, 3, 4)
    assert pair.table() == {"open": 0, "complete": 0, "delivered": 1}


def test_a_transfer_is_complete_only_when_its_saves_are_reported(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    request = pair.offer("cmpl-a-0", "p", 4)
    release = pair.hold()
    pair.compute(request, 3)
    pair.end(request)
    for _ in range(3):
        pair.prefill.step()
        assert pair.prefill.scheduler.pending(), "an engine that idles reports nothing"
    assert pair.table()["open"] == 1, "complete before its saves were reported"
    release()
    pair.prefill.quiet()
    assert pair.table() == {"open": 0, "complete": 1, "delivered": 0}


def test_blocks_that_another_request_saves_are_waited_for_too(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    release = pair.hold()
    plain = pair.prefill.request("plain", "p", 4)
    pair.prefill.admit(plain)
    pair.prefill.step((plain, plain.num_tokens))
    request = pair.offer("cmpl-a-0", "p", 4)
    pair.compute(request, 3)
    pair.end(request)
    pair.prefill.step()
    assert pair.table()["open"] == 1, "complete before its saves were reported"
    release()
    pair.prefill.quiet()
    assert pair.table()["complete"] == 1


def test_blocks_that_another_engine_saves_are_waited_for_too(pairs: Callable[..., Pair]) -> None:
    """Both compute a common prefix at the same time, and the agent is copying it from the other
    one.
    """
    pair = pairs()
    scheduler: Any = pair.prefill.scheduler
    report = scheduler.report
    asked: list[bytes] = []

    def copying(given: Report) -> None:
        for outcome in given.outcomes.values():
            asked.append(outcome.statuses)
            if len(asked) < 4:
                outcome.statuses = bytes([BlockStatus.IN_PROGRESS]) + outcome.statuses[1:]
        report(given)

    scheduler.report = copying
    request = pair.offer("cmpl-a-0", "p", 4)
    pair.compute(request, 3)
    pair.end(request)
    eventually(lambda: (pair.prefill.step(), len(asked) == 3)[1], "blocks that are offered again")
    assert guest(scheduler, Transfers).busy(), "complete before another engine's save was"
    assert scheduler.blocks.awaited == 4
    pair.prefill.quiet()
    assert len(asked) == 4
    assert pair.table()["complete"] == 1
    assert {block.ref_cnt for block in pair.prefill.pool.blocks} == {1}


@pytest.mark.parametrize("ended", [False, True])
def test_blocks_of_old_weights_are_not_offered_again(pairs: Callable[..., Pair], *, ended: bool) -> None:
    """Their save would be repeated under the new weights' name."""
    pair = pairs()
    scheduler: Any = pair.prefill.scheduler
    report = scheduler.report
    asked: list[bytes] = []

    def changed(given: Report) -> None:
        for outcome in given.outcomes.values():
            asked.append(outcome.statuses)
            if len(asked) == 1:
                outcome.statuses = bytes([BlockStatus.IN_PROGRESS]) * len(outcome.statuses)
                scheduler.new_weights()
        report(given)

    scheduler.report = changed
    request = pair.offer("cmpl-a-0", "p", 4)
    pair.compute(request, 3)
    if ended:
        pair.end(request)
    eventually(lambda: (pair.prefill.step(), asked)[1], "the end of the save")
    pair.prefill.quiet()
    assert len(asked) == 1, "offered again"
    assert {block.ref_cnt for block in pair.prefill.pool.blocks} <= {0, 1}


def test_more_blocks_are_pinned_for_a_decode_engine_than_for_others(pairs: Callable[..., Pair]) -> None:
    """All of them: their request has ended, and vLLM may free it at once."""
    pair = pairs(pin_percent=10.0)
    blocks = pair.prefill.scheduler.blocks
    assert 0 < blocks.max_saving < 20
    request = pair.offer("cmpl-a-0", "p", 20)
    release = pair.hold()
    pair.compute(request, 3)
    params = pair.end(request)
    assert params["do_remote_prefill"] is True
    assert (blocks.awaited, blocks.saving) == (20, 0)
    release()
    pair.prefill.quiet()
    assert pair.agent.status()["blocks_stored"] == 20
    assert pair.table()["complete"] == 1
    assert {block.ref_cnt for block in pair.prefill.pool.blocks} == {1}


def test_blocks_are_freed_without_an_agent(pairs: Callable[..., Pair], agent: AgentProcess) -> None:
    pair = pairs()
    request = pair.offer("cmpl-a-0", "p", 20)
    pair.compute(request, 3)
    pair.end(request)
    agent.kill()
    pair.prefill.quiet()
    assert {block.ref_cnt for block in pair.prefill.pool.blocks} == {1}
    agent.start()


def test_blocks_are_pinned_for_a_bounded_time_for_an_agent_that_stands_still(
    pairs: Callable[..., Pair], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may stand still for good: nothing grows with the requests that end meanwhile."""
    pair = pairs(transfer_ttl_ms=10_000)
    clock, blocks = Clock(monkeypatch), pair.prefill.scheduler.blocks
    request = pair.offer("cmpl-a-0", "p", 20)
    other = pair.offer("cmpl-b-0", "r", 1)
    agent.freeze()
    pair.compute(request, 3)
    pair.compute(other, 5)
    pair.end(request)
    pair.end(other, normally=False)

    def advance(seconds: float) -> None:
        for _ in range(int(seconds / (HOLD_S / 2))):
            clock.now += HOLD_S / 2
            pair.prefill.step()

    pair.prefill.step()
    advance(HOLD_S / 2)
    assert blocks.awaited == 21, "blocks that are not pinned for saves in flight"
    advance(HOLD_S / 2)
    assert blocks.awaited == 0, "blocks that are pinned while the agent stands still"
    advance(10.0 - HOLD_S / 2)
    assert guest(pair.prefill.scheduler, Transfers).busy(), "a transfer that is forgotten before its time to live"
    advance(HOLD_S)
    assert not guest(pair.prefill.scheduler, Transfers).busy(), "a transfer that is kept while the agent stands still"
    agent.thaw()
    pair.prefill.quiet()
    assert pair.table()["open"] == 0
    assert {block.ref_cnt for block in pair.prefill.pool.blocks} == {1}


def test_a_reset_frees_what_is_pinned_and_completes_its_transfer(pairs: Callable[..., Pair]) -> None:
    """vLLM's reset would fail again and again while blocks are pinned."""
    pair = pairs()
    request = pair.offer("cmpl-a-0", "p", 20)
    pair.compute(request, 3)
    pair.end(request)
    pair.prefill.pool.reset_prefix_cache()
    assert pair.prefill.scheduler.blocks.awaited == 0, "blocks that are pinned after a reset"
    pair.prefill.quiet()
    assert pair.table() == {"open": 0, "complete": 1, "delivered": 0}
    assert {block.ref_cnt for block in pair.prefill.pool.blocks} == {1}


def test_blocks_for_a_decode_engine_stay_pinned_when_blocks_are_scarce(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    blocks = pair.prefill.scheduler.blocks
    plain = pair.prefill.request("plain", "q", 3)
    request = pair.offer("cmpl-a-0", "p", 4)
    release = pair.hold()
    pair.prefill.admit(plain)
    pair.prefill.admit(request)
    pair.prefill.fill(request, 3)
    pair.prefill.step((request, request.num_tokens), (plain, plain.num_tokens))
    assert (blocks.awaited, blocks.saving) == (4, 3)
    pair.prefill.pool.get_num_free_blocks = lambda: 0  # type: ignore[method-assign]
    pair.prefill.step()
    assert (blocks.awaited, blocks.saving) == (4, 0), "saves for a decode engine are revoked like others"
    other = pair.offer("cmpl-b-0", "r", 2)
    pair.compute(other, 5)
    assert blocks.awaited == 6, "what a decode engine waits for is not saved when blocks are scarce"
    release()
    pair.end(request)
    pair.end(other)
    pair.prefill.quiet()
    assert (blocks.awaited, blocks.saving) == (0, 0)
    assert pair.table()["complete"] == 2


def test_an_agent_that_stands_still_is_waited_for_longer(pairs: Callable[..., Pair], agent: AgentProcess) -> None:
    """Others compute as soon as it does not answer a ping, and do not save."""
    pair = pairs()
    request = pair.offer("cmpl-a-0", "p", 4)
    pair.prefill.scheduler.agent.silent = pair.decode.scheduler.agent.silent = True
    pair.prefill.admit(request)
    agent.freeze()
    pair.prefill.fill(request, 3)
    sessions: list[Any] = [pair.prefill.scheduler.agent, pair.decode.scheduler.agent]
    for session in sessions:
        session.stopped = lambda _: True
        session.awaited = lambda: True
    pair.prefill.step((request, request.num_tokens))
    assert pair.prefill.scheduler.blocks.awaited == 4, "nothing is saved for a decode engine"
    wants = pair.receive("cmpl-a-0", "p", 4)
    for _ in range(3):
        assert pair.decode.scheduler.matched(wants, 0) == (None, False), "it computes what was computed for it"
        pair.decode.step()
    agent.thaw()
    for session in sessions:
        session.stopped = lambda _: False
    request.num_tokens += 1
    pair.end(request)
    pair.prefill.quiet()
    assert eventually(lambda: pair.ask(wants), "a promise") == 4 * BLOCK


def test_an_aborted_prefill_request_completes_its_transfer(pairs: Callable[..., Pair]) -> None:
    """The decode request gets what was saved, and vLLM keeps no block."""
    pair = pairs()
    request = pair.offer("cmpl-a-0", "p", 8)
    pair.prefill.admit(request)
    pair.prefill.fill(request, 3)
    pair.prefill.step((request, 3 * BLOCK))
    pair.end(request, normally=False)
    pair.prefill.quiet()
    assert pair.table()["complete"] == 1
    assert {block.ref_cnt for block in pair.prefill.pool.blocks} == {1}, "pins of an aborted request are kept"
    wants = pair.receive("cmpl-a-0", "p", 8)
    assert pair.ask(wants) == 3 * BLOCK


def test_a_prefill_request_that_loads_when_it_ends_is_not_kept(pairs: Callable[..., Pair], agent: AgentProcess) -> None:
    """vLLM would free it twice: its load ends too."""
    pair = pairs()
    first = pair.offer("cmpl-a-0", "p", 8)
    pair.compute(first, 3)
    pair.end(first)
    pair.prefill.quiet()
    request = pair.offer("cmpl-b-0", "p", 8)
    promised = eventually(lambda: pair.prefill.scheduler.matched(request, 0)[0], "a promise")
    agent.freeze()
    pair.prefill.admit(request, promised)
    pair.prefill.step()
    pair.end(request, normally=False)
    agent.thaw()
    pair.prefill.until_received(request)
    pair.prefill.quiet()
    assert pair.table()["open"] == 0


def test_a_decode_request_that_is_never_scheduled_ends_the_transfer(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    request = pair.offer("cmpl-a-0", "p", 4)
    pair.compute(request, 3)
    pair.end(request)
    pair.prefill.quiet()
    eventually(lambda: pair.table()["complete"] == 1, "a complete transfer")
    wants = pair.receive("cmpl-a-0", "p", 4)
    pair.decode.scheduler.finished(wants, normally=False)
    eventually(lambda: pair.table() == {"open": 0, "complete": 0, "delivered": 1}, "the end of the transfer")


def test_waiting_for_a_transfer_is_bounded(pairs: Callable[..., Pair]) -> None:
    """The blocks that are there after that time are taken."""
    pair = pairs(remote_wait_ms=1.0)
    request = pair.offer("cmpl-a-0", "p", 4)
    pair.prefill.admit(request)
    pair.prefill.fill(request, 3)
    pair.prefill.step((request, 2 * BLOCK))
    eventually(lambda: (pair.prefill.step(), pair.agent.status()["blocks_stored"] == 2)[1], "two blocks")
    wants = pair.receive("cmpl-a-0", "p", 4)
    assert eventually(lambda: pair.ask(wants), "a promise") == 2 * BLOCK
    assert pair.decode.scheduler.counts.transfers_overdue == 1
    pair.load(wants, 2 * BLOCK)
    assert pair.decode.holds(wants, 3, 2)


def test_a_transfer_is_waited_for_once(pairs: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that finds no free blocks looks up again what it was promised."""
    pair = pairs()
    request = pair.offer("cmpl-a-0", "p", 4)
    pair.prefill.admit(request)
    pair.prefill.fill(request, 3)
    pair.prefill.step((request, 2 * BLOCK))
    eventually(lambda: (pair.prefill.step(), pair.agent.status()["blocks_stored"] == 2)[1], "two blocks")
    wants = pair.receive("cmpl-a-0", "p", 4)
    clock = Clock(monkeypatch)
    assert pair.ask(wants) is None
    clock.now += 31.0
    for _ in range(3):
        assert pair.ask(wants) == 2 * BLOCK, "remote_wait_ms begins again"
        clock.now += ANSWER_S + 0.1
    assert pair.decode.scheduler.counts.transfers_overdue == 1
    assert pair.decode.scheduler.counts.lookups == 3


def test_an_agent_that_stands_still_after_its_first_answer_is_given_up(
    pairs: Callable[..., Pair], agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a request may wait for remote_wait_ms only while the agent says that more may come."""
    pair = pairs(lookup_wait_ms=0.0, lookup_grace_ms=200.0, lookup_age_ms=2_000.0)
    pair.offer("cmpl-a-0", "p", 4)
    wants = pair.receive("cmpl-a-0", "p", 4)
    assert pair.ask(wants) is None
    agent.freeze()
    clock = Clock(monkeypatch)
    begin = clock.now
    while pair.decode.scheduler.matched(wants, 0)[0] is None:
        clock.now += 0.1
        pair.decode.step()
    assert clock.now - begin > 2.0, "an agent that is late is not waited for"
    assert clock.now - begin < 4.5, "an agent that stands still is waited for as if it answered"


@pytest.mark.parametrize(("early", "longest"), [(True, 30.0), (False, 10.0)])
def test_less_is_waited_for_what_is_computed(early: bool, longest: float) -> None:
    """Behind a shared tier, an agent cannot know that a prefill engine stored nothing."""
    waits = LookupWaits(Options())
    side = side_of(Transfers(Options(), "d", 1, saves=False))
    params = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "a"}
    params |= {} if early else {"remote_num_tokens": 64}
    tracked = side._track(SimpleNamespace(request_id="a", kv_transfer_params=params, lora_request=None, mm_features=[]))
    assert waits.pending_s(tracked.asking.terms) == longest


def test_a_decode_request_that_waits_does_not_spin(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    pair.offer("cmpl-a-0", "p", 4)
    wants = pair.receive("cmpl-a-0", "p", 4)
    for _ in range(30):
        pair.ask(wants)
    assert pair.decode.worker._idle, "an engine that waits for a transfer takes a processor"


def test_a_prompt_without_a_whole_block_is_no_transfer(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    request = pair.prefill.request("cmpl-a-0", "p", 0, kv_transfer_params=dict(SENDS))
    pair.prefill.scheduler.on_new_request(request)
    pair.compute(request, 3)
    params = pair.end(request)
    assert params["remote_request_id"] == "cmpl-a-0"
    assert pair.table() == {"open": 0, "complete": 0, "delivered": 0}


def test_params_are_returned_without_an_agent(pairs: Callable[..., Pair], agent: AgentProcess) -> None:
    pair = pairs()
    agent.kill()
    eventually(lambda: (pair.prefill.step(), pair.prefill.scheduler.agent.session is None)[1], "a lost session")
    request = pair.offer("cmpl-a-0", "p", 4, transfer_id="x")
    pair.compute(request, 3)
    params = pair.end(request)
    assert params == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_request_id": "cmpl-a-0",
        "remote_host": "", "remote_port": 0, "tp_size": 1, "remote_num_tokens": 4 * BLOCK + 1, "transfer_id": "x",
    }  # fmt: skip
    pair.prefill.quiet()
    agent.start()


def test_open_transfers_are_opened_at_a_new_agent(pairs: Callable[..., Pair], agent: AgentProcess) -> None:
    pair = pairs()
    pair.offer("cmpl-a-0", "p", 4)
    assert pair.table()["open"] == 1
    agent.kill()
    agent.start()
    eventually(lambda: (pair.prefill.step(), agent.status()["transfers"]["open"] == 1)[1], "an open transfer")


def test_an_open_transfer_is_renewed(pairs: Callable[..., Pair]) -> None:
    pair = pairs(transfer_ttl_ms=1000)
    pair.prefill.step()  # which notes the session
    renewals: list[float] = []

    def send(message: m.Message) -> bool:
        if isinstance(message, m.Offer):
            renewals.append(time.monotonic())
        return True

    pair.prefill.scheduler.agent.send = send  # type: ignore[method-assign]
    begin = time.monotonic()
    pair.offer("cmpl-a-0", "p", 4)
    eventually(lambda: (pair.prefill.step(), len(renewals) == 4)[1], "three renewals")
    assert renewals[3] - begin >= 1.0, "renewed more often than needed"


@pytest.mark.parametrize("transfers", [True, False])
def test_a_request_of_a_cache_is_no_transfer(pairs: Callable[..., Pair], transfers: bool) -> None:
    """Without params, or with transfers switched off."""
    pair = pairs(transfers=transfers)
    params = {} if transfers else SENDS
    request = pair.prefill.request("a", "p", 4, kv_transfer_params=params)
    pair.prefill.scheduler.on_new_request(request)
    pair.compute(request, 3)
    assert pair.end(request) is None
    pair.prefill.quiet()
    assert pair.table() == {"open": 0, "complete": 0, "delivered": 0}
    assert pair.agent.status()["blocks_stored"] == 4
