"""Where guests plug into the scheduler's side (docs/ARCHITECTURE.md, "Core and guests").

A guest keeps its own state, by request, and hears of requests, plans and reports by six hooks. The
core names no guest: what it needs of one is a seam here, with the core's own answer as its default.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvagent.vllm.scheduler.agent_session import AgentSession
from kvagent.vllm.scheduler.save_plan import SaveBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvagent.vllm.plan import Report, StepPlan
    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.save_plan import SaveRun
    from kvagent.vllm.scheduler.side import SchedulerSide


class Reset(enum.Enum):
    """What voids something of what a guest knows."""

    WEIGHTS = enum.auto()
    """What was computed so far depends on old weights, or belongs to another epoch."""
    BEGINS = enum.auto()
    """vLLM is about to reset its prefix cache, and has released requests for that."""
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
        """So many blocks of a request's group from the block ``first`` on are to be saved or
        loaded.
        """

    def planned(self, plan: StepPlan, output: Any, now: float) -> None:
        """A step was planned, but for its saves. ``output`` is vLLM's."""

    def heard(self, report: Report, over: Sequence[tuple[Sequence[SaveRun], bytes]], now: float) -> None:
        """A report has been handled, with which these saves were over: runs, and the statuses of
        their blocks.
        """

    def ended(self, tracked: Tracked) -> None:
        """A request has ended. Its last blocks were added to the next saves."""

    def reset(self, what: Reset) -> None:
        """Something known is void."""

    def transfer_params(self, request: Any) -> dict[str, Any] | None:  # noqa: ARG002
        """Return what vLLM's answer to an ended request says in ``kv_transfer_params``, if
        anything.
        """
        return None

    def busy(self) -> bool:
        """Return whether steps are needed without requests."""
        return False

    def close(self) -> None:
        """The side leaves the agent."""


class Waits:
    """Which loads their step waits for. The core's are all asynchronous."""

    def ready(self, tracked: Tracked, tokens: int) -> bool:  # noqa: ARG002
        """Return whether to ask the agent if a request's blocks, of at most so many tokens, can be
        loaded at once.
        """
        return False

    def takes(self, tracked: Tracked, tokens: int) -> bool:  # noqa: ARG002
        """Return whether the step that admits a request waits for its load of so many tokens."""
        return False

    def taken(self, tracked: Tracked) -> bool:  # noqa: ARG002
        """Return what ``takes`` returned last for a request."""
        return False

    def start(self, job: int, tracked: Tracked, tokens: int) -> None:
        """Start a load that was taken."""

    def replace(self, job: int, tracked: Tracked, tokens: int) -> None:
        """Let another job stand for a request's load that was taken, started or not."""

    def lost(self, tracked: Tracked) -> None:
        """A request has lost its blocks before the outcome of its load is known."""

    def over(self, tracked: Tracked, *, normally: bool) -> bool:  # noqa: ARG002
        """A request has ended. Return whether that shows that its load has succeeded."""
        return False

    def settle(self, report: Report, world: int) -> Iterable[tuple[Tracked, bool]]:  # noqa: ARG002
        """Return the requests whose load was taken and is over, and whether it has succeeded."""
        return ()


@dataclass(slots=True)
class Joined:
    """What guests an engine has, and what they replace of the core."""

    guests: list[Guest] = field(default_factory=list)
    answered: frozenset[str] = frozenset()
    """The attributes of a vLLM request on which its blocks may depend, and that may be set: a guest
    keys such requests, or the user answers for them. Others are neither saved nor loaded.
    """
    session: Callable[..., AgentSession] = AgentSession
    batch: Callable[..., SaveBatch] = SaveBatch
    waits: Waits = field(default_factory=Waits)
    attached: Callable[[], None] | None = None
    """Is called, from another thread, when there is a session."""
