"""Where guests plug into a worker's side (hooks has the scheduler's)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.packing import Packed
    from kvagent.session import Session
    from kvagent.vllm.plan import LoadJob, SaveJob, StepPlan
    from kvagent.vllm.worker.side import WorkerSide


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
        """Return whether the blocks of a job that names something it depends on are right now: of a
        save before it is sent, of a load also at its end.
        """
        return True

    def start(self, plan: StepPlan, loads: Sequence[LoadJob]) -> Sequence[LoadJob]:  # noqa: ARG002
        """Begin loads in the guest's own way. Return the others."""
        return loads

    def send(
        self, session: Session, load: LoadJob, sections: Packed, *, step: int, event: int  # noqa: ARG002
    ) -> int | None:  # fmt: skip
        """Send a part of a load in the guest's own way. Return the job's number in the session, or
        None if that is not for this guest.
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

    def poll(self) -> None:
        """The step's results are asked for."""

    def news(self) -> tuple[Any, ...]:
        """Return what the scheduler's guest has to learn since the last call."""
        return ()

    def moved(self) -> None:
        """The weights' generation has changed."""

    def close(self) -> None:
        """The worker leaves the agent."""
