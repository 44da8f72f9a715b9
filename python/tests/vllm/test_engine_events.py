"""The real engine publishes what the agent's memory holds: models of two routers, which hear
nothing else, agree with the agent's look-ups.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import AgentProcess, eventually
from tests.vllm import agents
from tests.vllm import engine as real
from tests.vllm.engine import BLOCK, PROMPTS
from tests.vllm.idle import IdleEngine
from tests.vllm.routers import Prompts, Subscribed, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.engine
SMALL = ("--pool", "4MiB")  # memory for fewer blocks than a run stores
ROUNDS = 12
SILENT = {"enable_kv_cache_events": True, "publisher": "null"}  # so that the engine says the tokens
HELD = len({tuple(one[: end + BLOCK]) for one in PROMPTS for end in range(0, len(one) - BLOCK, BLOCK)})
"""The least number of blocks that are saved of PROMPTS."""
OPENINGS = 6  # different first blocks of prompts


class Stage:
    """An engine with events, its agent, and the routers that hear it."""

    def __init__(self, model: Path, agent: AgentProcess, folder: Path) -> None:
        endpoint = f"ipc://{folder}/events"
        self.model = model
        self.agent = agent
        self.routers = Subscribed(endpoint)
        self.llm = real.make_engine(model, str(agent.folder), kv_events_config=events_config(endpoint))
        self.side, self.worker = real.sides(self.llm)
        self.prompts = Prompts(self.side, BLOCK)
        others = other_prompts()
        while not self.routers.hear():  # until they are subscribed, each new block is told in vain
            real.generate(self.llm, [next(others)], 1)
        self.reset()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self.routers.close()

    def clear(self) -> None:
        """Empty the engine's own cache: routers forget all media."""
        real.settle(self.llm)
        assert self.llm.reset_prefix_cache()

    def reset(self) -> None:
        """Empty the engine's own cache and the agent's memory."""
        real.settle(self.llm)
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def step_until(self, check: Any, what: str) -> None:
        def look() -> bool:
            self.llm.llm_engine.step()
            self.routers.hear()
            return bool(check())

        eventually(look, what, 60.0)

    def agree(self) -> int:
        """Wait until all is saved, and routers and agent agree about every prompt. Return the
        number of blocks.
        """
        real.settle(self.llm)
        self.step_until(
            lambda: self.prompts.credited(self.routers) == self.prompts.held(), "routers that agree with the agent"
        )
        self.routers.check()
        return len(self.routers.known)


def other_prompts() -> Iterator[list[int]]:
    """Yield prompts of one block each, all different."""
    return ([20 + n // 400 % 400] + [20 + n % 400] * (BLOCK - 1) for n in itertools.count())


def events_config(endpoint: str) -> Any:
    from vllm.config import KVEventsConfig

    return KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)


@pytest.fixture(scope="module")
def stage(opt: Path) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="kvagent-") as name:
        folder = Path(name) / "run"
        folder.mkdir(mode=0o700)
        agent = AgentProcess(folder, *SMALL)
        made = Stage(opt, agent, Path(name))
        yield made
        made.close()
        agent.close()


def test_routers_know_what_the_agent_holds(stage: Stage) -> None:
    real.generate(stage.llm, PROMPTS)
    assert stage.agree() >= HELD
    stage.prompts.check_tokens(stage.routers)
    before = stage.routers.stores
    real.generate(stage.llm, PROMPTS)
    stage.agree()
    assert stage.routers.removes == 0
    assert stage.routers.stores - before < BLOCK, "told twice"


def test_after_all_blocks_are_cleared_everything_is_told_again(stage: Stage) -> None:
    real.generate(stage.llm, PROMPTS)
    held = stage.agree()
    stage.clear()
    stage.step_until(lambda: stage.routers.clears and len(stage.routers.known) == held, "all of it again")
    assert stage.agree() == held


def test_a_reset_of_the_connector_removes_everything(stage: Stage) -> None:
    real.generate(stage.llm, PROMPTS)
    assert stage.agree()
    stage.reset()
    assert stage.agree() == 0


def test_a_salt_is_told_with_the_first_block(stage: Stage) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    prompt = [(i * 5) % 400 + 20 for i in range(3 * BLOCK)]
    stage.llm.generate({"prompt_token_ids": prompt, "cache_salt": "of a tenant"}, params, use_tqdm=False)
    stage.agree()
    (hashes,) = [hashes for tokens, hashes in stage.prompts.hashes.items() if list(tokens[: len(prompt)]) == prompt]
    assert [stage.routers.salts[one] for one in named(hashes)] == [["of a tenant"], None, None]


def test_another_engines_blocks_are_told_too(stage: Stage) -> None:
    stage.reset()
    assert stage.agree() == 0
    real.run_elsewhere(stage.model, stage.agent.folder, kv_events_config=SILENT)
    stage.step_until(lambda: len(stage.routers.known) >= HELD, "the other engine's blocks")
    stage.agree()


@pytest.mark.stops
def test_a_random_run(stage: Stage) -> None:
    seed = int(os.environ.get("KVAGENT_SEED", random.randrange(1 << 30)))
    print(f"KVAGENT_SEED={seed}")
    dice = random.Random(seed)
    done: set[str] = set()
    removed = stage.routers.removes
    rounds = 0
    while rounds < ROUNDS or len(done) < len(_BLOWS) or stage.routers.removes == removed:
        rounds += 1
        for _ in range(dice.randint(1, 3)):
            real.generate(stage.llm, [_prompt(dice) for _ in range(dice.randint(1, 4))], dice.randint(1, 2 * BLOCK))
        blow = dice.choice(list(_BLOWS))
        _BLOWS[blow](stage)
        done.add(blow)
        stage.agree()
    told = f"{stage.routers.stores} stores, {stage.routers.removes} removes"
    print(f"{rounds} rounds: {told}; {agents.figures(stage.agent)}")


def _prompt(dice: random.Random) -> list[int]:
    head = [(dice.randrange(OPENINGS) * 31 + i) % 400 + 20 for i in range(dice.randint(1, 4) * BLOCK)]
    return head + [dice.randrange(20, 420) for _ in range(dice.randint(1, 8 * BLOCK))]


def _killed(stage: Stage) -> None:
    stage.agent.kill()
    stage.step_until(lambda: not stage.routers.known, "routers that know of the agent's end")
    stage.agent.start()
    agents.joined(stage.side, [stage.worker], stage.agent, stage.llm.llm_engine.step)


_BLOWS = {"none": lambda _: None, "cleared": Stage.clear, "reset": Stage.reset, "killed": _killed}


@pytest.mark.stops
def test_an_idle_engine_tells_what_happens_without_it(opt: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvagent-") as name:
        folder = Path(name) / "run"
        folder.mkdir(mode=0o700)
        endpoint = f"ipc://{name}/events"
        routers, agent = Subscribed(endpoint), AgentProcess(folder)
        engine = IdleEngine(opt, folder, endpoint)

        def hear(check: Callable[[], Any], what: str) -> None:
            eventually(lambda: routers.hear() * 0 or check(), what, 60.0)

        try:
            others = other_prompts()
            while not routers.hear():  # until it is subscribed, each new block is told in vain
                engine.order("generate", [next(others)])
            engine.order("clear")
            engine.order("generate", PROMPTS)
            hear(lambda: len(routers.known) >= HELD, "the blocks that it saved")
            agent.kill()
            hear(lambda: not routers.known, "the end of the agent")
            agent.start()
            real.run_elsewhere(opt, folder, kv_events_config=SILENT)
            hear(lambda: len(routers.known) >= HELD, "what another engine saved")
            print(f"idle: {routers.stores} stores, {routers.removes} removes")
        finally:
            engine.close()
            agent.close()
            routers.close()
