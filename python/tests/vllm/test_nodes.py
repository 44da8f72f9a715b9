"""An engine over two nodes, played by two agents in folders of their own: the real scheduler and
worker drivers, whose ranks speak to their own node's agent.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from kvagent.errors import KVAgentError
from kvagent.messages import Role
from kvagent.vllm import connector as calls
from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.guests.nodes import Delegate
from kvagent.vllm.scheduler import agent_session
from kvagent.vllm.weight_changes import LOADED
from tests.agent import PATIENCE_S, AgentProcess, eventually
from tests.vllm.agents import boot, flip
from tests.vllm.gpu import PRIME
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = [i % 400 + 5 for i in range(100)]
WHOLE = 96  # tokens of its whole blocks
TP = {"ranks": 2, "split": True}
FOUR = {"ranks": 4, "stages": 2, "asynchronous": True, "depth": 2}
PP = {"ranks": 2, "stages": 2, "asynchronous": True, "depth": 2}
SHAPES = pytest.mark.parametrize("shape", [TP, PP], ids=["tp2", "pp2-async"])
FIXED = {"weights_fixed": True}
BRIEF_S = 0.1  # how long an agent is waited for that was stopped
LONG_S = 10.0  # and one that may be slow
SERVES_DRAFTS = pytest.mark.skipif(not hasattr(ActiveKVConnector, "finalize_step"), reason="refused on any node")
ACTIVE = 5  # at once
STEPS = (5, 60)  # that a trouble lasts
TROUBLED = 0.06  # how often one begins, of the requests that arrive without one
TROUBLED_AGAIN = 0.006  # while the last one's sessions are on their way: on a fast machine, that takes many steps
LOADS = 6  # in a random run, at least
KINDS = ("freeze", "kill", "reset", "reset of one")
HITS_S = 120.0  # for what takes a second on an idle machine
SEED = 1  # unless KVAGENT_SEED is set


@pytest.fixture
def keeping() -> Iterator[AgentProcess]:
    """The other node's agent, which finds its pool again after its end."""
    with (
        tempfile.TemporaryDirectory(prefix="kvagent-") as name,
        tempfile.TemporaryDirectory(prefix="kvagent-", dir="/dev/shm") as memory,
    ):
        folder = Path(name) / "run"
        folder.mkdir(mode=0o700)
        process = AgentProcess(folder, "--dram-path", str(Path(memory) / "pool"))
        yield process
        process.close()


def over(worlds: Any, far: AgentProcess, **more: Any) -> World:
    """Return an engine over both nodes, whose sessions are there."""
    extra = {"pin_percent": 40} | FIXED | more.pop("extra", {})
    world: World = worlds(others=[str(far.folder)], extra=extra, **more)
    together(world)
    return world


def patience(world: World, wait_s: float) -> None:
    """Wait so long for both agents from now on."""
    world.wait_at_most(wait_s)
    for worker in world.workers:
        for one in worker._worker.guests:
            if isinstance(one, Delegate):
                one._age_s = wait_s


def complete(world: World) -> bool:
    """Return whether the engine has a session with both agents, and all ranks are there too."""
    agent = world.side.agent
    if agent.session is None:
        return False
    nodes = [(agent.session.boot, agent.space), *((one.boot, one.space) for one, _ in agent.targets())]
    links = [worker._worker._link.current() for worker in world.workers]
    found = [None if one is None else (one.boot, one.registered.space) for one in links]
    return found == [nodes[rank * len(nodes) // world.ranks] for rank in range(world.ranks)]


def together(world: World) -> None:
    """Step until the engine is complete."""

    def joined() -> bool:
        world.step()
        world.settle()
        return complete(world)

    eventually(joined, "a session with both agents", HITS_S)


def warm(world: World, name: str, prompt: list[int] = PROMPT) -> int:
    """Run a prompt with the engine's own cache empty. Return the tokens that were loaded."""
    world.run()
    assert world.scheduler.reset_prefix_cache()
    before = world.side.counts.tokens_loaded
    world.add(name, prompt, 10)
    world.run()
    start = len(prompt)
    assert world.outputs[name] == world.sequences[name].tokens[start : start + 10]
    loaded: int = world.side.counts.tokens_loaded - before
    return loaded


def serve(world: World, name: str, prompt: list[int]) -> None:
    """Run a prompt to its end; what is in flight at an agent that is away stays."""
    world.add(name, prompt, 10)
    while name not in world.reasons:
        world.step()
    world.settle()
    assert world.outputs[name] == world.sequences[name].tokens[len(prompt) : len(prompt) + 10]


def hits_again(world: World) -> None:
    """Run the prompt until all of it is loaded."""
    eventually(lambda: warm(world, f"back{world.steps}") == WHOLE, "hits again", HITS_S)


def rejoin(world: World, agent: AgentProcess) -> None:
    """Step until the engine has noticed that the agent was killed, and is at both again."""
    now = boot(agent)

    def there() -> bool:
        world.step()
        world.settle()
        return complete(world) and world.side.agent.targets()[0][0].boot == now

    eventually(there, "the engine at the new agent", HITS_S)


def both_clean(world: World, *agents: AgentProcess) -> None:
    for one in agents:
        clean(world, one)


@SHAPES
def test_a_prompt_is_loaded_from_both_nodes(
    worlds: Any, agent: AgentProcess, far: AgentProcess, shape: dict[str, Any]
) -> None:
    world = over(worlds, far, **shape)
    assert (agent.status()["regions"], far.status()["regions"]) == (2, 2), "each rank is at its node's agent"
    world.add("cold", PROMPT, 10)
    world.run()
    assert (agent.status()["blocks_saved"], far.status()["blocks_saved"]) == (6, 6)
    assert warm(world, "warm") == WHOLE
    assert (agent.status()["blocks_loaded"], far.status()["blocks_loaded"]) == (6, 6)
    both_clean(world, agent, far)
    second = over(worlds, far, **shape)
    assert warm(second, "second") == WHOLE
    both_clean(second, agent, far)


@SHAPES
def test_a_hit_is_the_least_of_what_the_nodes_have(
    worlds: Any, agent: AgentProcess, far: AgentProcess, shape: dict[str, Any]
) -> None:
    world = over(worlds, far, **shape)
    world.add("cold", PROMPT, 10)
    world.run()
    far.kill()
    far.start()  # it has nothing
    rejoin(world, far)
    assert warm(world, "head", PROMPT[:50]) == 0, "one node alone has it"
    assert agent.status()["blocks_stored"] == 6
    assert far.status()["blocks_stored"] == 3
    failed = world.side.counts.loads_failed
    assert warm(world, "part") == 48
    assert world.side.counts.loads_failed == failed, "more was promised than the other node has"
    assert far.status()["blocks_stored"] == 6, "what one node lacks was not saved there"
    assert warm(world, "whole") == WHOLE
    both_clean(world, agent, far)


@SHAPES
@pytest.mark.parametrize("lost", ["here", "far"])
def test_a_block_that_one_node_has_lost_is_computed(
    worlds: Any, agent: AgentProcess, far: AgentProcess, shape: dict[str, Any], lost: str
) -> None:
    world = over(worlds, far, **shape)
    world.add("cold", PROMPT, 10)
    world.run()
    rank = int(lost == "far")
    value = (world.sequences["cold"].hashes[20] * 7 + rank * 29) % PRIME
    flip((far if rank else agent).process.pid, struct.pack("<f", value))
    warm(world, "warm")
    assert not world.gpu.bad, world.gpu.bad[:2]
    assert [len(found) for found in world.invalid] == [1 - rank, rank], "a failed load on that rank only"
    assert warm(world, "again") == WHOLE, "it was not saved again"
    both_clean(world, agent, far)


@SHAPES
@pytest.mark.parametrize("trouble", ["frozen", "killed"])
@pytest.mark.parametrize("struck", ["here", "far"])
def test_an_agent_that_is_away_costs_misses(
    worlds: Any, agent: AgentProcess, far: AgentProcess, shape: dict[str, Any], struck: str, trouble: str
) -> None:  # fmt: skip
    world = over(worlds, far, **shape)
    world.add("cold", PROMPT, 10)
    world.run()
    assert world.scheduler.reset_prefix_cache()
    other = agent if struck == "here" else far
    other.freeze() if trouble == "frozen" else other.kill()
    patience(world, BRIEF_S)
    for i in range(4):
        serve(world, f"away{i}", [i] * (i > 0) + PROMPT)
    assert world.side.counts.tokens_loaded == 0
    other.thaw() if trouble == "frozen" else other.start()
    patience(world, LONG_S)
    hits_again(world)
    both_clean(world, agent, far)


@pytest.mark.stops
@SHAPES
@pytest.mark.parametrize("struck", ["here", "far"])
def test_an_agent_that_stands_still_is_asked_no_more(
    worlds: Any, agent: AgentProcess, far: AgentProcess, shape: dict[str, Any], struck: str
) -> None:  # fmt: skip
    """Until it goes on, a request costs no wait: its look-up is answered with nothing at once."""
    world = over(worlds, far, **shape)
    world.add("cold", PROMPT, 10)
    world.run()
    assert world.scheduler.reset_prefix_cache()
    other = agent if struck == "here" else far
    other.freeze()
    world.add("first", PROMPT, 10)

    def noticed() -> bool:
        world.step()
        return bool(world.side.agent.silent)

    eventually(noticed, "an agent that is seen to stand still", HITS_S)
    world.settle()
    serve(world, "second", [7, *PROMPT])
    assert world.side.counts.tokens_loaded == 0
    other.thaw()
    hits_again(world)
    both_clean(world, agent, far)


@SHAPES
def test_blocks_that_another_node_may_write_to_are_not_reused(
    worlds: Any, agent: AgentProcess, far: AgentProcess, shape: dict[str, Any]
) -> None:  # fmt: skip
    """The far agent is stopped after its lease was given, and goes on with the load while other
    requests have been given all blocks that were free.
    """
    world = over(worlds, far, **shape)
    world.add("cold", PROMPT, 10)
    world.run()
    assert world.scheduler.reset_prefix_cache()
    world.add("struck", PROMPT, 10)
    tracked = world.side.requests["struck"]
    while not (tracked.asking.ticket is not None and tracked.asking.ticket.answers):
        world.step()
    far.freeze()
    while not world.side.counts.loads:
        world.step()
    patience(world, BRIEF_S)
    serve(world, "struck again", [7, *PROMPT])
    while "struck" not in world.reasons:
        world.step()
    assert (world.side.counts.loads, world.side.counts.loads_late) == (1, 1)
    assert world.side.blocks.loading == 6
    for i in range(10):
        serve(world, f"churn{i}", [40 + i, *PROMPT])
    running = [f"running{i}" for i in range(3)]
    for i, name in enumerate(running):
        world.add(name, [80 + i, *PROMPT], 60)
    while not all(world.outputs[name] for name in running):
        world.step()
    far.thaw()
    patience(world, LONG_S)
    world.run()
    hits_again(world)
    both_clean(world, agent, far)
    for name in ("struck", *running):
        start = len(world.sequences[name].prompt)
        assert world.outputs[name] == world.sequences[name].tokens[start : start + len(world.outputs[name])]


@SHAPES
def test_pins_go_when_the_prefix_cache_is_reset(
    worlds: Any, agent: AgentProcess, far: AgentProcess, shape: dict[str, Any]
) -> None:
    world = over(worlds, far, **shape)
    agent.freeze()
    far.freeze()
    patience(world, BRIEF_S)
    serve(world, "cold", PROMPT)
    assert world.side.blocks.saving
    assert world.scheduler.reset_prefix_cache()
    world.step()
    world.settle()
    agent.thaw()
    far.thaw()
    patience(world, LONG_S)
    world.run()
    assert (agent.status()["blocks_stored"], far.status()["blocks_stored"]) == (0, 0)
    hits_again(world)
    both_clean(world, agent, far)


def test_a_lease_that_comes_after_its_request_is_released(
    worlds: Any, agent: AgentProcess, far: AgentProcess
) -> None:  # fmt: skip
    world = over(worlds, far, extra={"lookup_age_ms": 60_000}, **TP)
    world.add("cold", PROMPT, 10)
    world.run()
    assert world.scheduler.reset_prefix_cache()
    given = far.status()["leases_given"]
    far.freeze()
    world.add("warm", PROMPT, 10)
    for _ in range(3):
        world.step()  # the question is at the frozen agent
    world.abort("warm")
    far.thaw()
    both_clean(world, agent, far)
    eventually(lambda: far.status()["leases_given"] == given + 1, "a lease for nobody")
    both_clean(world, agent, far)


@SHAPES
@pytest.mark.parametrize("trouble", ["frozen", "killed"])
def test_a_reset_that_one_agent_missed_precedes_its_next_answer(
    worlds: Any, agent: AgentProcess, keeping: AgentProcess, shape: dict[str, Any], trouble: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Even if it had no session at that time, and finds its pool again."""
    monkeypatch.setattr(agent_session, "RESET_S", 0.2)
    far = keeping
    world = over(worlds, far, **shape)
    world.add("cold", PROMPT, 10)
    world.run()
    assert far.status()["blocks_stored"] == 6
    if trouble == "frozen":
        far.freeze()
    else:
        far.kill()
        world.add("unnoticed", [5, 6, 7], 10)
        world.run()
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    world.add("away", PROMPT, 10)
    world.run()

    def forgotten() -> bool:  # by one that took longer than RESET_S, in its next session
        world.step()
        world.settle()
        return bool(agent.status()["blocks_stored"] == 0)

    eventually(forgotten, "a reset of the agent that is there", HITS_S)
    far.thaw() if trouble == "frozen" else far.start()
    together(world)
    assert far.status()["blocks_stored"] == 0, "blocks of before the reset can be found"
    assert warm(world, "anew") == 0
    hits_again(world)  # the reset may be heard of twice
    both_clean(world, agent, far)


@pytest.mark.parametrize("shape", [TP, PP, FOUR], ids=["tp2", "pp2-async", "tp2-pp2"])
def test_new_weights_are_new_on_all_nodes(
    worlds: Any, agent: AgentProcess, far: AgentProcess, shape: dict[str, Any]
) -> None:
    world = over(worlds, far, extra={"weights_fixed": False}, **shape)
    world.add("cold", PROMPT, 10)
    world.run()
    assert world.retrain(named=False)
    together(world)
    assert warm(world, "anew") == 0
    assert warm(world, "warm") == WHOLE
    both_clean(world, agent, far)


def test_parts_of_other_engines_do_not_share(worlds: Any, agent: AgentProcess, far: AgentProcess) -> None:
    """What a rank computes depends on what all others compute."""
    world = over(worlds, far, **TP)
    one = world.scheduler.connector._registration(Role.SCHEDULER, LOADED).identity
    other = world.workers[1]._registration(Role.SCHEDULER, LOADED).identity
    assert dict(one)["part"] == "ranks 0 to 0 of 2"
    assert dict(other)["part"] == "ranks 1 to 1 of 2"
    assert {key for key, _ in set(one) ^ set(other)} == {"part"}
    alone = worlds(extra=FIXED, **TP)
    assert "part" not in dict(alone.scheduler.connector._registration(Role.SCHEDULER, LOADED).identity)
    strange = worlds(others=[str(far.folder)], extra=FIXED, **TP)
    worker = strange.workers[1]
    worker._identity = tuple((key, "other" if key == "weights" else value) for key, value in worker._identity)
    strange.add("one", PROMPT, 10)
    strange.run()
    assert strange.outputs["one"] == strange.sequences["one"].tokens[100:110]
    assert strange.side is None
    assert "node 1 of the engine has another weights" in strange.scheduler.connector._uncached


def test_attention_backends_of_nodes_may_differ(
    worlds: Any, agent: AgentProcess, far: AgentProcess, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The scheduler registers with those of its own node, as the ranks there."""
    monkeypatch.setattr(calls, "used_backends", lambda config, *_: "others" * bool(config.parallel_config.node_rank))
    world = worlds(others=[str(far.folder)], extra=FIXED | {"pin_percent": 40}, **TP)
    world.add("first", [5, 6, 7], 10)
    world.run()
    assert dict(world.scheduler.connector._identity)["resolved"] != "others"
    assert "different values" not in caplog.text, "those of another node"
    together(world)
    assert warm(world, "cold") == 0
    assert warm(world, "warm") == WHOLE
    both_clean(world, agent, far)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"window": 40}, "windows or states"),
        ({"extra": {"share_tp": 2}}, "share_tp"),
        ({"extra": {"load_mode": "sync"}}, "load_mode sync"),
        ({"extra": {"offload": "lazy", "watermark_percent": 45}}, "offload lazy"),
        pytest.param({"eagle": True, "drafts": 3}, "speculative_config.method eagle", marks=SERVES_DRAFTS),
        ({"transfer": {"kv_role": "kv_producer"}}, "kv_role kv_producer"),
    ],
)
def test_what_is_not_served_over_nodes(worlds: Any, far: AgentProcess, more: dict[str, Any], why: str) -> None:
    world = worlds(others=[str(far.folder)], ranks=2, **more)
    assert world.side is None
    assert f"an engine over 2 nodes with {why}" in world.scheduler.connector._uncached
    world.add("one", PROMPT, 10)
    world.run()
    assert world.outputs["one"] == world.sequences["one"].tokens[100:110]
    assert far.status()["regions"] == 0
    more.setdefault("extra", {})["on_unsupported"] = "fail"
    with pytest.raises(Unsupported, match=why):
        worlds(others=[str(far.folder)], ranks=2, **more)


class Troubles:
    """Troubles of the two agents, one after another."""

    def __init__(self, world: World, agents: list[AgentProcess], dice: random.Random) -> None:
        self._world, self._agents, self._dice = world, agents, dice
        self.struck: Counter[str] = Counter()
        self._away: AgentProcess | None = None
        self._kind = ""
        self._ends = 0

    def step(self, *, arrived: bool) -> None:
        """Begin a trouble or end one: called between two steps."""
        if self._away is not None:
            if self._world.steps >= self._ends:
                self.end()
        elif arrived and self._dice.random() < (TROUBLED if complete(self._world) else TROUBLED_AGAIN):
            least = [(kind, i) for kind in KINDS for i in range(2)]
            kind, i = min(least, key=lambda one: (self.struck[f"{one[0]} {one[1]}"], self._dice.random()))
            if self._strike(kind, i):
                self.struck[f"{kind} {i}"] += 1

    def end(self) -> None:
        """End what lasts."""
        if self._away is not None:
            self._away.thaw() if self._kind == "freeze" else self._away.start()
            self._away = None
            patience(self._world, LONG_S)

    def done(self) -> bool:
        """Return whether each of them has struck each agent."""
        return all(self.struck[f"{kind} {i}"] for kind in KINDS for i in range(2))

    def _strike(self, kind: str, i: int) -> bool:
        if kind == "reset":
            self._world.settle()
            if not self._world._may_forget():
                return False
            return bool(self._world.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
        if kind == "reset of one":  # by another client: the engine learns of it from EPOCH alone
            link = self._world.workers[i]._worker._link.current()
            if link is None:
                return False
            with contextlib.suppress(KVAgentError):
                link.reset(PATIENCE_S)
            return True
        self._away, self._kind = self._agents[i], kind
        getattr(self._away, kind)()
        patience(self._world, BRIEF_S)
        self._ends = self._world.steps + self._dice.randrange(*STEPS)
        return True


@pytest.mark.parametrize("shape", [TP, PP, FOUR], ids=["tp2", "pp2-async", "tp2-pp2"])
def test_no_byte_is_wrong_whatever_happens_to_the_agents(
    worlds: Any, agent: AgentProcess, far: AgentProcess, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_session, "RESET_S", 0.2)
    seed = int(os.environ.get("KVAGENT_SEED", SEED))
    print("KVAGENT_SEED", seed)
    world = over(worlds, far, blocks=52, **shape)
    dice = random.Random(seed)
    troubles = Troubles(world, [agent, far], dice)
    heads = [[dice.randrange(5, 400) for _ in range(dice.randrange(100, 200))] for _ in range(4)]
    added = 0
    while not (troubles.done() and world.side.counts.loads >= LOADS and world.preempted):
        arrives = len(world.scheduler.requests) < ACTIVE and dice.random() < 0.5
        if arrives:
            tail = [dice.randrange(5, 400) for _ in range(dice.randrange(1, 60))]
            world.add(f"r{added}", dice.choice(heads) + tail, dice.randrange(1, 60))
            added += 1
        if world.scheduler.requests and dice.random() < 0.02:
            world.abort(dice.choice(list(world.scheduler.requests)))
        troubles.step(arrived=arrives)
        world.step()
    troubles.end()
    world.run()
    assert not world.gpu.bad, world.gpu.bad[:5]
    for name, sequence in world.sequences.items():
        output, start = world.outputs[name], len(sequence.prompt)
        assert output == sequence.tokens[start : start + len(output)], name
        assert len(output) == sequence.max_tokens or "abort" in world.reasons.get(name, "abort"), name
    print(f"{added} requests, {world.steps} steps, {dict(troubles.struck)}, {world.side.counts}")
    hits_again(world)
    both_clean(world, agent, far)
