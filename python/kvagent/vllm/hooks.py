"""Where guests plug into the connector (docs/ARCHITECTURE.md, "Core and guests").

A guest keeps its own state, by request, and hears of requests, plans and reports by six hooks. The
core names no guest: what it needs of one is a seam here, with the core's own answer as its default.
``of`` is the one place where the core asks for the guests' folder; what needs a guest that is not
there is Unsupported.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvagent.vllm.geometry import WITHOUT_DRAFTS, Part, Unsupported, part
from kvagent.vllm.options import LAZY
from kvagent.vllm.scheduler.agent_session import AgentSession
from kvagent.vllm.scheduler.saves import Saves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvagent.registration import Registration
    from kvagent.session import Session
    from kvagent.vllm.geometry import Geometry, Identity, Ranks
    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import LoadJob, Report, SaveJob, StepPlan
    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.saves import SaveRun
    from kvagent.vllm.scheduler.side import SchedulerSide
    from kvagent.vllm.worker.memory import ExtentsOf, Memory
    from kvagent.vllm.worker.side import WorkerSide
    from kvagent.wire import Packed


class Reset(enum.Enum):
    """What voids something of what a guest knows."""

    WEIGHTS = enum.auto()
    """What was computed so far depends on old weights, or belongs to another epoch."""
    CACHE = enum.auto()
    """vLLM has reset its prefix cache."""
    ENDED = enum.auto()
    """The session has ended."""
    BEGAN = enum.auto()
    """There is a new session, whose agent may have no blocks."""


class Guest:
    """A guest of the scheduler's side. Its hooks are called from vLLM's thread, and do not wait."""

    side: SchedulerSide

    def begin(self, side: SchedulerSide, manager: Any) -> None:  # noqa: ARG002
        """Take the side that has just been made, and vLLM's KV cache manager."""
        self.side = side

    def seen(self, tracked: Tracked) -> None:
        """A request has arrived. The guest may key its blocks otherwise, or bar it."""

    def named(self, tracked: Tracked, group: int, first: int, blocks: int) -> None:
        """So many blocks of a group from a request's ``first`` on are to be saved or loaded."""

    def planned(self, plan: StepPlan, output: Any, now: float) -> None:
        """A step was planned, but for its saves. ``output`` is vLLM's."""

    def heard(self, report: Report, over: Sequence[tuple[Sequence[SaveRun], bytes]], now: float) -> None:
        """A report was handled, with which these saves were over: runs, and statuses of blocks."""

    def ended(self, tracked: Tracked) -> dict[str, Any] | None:  # noqa: ARG002
        """A request has ended, and its last blocks were added to the next saves. Return what its
        answer is to say in ``kv_transfer_params``.
        """
        return None

    def reset(self, what: Reset) -> None:
        """Something known is void."""

    def busy(self) -> bool:
        """Return whether steps are needed without requests."""
        return False

    def close(self) -> None:
        """The side leaves the agent."""


class Waits:
    """Which loads their step waits for. The core's are all asynchronous."""

    def may(self, tracked: Tracked, tokens: int) -> bool:  # noqa: ARG002
        """Return whether the step that admits a request may wait for a load of so many tokens."""
        return False

    def start(self, job: int, tracked: Tracked, tokens: int) -> None:
        """Let a step wait for a request's load, or for another job in its place."""

    def lost(self, tracked: Tracked) -> None:
        """A request has lost its blocks before the outcome of its load is known."""

    def over(self, tracked: Tracked, *, normally: bool) -> bool:  # noqa: ARG002
        """A request has ended. Return whether that shows that its load has succeeded."""
        return False

    def settle(self, report: Report, world: int) -> Iterable[tuple[Tracked, bool]]:  # noqa: ARG002
        """Return the requests whose load was waited for and is over, and whether it succeeded."""
        return ()


@dataclass(slots=True)
class Joined:
    """What guests an engine has, and what they replace of the core."""

    guests: list[Guest] = field(default_factory=list)
    answered: frozenset[str] = frozenset()
    """Of KEYED, the attributes that a request may have without a guest that keys it by them."""
    session: Callable[..., AgentSession] = AgentSession
    saves: Callable[..., Saves] = Saves
    waits: Waits = field(default_factory=Waits)
    attached: Callable[[], None] | None = None
    """Is called, from another thread, when there is a session."""


class WorkerGuest:
    """A guest of a worker's side. Its hooks are called from the worker's thread."""

    name = ""
    """Under which the scheduler's guest hears its news."""
    side: WorkerSide

    def join(self, side: WorkerSide) -> None:
        """Take the side."""
        self.side = side

    def begin(self, plan: StepPlan) -> None:
        """A step begins, before its kernels are launched."""

    def serves(self, job: SaveJob | LoadJob) -> bool:  # noqa: ARG002
        """Return whether what a job depends on is there: before it is sent, and at a load's end."""
        return True

    def start(self, plan: StepPlan, loads: Sequence[LoadJob]) -> Sequence[LoadJob]:  # noqa: ARG002
        """Begin loads in the guest's own way. Return the others."""
        return loads

    def send(
        self, session: Session, load: LoadJob, sections: Packed, *, step: int, event: int  # noqa: ARG002
    ) -> int | None:  # fmt: skip
        """Send a part of a load in the guest's own way. Return the job's number in the session, or
        None: it is not for this guest.
        """
        return None

    def layer(self, name: str) -> None:
        """A layer is about to read its KV cache."""

    def heard(self) -> None:
        """The agent has sent something, or a session of it has ended."""

    def over(self, job: int) -> None:
        """A load is over."""

    def end(self) -> None:
        """The step's kernels are launched, or its results are asked for."""

    def news(self) -> tuple[Any, ...]:
        """Return what the scheduler's guest has to learn since the last call."""
        return ()

    def moved(self) -> None:
        """The weights' generation has changed."""

    def close(self) -> None:
        """The worker leaves the agent."""


GUESTS = "kvagent.vllm.guests"


class Start:
    """The start of an engine with vLLM's VllmConfig and KVCacheConfig. Here it has no guests."""

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

    def distribution(self, whole: Ranks) -> tuple[Ranks, dict[str, str] | None]:
        """Return how an engine's KV cache is distributed over workers, and the pairs of the
        identity that say it, if they are not the parallel sizes.
        """
        return whole, None

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
