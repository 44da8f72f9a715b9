"""What becomes of a tier of vLLM's offloading after an error in a call of vLLM's (errors)."""

from __future__ import annotations

import time
from typing import Any

from kvagent.vllm.boundary.errors import Call


def of_little(self: Any, call: str, error: Exception, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
    """Handle an error in a call that has an answer without the tier."""
    self.fail(call, error)


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


CALLS = {
    "on_schedule_end": Call(of_questions), "on_request_finished": Call(of_little), "submit_store": Call(of_job),
    "submit_load": Call(of_job), "get_finished_jobs": Call(of_little, ()), "has_pending_work": Call(of_little, False),
    "drain_jobs": Call(of_weights), "shutdown": Call(of_little), "before_weights_call": Call(of_weights),
    "weights_named": Call(of_weights), "before_reset": Call(of_weights), "get_stats": Call(of_little),
}  # fmt: skip
"""``lookup`` answers for itself."""
