"""What becomes of a tier of vLLM's offloading after an error in a call of vLLM's (errors)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def answer(value: Any = None) -> Callable[..., Any]:
    """Return what to do after an error in a call that has an answer without the tier."""

    def failed(self: Any, call: str, error: Exception, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        self.fail(call, error)
        return value

    return failed


def of_questions(self: Any, call: str, error: Exception, *args: Any) -> None:  # noqa: ARG001
    """Handle an error before all questions of a step were sent: they are misses in a while."""
    self.fail(call, error)
    self.give_up_questions(time.monotonic())


def of_job(self: Any, call: str, error: Exception, job_metadata: Any) -> None:
    """Handle an error when a job came: it has failed, unless it was begun."""
    self.fail(call, error)
    self.end_job(int(job_metadata.job_id))


def of_weights(self: Any, call: str, error: Exception, *args: Any) -> None:  # noqa: ARG001
    """Handle an error in a call after which other weights may compute: nothing more is found."""
    self.fail(call, error, retires=True)


CALLS: dict[str, Callable[..., Any]] = {
    "on_schedule_end": of_questions, "on_request_finished": answer(), "submit_store": of_job, "submit_load": of_job,
    "get_finished_jobs": answer(()), "has_pending_work": answer(False), "drain_jobs": of_weights,
    "shutdown": answer(), "before_weights_call": of_weights, "weights_named": of_weights,
    "before_reset": of_weights, "get_stats": answer(),
}  # fmt: skip
"""``lookup`` answers for itself."""
