"""The real engine: its output with blocks from the agent equals its output when it computes
everything.

One engine serves all tests. Events in the middle of a load or an answer are triggered from the
worker's calls; a submitted load waits for the end of the step, so it is certainly in flight.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import AgentProcess, eventually
from tests.clients import NAMES, some_json, some_params
from tests.vllm import agents, kernels
from tests.vllm import engine as real
from tests.vllm.agents import figures
from tests.vllm.engine import PROMPTS, WHOLE_BLOCKS, documented

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine
ANSWER_S = 120.0  # for what takes a second or two on a machine with nothing else to do
MIDDLE = 12  # the step of an answer in which something happens
CLIENTS, FEW = 96, 8  # requests of clients, and tokens of each answer


class Alive:
    """The engine and its agent."""

    def __init__(self, llm: Any, agent: AgentProcess) -> None:
        self.llm = llm
        self.agent = agent
        self.side, self.worker = real.sides(llm)

    def says(self) -> list[list[int]]:
        begin = time.monotonic()
        said = real.generate(self.llm, PROMPTS)
        assert time.monotonic() - begin < ANSWER_S
        return said

    def joined(self) -> None:
        """Wait until the engine is at the running agent; a step lets it notice that the last one is
        gone.
        """
        agents.joined(self.side, [self.worker], self.agent, lambda: real.generate(self.llm, [[5, 6, 7]], 1))

    def forget(self) -> None:
        """Reset the engine's cache. A load that was given up holds its blocks until its fence,
        which a step notices.
        """
        real.settle(self.llm)
        eventually(self.llm.reset_prefix_cache, "an engine without blocks")

    def fill(self, reference: list[list[int]]) -> None:
        """Store all prompts in the agent, and reset the engine."""
        self.joined()
        for _ in range(2):
            assert self.says() == reference
            self.forget()

    def once(self, call: str, condition: Callable[[Any], bool], act: Callable[[], None]) -> list[str]:
        """Call ``act`` once, after a call of the worker with a plan that meets the condition.

        Return its result.
        """
        happened: list[str] = []
        method = getattr(self.worker, call)

        def called(plan: Any) -> None:
            method(plan)
            if not happened and condition(plan):
                happened.append(call)
                act()

        setattr(self.worker, call, called)
        return happened

    def never(self) -> None:
        """Undo ``once``."""
        for call in ("begin", "start", "end"):
            self.worker.__dict__.pop(call, None)


@pytest.fixture(scope="module")
def alive(opt: Path, reference: list[list[int]], node: AgentProcess) -> Iterator[Alive]:
    llm = real.make_engine(opt, str(node.folder))
    yield Alive(llm, node)
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.every_version
def test_cold_and_warm(alive: Alive, reference: list[list[int]]) -> None:
    assert alive.says() == reference
    real.settle(alive.llm)
    cold = alive.agent.status()
    assert cold["blocks_stored"] > 0
    assert cold["blocks_loaded"] == 0
    alive.forget()
    assert alive.says() == reference
    warm = int(alive.agent.status()["blocks_loaded"])
    assert warm * 2 >= WHOLE_BLOCKS
    print(f"warm: {warm} of {WHOLE_BLOCKS} whole blocks of prompts loaded; {figures(alive.agent)}")
    alive.forget()


def test_a_second_engine_whose_core_is_a_process_of_its_own(
    alive: Alive, reference: list[list[int]], opt: Path
) -> None:
    """Scheduler, worker and LLM are in processes of their own, as under `vllm serve`.

    It loads what the first engine saved, and its log and metrics say so.
    """
    alive.fill(reference)
    before = int(alive.agent.status()["blocks_loaded"])
    # The stand-ins come to the other process as the connector does, by an entry point.
    command = [sys.executable, "-m", "tests.vllm.engine", str(opt), str(alive.agent.folder)]
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONPATH": os.pathsep.join([str(kernels.plugin()), os.environ.get("PYTHONPATH", "")]),
    }
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"said"')))
    assert told["said"] == reference
    assert set(told["before"]) == set(told["after"]) == documented()
    assert set(told["before"].values()) == {0}
    assert told["after"]["vllm:kvagent_tokens_loaded"] > 0
    assert told["after"]["vllm:kvagent_worker_loaded"] > 0
    lines = [line for line in (run.stdout + run.stderr).splitlines() if "registered at" in line]
    for process, part in (("EngineCore", "scheduler"), ("Worker", "rank 0")):
        form = rf".*{process}\S* pid=\d+\) INFO \d\d-\d\d .*\[link.py:\d+\] kvagent: {part}: registered at .*"
        assert len([line for line in lines if re.fullmatch(form, line)]) == 1, lines
    second = int(alive.agent.status()["blocks_loaded"]) - before
    assert second * 2 >= WHOLE_BLOCKS
    print(f"second engine: {second} of {WHOLE_BLOCKS} whole blocks of prompts loaded; {figures(alive.agent)}")


@pytest.mark.stops
@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("when", ["load", "answer"])
def test_an_agent_that_goes_in_the_middle(alive: Alive, reference: list[list[int]], when: str, how: str) -> None:
    alive.fill(reference)
    steps = iter(range(1 << 30))
    client = alive.side.agent.lookups._client
    deadline_s, alive.side.loads._deadline_s = alive.side.loads._deadline_s, 0.3
    age_s, client.timeout_s = client.timeout_s, 0.5
    go = getattr(alive.agent, how)
    if when == "load":
        happened = alive.once("start", lambda plan: bool(plan.loads), go)
    else:
        happened = alive.once("end", lambda _: next(steps) == MIDDLE, go)
    try:
        assert alive.says() == reference
        assert happened, "nothing happened in the middle"
        assert alive.side.blocks.loading == 0 or how == "freeze", "pins without a fence to come"
        assert alive.says() == reference
        assert alive.llm.reset_prefix_cache() or how == "freeze"
        assert alive.says() == reference
    finally:
        alive.never()
        alive.side.loads._deadline_s, client.timeout_s = deadline_s, age_s
        alive.agent.start() if how == "kill" else alive.agent.thaw()
    assert alive.says() == reference
    print(f"{how} in the middle of a {when}: {dict(vars(alive.side.counts))}")


def test_an_agent_killed_and_started_again_hits_again(alive: Alive, reference: list[list[int]]) -> None:
    alive.fill(reference)
    alive.agent.kill()
    assert alive.says() == reference
    stored = alive.side.counts.saves_stored
    alive.agent.start()
    begin = time.monotonic()

    def hit() -> bool:
        alive.llm.reset_prefix_cache()
        assert real.generate(alive.llm, PROMPTS[:1], 2) == [reference[0][:2]]
        return bool(alive.agent.status()["blocks_loaded"])

    eventually(hit, "a hit since the agent came back", ANSWER_S)
    soon_s = time.monotonic() - begin
    kept = real.keeps_its_pool()
    assert alive.side.counts.saves_stored == stored or not kept, "the pool had not survived"
    print(f"first hit {soon_s:.2f} s after the agent's return, {'from the pool it kept' if kept else 'after a save'}")
    assert alive.says() == reference


def some_arguments(dice: random.Random, number: int) -> dict[str, Any]:
    """Return ``vllm_xargs`` of a client, of which ``kv_transfer_params`` are a part."""
    given = {name: some_json(dice) for name in dice.sample(NAMES, dice.randrange(3))}
    return given if dice.random() < 0.1 else given | {"kv_transfer_params": some_params(dice, number)}


@pytest.mark.every_version
def test_whatever_clients_send_their_requests_run(alive: Alive, reference: list[list[int]]) -> None:
    """Values of every JSON type in every parameter that the connector reads. What vLLM itself
    refuses does not reach its core.
    """
    from vllm import SamplingParams

    alive.joined()
    seed = int(os.environ.get("KVAGENT_SEED") or random.SystemRandom().randrange(1 << 32))  # vLLM seeds random
    print(f"seed {seed} of what clients send")
    dice, engine = random.Random(seed), alive.llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    asked: dict[str, int] = {}
    for number in range(CLIENTS):
        which, name = dice.randrange(len(PROMPTS)), dice.choice(("{}", "cmpl-{}-3", "2_{}", "{}-0123abcd", "\u00e9{}"))
        request = name.format(number)
        prompt = {"prompt_token_ids": PROMPTS[which]} | dice.choice(({}, {"cache_salt": "\u00e9"}))
        with contextlib.suppress(Exception):  # of vLLM, before its core
            params = SamplingParams(
                temperature=0.0, max_tokens=FEW, ignore_eos=True, detokenize=False,
                extra_args=some_arguments(dice, number), skip_reading_prefix_cache=dice.choice((None, True, False)),
            )  # fmt: skip
            engine.add_request(request, prompt, params)
            asked[request] = which
        assert len(scheduler.requests) == len(asked), "what was refused reached the core"
    ended: dict[str, int] = {}
    while engine.has_unfinished_requests():
        for one in engine.step():
            if one.finished:
                assert list(one.outputs[0].token_ids) == reference[asked[one.request_id]][:FEW], one.request_id
                ended[one.request_id] = asked[one.request_id]
    assert ended == asked
    assert scheduler.connector.errors.counts.errors == 0
    assert alive.side.counts.switches_ignored > 0
    assert len(asked) > CLIENTS // 2
    alive.forget()
    alive.fill(reference)
    loaded = alive.side.counts.tokens_loaded
    assert alive.says() == reference
    assert alive.side.counts.tokens_loaded > loaded, "a good request finds nothing"
    print(f"{len(asked)} requests ran, vLLM refused {CLIENTS - len(asked)}; {dict(vars(alive.side.counts))}")
