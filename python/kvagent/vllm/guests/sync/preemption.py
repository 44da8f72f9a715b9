"""vLLM's scheduler, as far as loads that a step waits for need it.

vLLM hashes the blocks of such a load when it allocates them, so other requests hit them before
their bytes are there, and it recovers from a failed one by recomputing in place. That gives wrong
tokens: with async scheduling the next step is already in flight, and its output is delivered; and
the other requests are not told. So the blocks are withheld from the prefix cache until their load
has succeeded, and a request whose load failed is preempted like one for which blocks are scarce:
vLLM then drops the output in flight and computes the request anew, in all versions and runners.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

WITHHELD = 1 << 40  # more blocks than a request has: vLLM takes all of them as hashed

# What Preemption uses. The connector exists before the scheduler has these objects: their classes
# are looked at.
_OF_THE_SCHEDULER = (
    "_preempt_request", "vllm_config", "requests", "running", "prev_step_scheduled_req_ids", "kv_cache_manager",
)  # fmt: skip
_OF_OTHERS = (
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", ("block_pool", "coordinator", "cache_blocks")),
    ("vllm.v1.core.block_pool", "BlockPool", ("evict_blocks",)),
    ("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator", ("single_type_managers",)),
    (
        "vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager",
        ("req_to_blocks", "num_cached_block"),
    ),
    (
        "vllm.v1.request", "Request",
        ("num_computed_tokens", "num_in_flight_tokens", "num_stale_output_tokens", "drop_stale_output"),
    ),
)  # fmt: skip


def found() -> Any | None:
    """Return the scheduler whose ``__init__`` this thread is running, or None.

    It creates its connector there, and the connector gets no reference to it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        one = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if hasattr(one, "_preempt_request") and hasattr(one, "update_from_output"):
            return one
        frame = frame.f_back
    return None


def unsupported(scheduler: Any | None, connector: str) -> str:
    """Return why a scheduler cannot preempt such a request, or an empty string.

    ``connector``: the name under which vLLM knows this one.
    """
    if scheduler is None:
        return "vLLM's scheduler is not accessible"
    if missing := _missing(type(scheduler)):
        return f"this vLLM has no {', '.join(missing)}"
    if scheduler.vllm_config.kv_transfer_config.kv_connector != connector:
        return "another connector could save what is computed before a load has succeeded"
    if "drop_stale_output" not in inspect.signature(scheduler._preempt_request).parameters:
        return "this vLLM cannot drop the output of a preempted request"
    return ""


def _missing(scheduler: type) -> list[str]:
    """Return what Preemption uses and a scheduler, or what it consists of, does not have."""
    missing = [f"{scheduler.__name__}.{name}" for name in _OF_THE_SCHEDULER if name not in _members(scheduler)]
    for module, name, used in _OF_OTHERS:
        try:
            members = _members(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError):
            missing.append(f"{module}.{name}")
            continue
        missing += [f"{name}.{one}" for one in used if one not in members]
    return missing


def _members(cls: type) -> set[str]:
    """Return the members of a class's objects: its own, and those that its constructors set."""
    made = [vars(one).get("__init__") for one in cls.__mro__]
    code = [one for init in made if inspect.isfunction(init) for one in dis.get_instructions(inspect.unwrap(init))]
    stored = {str(one.argval) for one in code if one.opname == "STORE_ATTR"}
    return stored | set(dir(cls))


class Preemption:
    """The scheduler. Its methods are called from its thread, between two uses of its state."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def withhold(self, request: str, own: int) -> None:
        """Take the request's blocks from number ``own`` on out of the prefix cache, and let no step
        hash any.
        """
        manager = self._manager
        blocks = manager.req_to_blocks[request][own:]
        self._scheduler.kv_cache_manager.block_pool.evict_blocks({block.block_id for block in blocks})
        manager.num_cached_block[request] = WITHHELD

    def publish(self, request: str, own: int) -> None:
        """Let the next step hash the request's blocks from number ``own`` on."""
        if self._manager.num_cached_block.get(request) == WITHHELD:
            self._manager.num_cached_block[request] = own

    def publish_now(self, request: str, own: int) -> None:
        """Hash them at once, since there is no next step."""
        self.publish(request, own)
        one = self._scheduler.requests[request]
        self._scheduler.kv_cache_manager.cache_blocks(one, one.num_computed_tokens - one.num_in_flight_tokens)

    def preempt(self, request: str) -> bool:
        """Preempt a running request and drop its output in flight.

        Return whether it was running.
        """
        scheduler = self._scheduler
        one = scheduler.requests.get(request)
        if one is None or one not in scheduler.running:
            return False
        scheduler.running.remove(one)
        scheduler._preempt_request(one, time.monotonic(), drop_stale_output=True)
        # As after a reset: it was not scheduled in the step before, for the model runner.
        scheduler.prev_step_scheduled_req_ids.discard(request)
        return True

    def drop_output(self, request: str) -> None:
        """Drop the output in flight of a request that vLLM has preempted itself."""
        one = self._scheduler.requests.get(request)
        if one is not None and one.num_stale_output_tokens:
            one.drop_stale_output = True

    @property
    def _manager(self) -> Any:
        """The manager of the only group."""
        return self._scheduler.kv_cache_manager.coordinator.single_type_managers[0]
