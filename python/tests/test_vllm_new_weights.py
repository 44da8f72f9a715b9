"""Engines whose weights change in place, with the real agent: which blocks each one finds, on one
node and on two.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.weight_changes import LOADED, NAMED, PRIVATE
from tests.agent import REQUIRE, AgentProcess, eventually
from tests.simulated import BLOCK, NO_TOKENS, SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OLD, NEW = 3, 7  # the byte that the weights make of a block
BLOCKS = 3


class ChangingEngine(SimulatedEngine):
    """An engine whose weights can change."""

    def __init__(self, agent: AgentProcess, name: str, **more: Any) -> None:
        self._names = itertools.count()
        self._agent = agent
        super().__init__(agent, name, **({"weights_fixed": False, "blocks": 256} | more))

    def stores(self, prompt: str, salt: int) -> None:
        """Compute a prompt and save it."""
        self.save(f"{self.name}{next(self._names)}", prompt, BLOCKS, salt)

    def finds(self, prompt: str, salt: int) -> bool:
        """Return whether the agent has a prompt for this engine, and check the blocks if so."""
        request = self.request(f"{self.name}{next(self._names)}", prompt, BLOCKS)
        external = self.matched(request)
        if external:
            self.admit(request, external)
            results = self.until_received(request)
            assert (external, results.failed, results.bad_blocks) == (BLOCKS * BLOCK, set(), set())
            assert self.holds(request, salt, BLOCKS), "blocks of other weights"
        self.scheduler.finished(request, normally=False)
        return bool(external)

    def epoch(self) -> int:
        """Run a step, and return the epoch that the scheduler knows."""
        self.step()
        session = self.scheduler.agent.session
        assert session is not None
        return session.epoch

    def there(self) -> bool:
        """Run a step. Return whether all parts are registered at the running agent."""
        self.step()
        mine, workers = self.scheduler.agent.session, self.worker_link.current()
        if mine is None or workers is None:
            return False
        asked = self._agent.connect()
        asked.close()
        return mine.boot == workers.boot == asked.boot

    def new_weights(self, name: str = "") -> None:
        """Act like vLLM's reset_prefix_cache with reset_connector, until the pool can be used
        again.
        """
        self.scheduler.reset()
        if name:
            self.scheduler.weights_named(name)
        eventually(self.there, "an engine that is registered")

    def name_weights(self, name: str) -> None:
        """Act like vLLM's finish_weight_update with this name."""
        self.scheduler.weights_named(name)
        eventually(self.there, "an engine of that name")


@pytest.fixture
def engines(agent: AgentProcess) -> Iterator[Callable[..., ChangingEngine]]:
    made: list[ChangingEngine] = []

    def make(name: str, at: AgentProcess = agent, **more: Any) -> ChangingEngine:
        made.append(ChangingEngine(at, name, **more))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_an_updated_engine_exchanges_nothing_with_one_of_the_old_weights(
    engines: Callable[..., ChangingEngine], agent: AgentProcess
) -> None:
    updated, other = engines("updated"), engines("other")
    updated.stores("p", OLD)
    assert other.finds("p", OLD), "equal engines share"
    updated.new_weights()
    assert not updated.finds("p", NEW)
    other.stores("q", OLD)
    assert not updated.finds("q", NEW)
    updated.stores("r", NEW)
    assert updated.finds("r", NEW), "an engine of new weights hits its own blocks"
    assert not other.finds("r", OLD)
    fresh = engines("fresh")  # of the base files
    assert fresh.finds("q", OLD)
    assert not fresh.finds("r", OLD)
    assert other.finds("p", OLD), "what an engine does with its weights costs the others nothing"
    agent.kill()
    agent.start()
    for engine in (updated, other, fresh):
        eventually(engine.there, "an engine at the new agent")
    assert updated.generations.now.startswith(PRIVATE)
    other.stores("s", OLD)
    assert fresh.finds("s", OLD)
    assert not updated.finds("s", NEW), "the new agent was told the first identity"
    updated.stores("t", NEW)
    assert updated.finds("t", NEW)
    assert not other.finds("t", OLD)


def test_each_update_is_another_identity(engines: Callable[..., ChangingEngine]) -> None:
    engine = engines("one")
    for salt, prompt in enumerate("pqr", OLD):
        engine.stores(prompt, salt)
        assert engine.finds(prompt, salt)
        engine.new_weights()
        assert not engine.finds(prompt, salt)


def test_engines_that_are_given_one_name_share_again(engines: Callable[..., ChangingEngine]) -> None:
    one, two = engines("one"), engines("two")
    one.stores("p", OLD)
    for engine in (one, two):
        engine.new_weights("v2")
    assert not one.finds("p", NEW)
    one.stores("q", NEW)
    assert two.finds("q", NEW)
    third = engines("three", generation=NAMED + "v2")  # weights_version at its start
    assert third.finds("q", NEW)
    assert not engines("base").finds("q", OLD)
    two.new_weights()  # without a name
    assert not two.finds("q", NEW)
    two.name_weights("v2")
    assert two.finds("q", NEW)


def test_a_plain_reset_forgets_what_is_stored_and_ends_no_sharing(engines: Callable[..., ChangingEngine]) -> None:
    one, two = engines("one", generation=NAMED + "v1", weights_fixed=True), engines("two", generation=NAMED + "v1")
    fixed, plain = engines("fixed", weights_fixed=True), engines("plain")
    for engine, other in ((one, two), (fixed, plain)):
        engine.stores("p", OLD)
        engine.scheduler.reset()
        assert not engine.finds("p", OLD)
        engine.stores("q", OLD)
        assert other.finds("q", OLD)
        assert not other.finds("p", OLD)
        other.stores("r", OLD)
        assert engine.finds("r", OLD)


def test_what_is_planned_goes_out_under_no_other_identity(
    engines: Callable[..., ChangingEngine], agent: AgentProcess
) -> None:
    """A save and a load wait for the next step when the weights change, and a save is in flight."""
    engine, other = engines("one"), engines("two")
    engine.stores("p", OLD)
    saved, loaded = engine.request("a", "q", BLOCKS), engine.request("b", "p", BLOCKS)
    engine.matched(saved)
    engine.admit(saved)
    engine.fill(saved, OLD)
    found = engine.matched(loaded)
    assert found
    engine.admit(loaded, found)
    saved.num_computed_tokens = saved.num_tokens
    engine.scheduler.finished(saved, normally=True)  # its blocks wait to be handed out
    plan = engine.scheduler.plan(NO_TOKENS)
    assert (len(plan.saves), len(plan.loads)) == (1, 1)
    engine.scheduler.reset()
    engine.worker.begin(engine.scheduler.plan(NO_TOKENS))
    eventually(engine.worker_link.current, "a worker of the new identity")
    engine.worker.start(plan)  # later than it was planned, as no vLLM does it
    engine.worker.end(plan)
    results = engine.worker.results()
    assert results.failed | {"b"} == {"b"}
    assert results.received == {"b"}, "a load of the old weights is not waited for"
    report = engine.worker.report()
    assert report is not None
    engine.scheduler.report(report)
    eventually(engine.there, "an engine that is registered")
    engine.quiet()
    assert engine.scheduler.counts.loads_failed == 1
    assert {block.ref_cnt for block in engine.pool.blocks} == {1}
    assert not engine.finds("q", NEW)
    assert not other.finds("q", OLD)
    assert agent.status()["leases"] == 0


def test_loads_and_saves_in_flight_end_with_the_session_of_the_old_weights(
    engines: Callable[..., ChangingEngine], agent: AgentProcess
) -> None:
    """The end of that session is their fence: until then their blocks are pinned."""
    engine = engines("one")
    engine.stores("p", OLD)
    loaded, saved = engine.request("a", "p", BLOCKS), engine.request("b", "q", BLOCKS)
    found = engine.matched(loaded)
    engine.matched(saved)
    engine.admit(loaded, found)
    engine.admit(saved)
    engine.fill(saved, OLD)
    agent.freeze()
    engine.step((saved, saved.num_tokens))
    blocks = engine.scheduler.blocks
    assert (blocks.loading, blocks.saving) == (BLOCKS, BLOCKS)
    engine.scheduler.reset()
    for _ in range(3):
        engine.step()
    assert blocks.loading == BLOCKS, "a frozen agent may still write"
    agent.thaw()
    assert engine.until_received(loaded).received == {"a"}
    engine.quiet()
    assert (blocks.loading, blocks.saving) == (0, 0)
    eventually(engine.there, "an engine that is registered")
    for request in (loaded, saved):
        engine.scheduler.finished(request, normally=False)
    assert not engine.finds("q", NEW)
    engine.stores("r", NEW)
    assert engine.finds("r", NEW)


def test_a_request_that_old_weights_began_is_not_saved_under_the_new_identity(
    engines: Callable[..., ChangingEngine],
) -> None:
    engine = engines("one")
    running = engine.request("a", "p", 2 * BLOCKS)
    engine.matched(running)
    engine.admit(running)
    engine.fill(running, OLD)
    engine.step((running, BLOCKS * BLOCK))
    engine.scheduler.before_weights_call("update_weights")
    eventually(engine.there, "an engine that is registered")
    engine.step((running, BLOCKS * BLOCK))
    engine.quiet()
    engine.scheduler.finished(running, normally=True)
    engine.quiet()
    assert not engine.finds("p", NEW)


def test_calls_of_one_update_are_one_change(engines: Callable[..., ChangingEngine]) -> None:
    """Each change scans all blocks, and an update takes hundreds of calls."""
    engine = engines("one")
    engine.scheduler.weights_named("v1")
    for _ in range(3):
        engine.scheduler.before_weights_call("update_weights")
    assert engine.generations.serial == 3
    engine.step()
    engine.scheduler.before_weights_call("update_weights")
    assert engine.generations.serial == 4


def test_an_agent_that_starts_meanwhile_gets_the_new_identity(
    engines: Callable[..., ChangingEngine], agent: AgentProcess
) -> None:
    """Even if it stopped before the workers switched, and the scheduler has not met it since."""
    engine, other = engines("one"), engines("two")
    agent.kill()
    engine.scheduler.reset()
    agent.start()
    eventually(lambda: other.there() and engine.there(), "both at the new agent")
    other.stores("p", OLD)
    assert not engine.finds("p", NEW)
    engine.stores("q", NEW)
    assert engine.finds("q", NEW)
    spaces = {one["identity"]["generation"] for one in agent.status()["engine_list"]}
    assert spaces == {"", engine.generations.now}


def redis() -> str:
    """The server's program; without it the tests with two nodes are skipped."""
    found = shutil.which("redis-server")
    if found is None:
        message = "redis-server is not installed (make deps): tests of two nodes are LEFT OUT"
        if os.environ.get(REQUIRE):
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture
def nodes() -> Iterator[list[AgentProcess]]:
    """Two agents over one Redis."""
    program = redis()
    with contextlib.ExitStack() as stack:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        server = subprocess.Popen(
            [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
        )
        stack.callback(server.wait)
        stack.callback(server.kill)

        def answers() -> bool:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                return True
            return False

        eventually(answers, "a Redis that answers")
        made = []
        for name in ("first", "second"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvagent-"))) / name
            folder.mkdir(mode=0o700)
            flags = ("--tier", f"redis://127.0.0.1:{port}?write=save", "--tier-state", str(folder.parent / "state"))
            made.append(AgentProcess(folder, *flags))
            stack.callback(made[-1].close)
        yield made


@pytest.mark.parametrize("restarted", [False, True])
def test_blocks_that_a_load_brought_stay_of_their_weights(
    engines: Callable[..., ChangingEngine], agent: AgentProcess, restarted: bool
) -> None:
    """The request waits for free blocks meanwhile: vLLM hashes its blocks when it is admitted."""
    engine = engines("a")
    engine.stores("p", OLD)
    request = engine.request("R", "p", BLOCKS + 2)
    brought = engine.matched(request)
    engine.admit(request, brought)
    engine.until_received(request)
    engine.quiet()
    if restarted:
        agent.kill()
        agent.start()
    else:
        engine.new_weights()
    eventually(engine.there, "the session after that")
    engine.new_weights()
    eventually(engine.there, "the session of the new weights")
    for block, key in zip(engine.tables["R"], request.block_hashes[:BLOCKS], strict=False):
        block.block_hash = key
    engine.admit(request)
    request.num_computed_tokens = brought
    engine.step((request, request.num_tokens - brought))
    engine.quiet()
    engine.scheduler.finished(request, normally=True)
    assert not engine.finds("p", NEW), "blocks of the old weights were saved as those of the new ones"


@pytest.mark.parametrize("how", ["unobserved", "in_process"])
def test_a_reset_of_vllms_own_cache_may_follow_weights_that_changed_unobserved(
    engines: Callable[..., ChangingEngine], how: str
) -> None:
    """Like TRL, which writes to the model and resets without telling the connector."""
    silent, heard = engines("a", **{how: True}), engines("b")
    for engine in (silent, heard):
        engine.stores(f"p{engine.name}", OLD)
        engine.pool.reset_prefix_cache()
    assert silent.scheduler.generations.now == LOADED, "nothing was asked since"
    assert not silent.finds("pa", NEW)
    assert silent.scheduler.generations.now.startswith(PRIVATE)
    assert heard.finds("pb", OLD), "of weights that cannot change unobserved the blocks are as good as before"


def test_a_name_says_that_a_reset_in_the_callers_process_is_a_plain_one(
    engines: Callable[..., ChangingEngine],
) -> None:
    engine = engines("a", generation=NAMED + "v1", in_process=True)
    engine.stores("p", OLD)
    engine.pool.reset_prefix_cache()
    assert engine.finds("p", OLD)
    assert engine.scheduler.generations.now == NAMED + "v1"
    engine.scheduler.before_weights_call("update_weights")
    engine.stores("q", NEW)
    before = engine.scheduler.generations.now
    engine.pool.reset_prefix_cache()
    assert not engine.finds("q", NEW), "the name ended with the call"
    assert engine.scheduler.generations.now != before


@pytest.mark.parametrize("how", ["unobserved", "in_process"])
def test_a_name_after_a_reset_holds(engines: Callable[..., ChangingEngine], how: str) -> None:
    engine = engines("a", **{how: True})
    engine.stores("p", OLD)
    engine.pool.reset_prefix_cache()
    engine.scheduler.weights_named("v2")
    assert not engine.finds("p", NEW)
    assert engine.scheduler.generations.now == NAMED + "v2"


def test_a_reset_belongs_to_the_step_before_it(engines: Callable[..., ChangingEngine]) -> None:
    """A reset that failed, since requests were running, is followed by a step at once."""
    engine = engines("a", unobserved=True)
    generations = engine.scheduler.generations
    engine.step()
    engine.scheduler.before_weights_call("update_weights")
    changed = generations.serial
    engine.pool.reset_prefix_cache()
    engine.step()
    assert generations.serial == changed, "nothing was computed between the change and the reset"
    engine.pool.reset_prefix_cache()
    engine.step()
    assert generations.serial == changed + 1
    engine.scheduler.before_weights_call("update_weights")
    assert generations.serial == changed + 2, "a step was computed since the reset"


@pytest.mark.parametrize("by", ["a step", "the first step", "a reset"])
def test_a_block_that_is_hashed_right_before_its_request_loses_it(
    engines: Callable[..., ChangingEngine], by: str
) -> None:
    """vLLM hashes it at the output of a step, and the next step preempts the request."""
    engine = engines("a")
    request = engine.request("R", "p", BLOCKS)
    assert not engine.matched(request)
    table = engine.admit(request)
    table[0].block_hash = request.block_hashes[0]
    engine.step((request, 2 * BLOCK - 1))
    engine.scheduler.before_weights_call("update_weights")
    if by != "the first step":
        engine.step((request, 1))
    table[1].block_hash = request.block_hashes[1]
    engine.tables["R"] = []
    if by == "a reset":
        engine.pool.reset_prefix_cache()  # which fails
        engine.tables["R"] = table[:2]  # it finds them in vLLM's own cache
        engine.scheduler.allocated(request, engine.get_blocks("R"), 0)
    engine.step(preempted=["R"])
    assert [engine.scheduler.blocks.is_stale(block) for block in table[:3]] == [True, True, False]


def test_on_two_nodes_that_share_a_store(engines: Callable[..., ChangingEngine], nodes: list[AgentProcess]) -> None:
    """Blocks saved on one node reach the other through the store, if the weights are equal."""
    here, there = nodes
    patient = {"tier_wait_ms": 20_000.0}
    updated = engines("updated", at=here, **patient)
    other, third = engines("other", at=there, **patient), engines("third", at=there, generation=NAMED + "v2", **patient)
    updated.stores("p", OLD)
    eventually(lambda: other.finds("p", OLD), "what the first node saved")
    updated.new_weights()
    other.stores("q", OLD)
    updated.stores("r", NEW)
    base = engines("base", at=here, **patient)
    eventually(lambda: base.finds("q", OLD), "what the second node saved")
    assert not updated.finds("q", NEW)
    assert not updated.finds("p", NEW)
    assert not other.finds("r", OLD)
    updated.new_weights("v2")
    updated.stores("s", NEW)
    eventually(lambda: third.finds("s", NEW), "what an engine of that name saved on the other node")
    assert not other.finds("s", OLD)
    plain = engines("plain", at=here, generation=NAMED + "v2", weights_fixed=True, **patient)
    before = third.epoch()
    plain.new_weights()  # a plain reset
    assert not plain.finds("s", NEW)
    eventually(lambda: third.epoch() > before, "the reset at the other node")
    plain.stores("t", NEW)
    eventually(lambda: third.finds("t", NEW), "what was saved after a plain reset")
