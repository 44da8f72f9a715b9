"""The start of an engine's two parts: what they have to know before anything is registered.

Here without guests: what needs one is Unsupported. ``of`` is the one place where the core asks for
the guests' folder.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvagent.vllm.geometry import WITHOUT_DRAFTS, Part, Unsupported, part
from kvagent.vllm.hooks import Joined
from kvagent.vllm.options import LAZY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.registration import Registration
    from kvagent.vllm.geometry import Geometry, Identity, Ranks
    from kvagent.vllm.options import Options
    from kvagent.vllm.worker.guest import WorkerGuest
    from kvagent.vllm.worker.memory import ExtentsOf, Memory

GUESTS = "kvagent.vllm.guests"


class Start:
    """A start without guests, of an engine with vLLM's VllmConfig and KVCacheConfig."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.options = options
        """Those that hold for this engine; ``check`` may change them."""
        self.part: Part = part(vllm_config.parallel_config)
        """The node that this process is on."""

    def following(self) -> int:
        """Return Geometry.following. Raise Unsupported."""
        speculative = self.vllm_config.speculative_config
        if speculative is not None and speculative.method not in WITHOUT_DRAFTS:
            raise Unsupported(f"speculative_config.method {speculative.method}: {_MISSING}")
        return 0

    def check(self, geometry: Geometry, kv_role: str) -> None:  # noqa: ARG002
        """Raise Unsupported or OptionError if the engine cannot be served with its options."""
        options = self.options
        needs = {
            "a model with states": bool(geometry.states), "an engine over several nodes": self.part.count > 1,
            "share_tp, share_pp": bool(options.share_tp or options.share_pp),
            "offload: lazy": options.offload == LAZY, f"load_mode: {options.load_mode}": options.load_mode != "async",
        }  # fmt: skip
        if missing := [name for name, needed in needs.items() if needed]:
            raise Unsupported(f"{missing[0]}: {_MISSING}")

    def ranks(self, whole: Ranks) -> Ranks:
        """Return how the KV cache is distributed over workers, of an engine with ``whole``."""
        return whole

    def distribution(self) -> dict[str, str] | None:
        """Return the pairs of the identity that say which part of a block is in which shard, if
        they are not the parallel sizes.
        """
        return None

    def extents(self, rank: int) -> ExtentsOf | None:  # noqa: ARG002
        """Return what finds the extents of a worker's KV caches; None for the core's own."""
        return None

    def scheduler(self, geometry: Geometry, world: int, *, saves: bool) -> Joined:  # noqa: ARG002
        """Return the guests of the scheduler's side."""
        return Joined()

    def worker(
        self, memory: Memory, rank: int, registration: Callable[[], Registration],  # noqa: ARG002
        identity: Callable[[], Identity],  # noqa: ARG002
    ) -> Sequence[WorkerGuest]:  # fmt: skip
        """Return the guests of a worker. ``registration``: that of a scheduler in this node."""
        return ()


def of(vllm_config: Any, kv_cache_config: Any, options: Options) -> Start:
    """Return the start of an engine, with the guests that are installed."""
    if find_spec(GUESTS) is None:
        return Start(vllm_config, kv_cache_config, options)
    made: Start = import_module(f"{GUESTS}.start").GuestStart(vllm_config, kv_cache_config, options)
    return made


_MISSING = "the part of the connector that serves it is not installed"
