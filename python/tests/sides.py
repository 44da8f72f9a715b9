"""A scheduler's side without an agent, and its guests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar

from kvagent.messages import Group
from kvagent.vllm.geometry import Geometry
from kvagent.vllm.hooks import Guest, Joined
from kvagent.vllm.link import Link
from kvagent.vllm.options import Options
from kvagent.vllm.scheduler.requests import Phase, Tracked, arrived
from kvagent.vllm.scheduler.side import SchedulerSide
from tests.simulated import Pool

GEOMETRY = Geometry((Group(16, 64),), 16)
_Guest = TypeVar("_Guest", bound=Guest)


def side_of(*guests: Guest, geometry: Geometry = GEOMETRY, pool: Any = None, **more: Any) -> SchedulerSide:
    """Return a side with these guests alone; ``pool`` is vLLM's block pool."""
    link = Link("", "a test", None)
    manager = SimpleNamespace(block_pool=pool or Pool(geometry.groups[0].num_blocks))
    return SchedulerSide(Options(), geometry, 1, link, manager, saves=True, joined=Joined([*guests], **more))


def guest(side: SchedulerSide, kind: type[_Guest]) -> _Guest:
    """Return a side's guest of a kind."""
    return next(one for one in side.guests if isinstance(one, kind))


def waits(side: Any) -> Any:
    """Return what waits for the loads of a worker's steps, if they do."""
    from kvagent.vllm.guests.sync import StepWaits

    idle = SimpleNamespace(_wait_s=0.0)
    return next((one for one in side.guests if isinstance(one, StepWaits)), idle)


def running(request: Any, groups: int = 1, tokens: int = 16) -> Tracked:
    """Return the record of a request that computes."""
    tracked = arrived(request, groups, tokens)
    tracked.phase = Phase.RUNNING
    return tracked
