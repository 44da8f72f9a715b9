"""KV events of the tier: models of two routers, which hear the engine's stream, agree with the
agent's look-ups whenever the engine comes to rest. vLLM's own half tells of its region meanwhile.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.lookup import LookupClient, Request, Want
from tests.agent import eventually
from tests.vllm.routers import Routers, named
from tests.vllm.setting import BLOCK
from tests.vllm.test_kv_events import deep, random_prompt, small
from tests.vllm.test_tier_agent import there, tier
from tests.vllm.tiered import AT_ONCE, clean

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent import AgentProcess
    from tests.vllm.tiered import TieredWorld

__all__ = ["deep", "small"]
ROUNDS = 8


class Chunks:
    """The prompts that an engine has served, and what is held of them, in chunks of so many
    blocks.
    """

    def __init__(self, connector: Any, chunk: int = 1, block: int = BLOCK) -> None:
        """``connector``: vLLM's, in the scheduler. ``block``: tokens of a block."""
        self.hashes: dict[tuple[int, ...], list[bytes]] = {}
        """The block hashes of each prompt with its answer."""
        self._tier = connector.connector_scheduler.manager.secondary_tiers[0]
        self._chunk, self._size = chunk, chunk * block
        finish = connector.request_finished_all_groups

        def finished(request: Any, block_ids: Any) -> Any:
            if len(request.block_hashes) >= chunk:
                self.hashes[tuple(request.all_token_ids)] = list(request.block_hashes)
            return finish(request, block_ids)

        connector.request_finished_all_groups = finished

    def held(self) -> dict[tuple[int, ...], int]:
        """Return how many of the first chunks of each prompt the agent has."""
        session, size = self._tier._courier._loads.session, self._size
        if session is None:
            return dict.fromkeys(self.hashes, -1)
        client = LookupClient(session.registered.lookup_path, 10.0)
        try:
            found = {}
            for prompt, hashes in self.hashes.items():
                ends = hashes[self._chunk - 1 :: self._chunk]
                asked = Request(
                    version=session.limits.version, space=session.registered.space,
                    session=session.limits.session, want=Want.PROBE, tokens=len(ends) * size + 1,
                    deadline_us=10_000_000, groups=bytes([0]), hash_len=len(ends[0]), hashes=b"".join(ends),
                )  # fmt: skip
                found[prompt] = client.lookup(asked).tokens // size
            return found
        finally:
            client.close()

    def credited(self, routers: Routers) -> dict[tuple[int, ...], int]:
        """Return the same by routers."""
        return {prompt: routers.prefix(named(hashes)) // self._chunk for prompt, hashes in self.hashes.items()}


class Heard:
    """An engine with the tier, and the routers that hear it."""

    def __init__(self, tiered: Callable[..., TieredWorld], agent: AgentProcess, chunk: int = 1, **options: Any) -> None:
        self.routers = Routers(("STORAGE",))
        self.agent, self.chunk = agent, chunk
        sizes = {"blocks": 44, "rows": 30 // chunk, "chunk": chunk, "pace": AT_ONCE}
        self.world = tiered(tier(agent.folder), events=self.routers.take, **sizes | options)
        self.prompts = Chunks(self.world.scheduler.connector, chunk)
        self.requests = 0

    def serve(self, dice: random.Random, most: int = 4) -> None:
        for _ in range(dice.randint(1, most)):
            self.requests += 1
            self.world.add(f"r{self.requests}", random_prompt(dice), dice.randint(1, 3 * BLOCK))
        self.world.rest()

    def agree(self, *others: Heard) -> int:
        """Wait until routers and agent agree about every prompt. Return the number of blocks."""
        for other in others:
            self.prompts.hashes |= other.prompts.hashes

        def look() -> bool:
            self.world.step()
            return self.prompts.credited(self.routers) == self.prompts.held()

        eventually(look, "routers that agree with the agent", 60.0)
        self.world.rest()
        self.routers.check()
        return len(self.routers.known)

    def joined(self) -> None:
        def look() -> bool:
            self.world.step()
            return there(self.world) and self.world.tier.events._agent.session is not None

        eventually(look, "the tier at the agent", 60.0)


@pytest.mark.parametrize("chunk", [1, 2])
def test_routers_agree_with_the_agent(tiered: Any, small: AgentProcess, chunk: int) -> None:
    seed = int(os.environ.get("KVAGENT_SEED", random.randrange(1 << 30)))
    print(f"KVAGENT_SEED={seed}")
    dice = random.Random(seed)
    both = [Heard(tiered, small, chunk) for _ in range(2)]
    done: set[str] = set()
    rounds = evicted = 0
    while rounds < ROUNDS or len(done) < len(_BLOWS) or not evicted:
        rounds += 1
        removes = sum(one.routers.removes for one in both)
        for one in both:
            for _ in range(dice.randint(1, 3)):
                one.serve(dice)
        evicted += sum(one.routers.removes for one in both) - removes
        blow = dice.choice(sorted(_BLOWS))
        _BLOWS[blow](dice.choice(both), both)
        done.add(blow)
        for one in both:
            one.agree(*both)
    _forgotten(both[0], both)  # or what vLLM's region holds is not saved again
    both[0].serve(dice)
    for one in both:
        one.agree(*both)

    def alike() -> bool:
        for one in both:
            one.world.step()
        return both[0].routers.known == both[1].routers.known != {}

    eventually(alike, "two engines that tell of the same chunks", 60.0)
    clean(*(one.world for one in both))
    told = [(one.routers.stores, one.routers.removes, one.routers.clears) for one in both]
    print(f"{rounds} rounds, {evicted} evicted; stores, removes, clears: {told}")


def _cleared(one: Heard, both: list[Heard]) -> None:
    """vLLM forgets its own cache: routers forget all media."""
    one.world.rest()
    assert one.world.scheduler.reset_prefix_cache()


def _forgotten(one: Heard, both: list[Heard]) -> None:
    """vLLM forgets its own cache and its region."""
    assert one.world.forget()


def _killed(one: Heard, both: list[Heard]) -> None:
    one.agent.kill()
    for each in both:

        def silent(each: Heard = each) -> bool:
            each.world.step()
            return not each.routers.known

        eventually(silent, "routers that know of the agent's end", 60.0)
    one.agent.start()
    for each in both:
        each.joined()


def _nothing(one: Heard, both: list[Heard]) -> None: ...


_BLOWS: dict[str, Callable[[Heard, list[Heard]], None]] = {
    "nothing": _nothing, "cleared": _cleared, "forgotten": _forgotten, "killed": _killed,
}  # fmt: skip


def test_a_chunk_on_the_disk_is_told_once(tiered: Any, deep: AgentProcess) -> None:
    """It goes to the disk and leaves memory: for routers it stays where it was."""
    dice = random.Random(5)
    one = Heard(tiered, deep)
    for _ in range(6):
        one.serve(dice)
        one.agree()
    assert set().union(*one.routers.media.values()) == {"STORAGE"}
    assert deep.status()["blocks_saved"] > len(one.routers.known) // 2
    deep.end()
    deep.start()
    one.joined()
    assert one.agree() > 0, "what outlives the agent is told, with tokens that it has kept"


def test_other_weights_have_other_chunks(tiered: Any, small: AgentProcess) -> None:
    one = Heard(tiered, small)
    one.serve(random.Random(1))
    assert one.agree()
    tierling = one.world.tier
    tierling._generations._fixed = False
    one.world.rest()
    tierling.before_weights_call("a new version")
    one.joined()
    assert one.agree() == 0


def test_events_are_off_if_they_are_not_wanted(tiered: Any, small: AgentProcess) -> None:
    from vllm.config import KVEventsConfig

    routers = Routers(("STORAGE",))
    world = tiered(tier(small.folder, events="off"), events=routers.take)
    assert isinstance(world.config.kv_events_config, KVEventsConfig)
    world.prompt("r", random_prompt(random.Random(1)))
    assert world.heard.stored
    assert routers.stores == 0
    assert world.tier.events is None
    assert tiered(tier(small.folder)).tier.events is None
