"""What the connector touches of vLLM beyond its interface for connectors. No other module does.

What a feature uses is looked for at the start (``missing``): where something is not there, the
feature is off, and the reason is logged. ``kvagent-doctor`` looks for all of it.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import sys
import time
import traceback
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WEIGHTS = "noticing that weights change"
EVENTS = "waking an idle engine for KV events"
ADAPTERS = "LoRA adapters"
LAZY = "offload: lazy"
WAITS = "load_mode: sync and auto, layerwise"
USED = {
    WEIGHTS: "vllm.v1.engine.core.EngineCore collective_rpc reset_prefix_cache scheduler",
    EVENTS: """vllm.v1.engine.core.EngineCoreProc input_queue
vllm.v1.engine.core.EngineCoreRequestType WAKEUP""",
    ADAPTERS: """vllm.lora.worker_manager.WorkerLoRAManager _load_adapter lora_config
vllm.v1.request.Request _block_hasher""",
    LAZY: """vllm.v1.core.block_pool.BlockPool get_new_blocks free_block_queue
vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue remove prepend_n iter_blocks_after""",
    WAITS: """vllm.v1.core.sched.scheduler.Scheduler _preempt_request vllm_config requests running
vllm.v1.core.sched.scheduler.Scheduler prev_step_scheduled_req_ids kv_cache_manager
vllm.v1.core.kv_cache_manager.KVCacheManager block_pool coordinator cache_blocks
vllm.v1.core.block_pool.BlockPool evict_blocks
vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator single_type_managers
vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager req_to_blocks num_cached_block
vllm.v1.request.Request num_computed_tokens num_in_flight_tokens num_stale_output_tokens drop_stale_output""",
}
"""By feature: classes, and the members that are used of their objects."""
WITHHELD, _MARK = 1 << 40, "_kvagent"  # more blocks than a request has: vLLM takes all as hashed


def used(feature: str) -> list[tuple[str, str, list[str]]]:
    """Return the modules, classes and members that a feature uses."""
    lines = [line.split() for line in USED[feature].strip().splitlines()]
    return [(*names[0].rsplit(".", 1), names[1:]) for names in lines]  # type: ignore[misc]


def missing(feature: str) -> str:
    """Return what a feature uses and this vLLM does not have, or an empty string."""
    found = []
    for module, name, members in used(feature):
        try:
            has = _members(getattr(importlib.import_module(module), name))
            found += [f"{name}.{one}" for one in members if one not in has]
        except (ImportError, AttributeError):
            found.append(f"{module}.{name}")
    return f"this vLLM has no {', '.join(found)}" if found else ""


def _members(cls: type) -> set[str]:
    """Return the members of a class's objects: its own, and those that its constructors set."""
    made = [vars(one).get("__init__") for one in cls.__mro__]
    code = [one for init in made if inspect.isfunction(init) for one in dis.get_instructions(inspect.unwrap(init))]
    return {str(one.argval) for one in code if one.opname == "STORE_ATTR"} | set(dir(cls))


def constructing(kind: Callable[[Any], bool]) -> Any | None:
    """Return the object of a kind whose ``__init__`` this thread is running, or None: there an
    engine core makes its scheduler, and that its connector.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        found = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if found is not None and kind(found):
            return found
    return None


def replace(cls: Any, name: str, made: Callable[[Any], Any]) -> None:
    """Replace a method by what ``made`` makes of it, once. vLLM reads its signature."""
    method = getattr(cls, name)
    if not hasattr(method, _MARK):
        replaced = functools.wraps(method)(made(method))
        setattr(replaced, _MARK, True)
        setattr(cls, name, replaced)


def further_hashes(request: Any, of: Any) -> list[bytes]:
    """Return the block hashes that a request still lacks, with another one's tokens and keys."""
    return list(request._block_hasher(of))


def cpu_isa(*layer: Any) -> str:
    """Return the instruction set for which vLLM packs a layer's keys on CPUs."""
    return str(importlib.import_module("vllm.v1.attention.backends.cpu_attn")._get_attn_isa(*layer))


def registered(factory: Any) -> Any:
    """Return what loads each connector that a factory of vLLM's knows, by name."""
    return factory._registry


def connectors(core: Any) -> Iterator[Any]:
    """Yield the connectors of an engine core, also inside others; none while it is being made."""
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    yield from getattr(connector, "_connectors", [connector])


def waker(core: Any) -> Callable[[], None] | None:
    """Return what wakes the engine that is being made, or None if its steps are its caller's."""
    engine = constructing(lambda one: isinstance(one, core.EngineCoreProc))
    if engine is None or missing(EVENTS):
        return None

    def wake() -> None:
        queue = getattr(engine, "input_queue", None)
        if queue is not None:  # else the engine is still being made
            queue.put_nowait((core.EngineCoreRequestType.WAKEUP, None))

    return wake


def around(pool: Any, name: str, after: Callable[[Any], object], before: Callable[[], object] = lambda: None) -> None:
    """Call ``before`` before each call of a block pool's method, and ``after`` with its result:
    whether reset_prefix_cache succeeded, which free blocks get_new_blocks takes.
    """
    method = getattr(pool, name)

    def observed(*args: Any, **kwargs: Any) -> Any:
        before()
        result = method(*args, **kwargs)
        after(result)
        return result

    setattr(pool, name, observed)


def next_free(pool: Any, count: int) -> Iterator[Any]:
    """Yield the blocks that vLLM takes next, at most so many."""
    return islice(pool.free_block_queue.iter_blocks_after(None), count)


def put_back(pool: Any, blocks: Sequence[Any], count: int, older: Callable[[Any], bool]) -> None:
    """Put free blocks behind those at the head of the queue that are ``older``, of ``count``."""
    queue = pool.free_block_queue
    for block in blocks:
        queue.remove(block)
    first = list(takewhile(older, next_free(pool, count)))
    for block in first:
        queue.remove(block)
    queue.prepend_n([*first, *blocks])


class Scheduler:
    """vLLM's scheduler, for loads that a step waits for (guests.sync). Called from its thread."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def withhold(self, request: str, own: int) -> None:
        """Take a request's blocks from number ``own`` on out of the prefix cache; hash none."""
        manager = self._manager
        blocks = manager.req_to_blocks[request][own:]
        self._scheduler.kv_cache_manager.block_pool.evict_blocks({block.block_id for block in blocks})
        manager.num_cached_block[request] = WITHHELD

    def publish(self, request: str, own: int, *, now: bool = False) -> None:
        """Let the next step hash a request's blocks from number ``own`` on, or do it now."""
        if self._manager.num_cached_block.get(request) == WITHHELD:
            self._manager.num_cached_block[request] = own
        if now:
            one = self._scheduler.requests[request]
            self._scheduler.kv_cache_manager.cache_blocks(one, one.num_computed_tokens - one.num_in_flight_tokens)

    def preempt(self, request: str) -> bool:
        """Preempt a request and drop its output in flight. Return whether it was running."""
        scheduler = self._scheduler
        one = scheduler.requests.get(request)
        if one is None or one not in scheduler.running:
            return False
        scheduler.running.remove(one)
        scheduler._preempt_request(one, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request)  # as after a reset, for the model runner
        return True

    def drop_output(self, request: str) -> None:
        """Drop the output in flight of a request that vLLM has preempted itself."""
        one = self._scheduler.requests.get(request)
        if one is not None and one.num_stale_output_tokens:
            one.drop_stale_output = True

    @property
    def _manager(self) -> Any:
        return self._scheduler.kv_cache_manager.coordinator.single_type_managers[0]  # of the only group
