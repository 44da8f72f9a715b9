"""Requests with keys of the connector's own, under every hash algorithm of vLLM's: keys and hashes
have one length in each.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

import pytest
from vllm.config.cache import PrefixCachingHashAlgo
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from kvagent.vllm.guests.adapters import ADAPTERS, Adapters, LoadedAdapter
from kvagent.vllm.hooks import WorkerGuest
from tests.vllm import world as world_module
from tests.vllm.setting import BLOCK
from tests.vllm.test_media import PROMPT, WHOLE, item, see, seeing  # noqa: F401
from tests.vllm.test_tails import prompt
from tests.vllm.world import World, clean

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent import AgentProcess

MODULES = {"xxhash": "xxhash", "cbor": "cbor2"}
LONG = 60  # blocks of a prompt whose last ones are saved after its end


def function(algorithm: str) -> Callable[[Any], bytes]:
    """Return vLLM's function, or one of its length where a module of it is not installed."""
    missing = [module for part, module in MODULES.items() if part in algorithm and not find_spec(module)]
    length = 16 if "xxhash" in algorithm else 32
    return (lambda value: sha256(value)[:length]) if missing else get_hash_fn_by_name(algorithm)


def media(world: World, name: str) -> int:
    see(world, name, item(1, offset=3 * BLOCK + 4))
    return WHOLE


def adapter(world: World, name: str) -> int:
    news = [(LoadedAdapter(1, 1, b"d" * 32),)]
    if not any(isinstance(one, Adapters) for one in world.side.guests):
        adapters = Adapters(1)
        adapters.begin(world.side, None)
        world.side.guests.append(adapters)
    one: Any = WorkerGuest()
    one.name = ADAPTERS
    one.news = lambda: news.pop() if news else ()
    world.workers[0]._worker.guests = [one]
    world.add(name, PROMPT, 4, lora_request=LoRARequest("adapter", 1, "/nowhere"))
    return WHOLE


def drafts(world: World, name: str) -> int:
    world.add(name, PROMPT, 4)
    return WHOLE


def tail(world: World, name: str) -> int:
    world.add(name, prompt(1, LONG), 1)
    return LONG * BLOCK


KINDS: dict[Any, dict[str, Any]] = {
    media: {}, adapter: {}, drafts: {"eagle": True, "drafts": 3, "blocks": 128},
    tail: {"blocks": 512, "max_batched": 2048, "extra": {"save_decode": False}},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("algorithm", get_args(PrefixCachingHashAlgo))
def test_what_was_saved_is_loaded(
    seeing: Any,  # noqa: F811
    agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, algorithm: str, kind: Any,
) -> None:  # fmt: skip
    if kind is drafts and not hasattr(ActiveKVConnector, "finalize_step"):
        pytest.skip("refused: saves do not wait for the draft model's pass")
    monkeypatch.setattr(world_module, "sha256", function(algorithm))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    world = seeing(**KINDS[kind])
    kind(world, "cold")
    world.run()
    assert world.scheduler.reset_prefix_cache()
    whole = kind(world, "warm")
    world.run()
    assert world.outputs["warm"] == world.outputs["cold"]
    assert world.side.counts.tokens_loaded == whole
    assert world.scheduler.connector.errors.counts.errors == 0
    clean(world, agent)
