"""An engine that the connector cannot serve: it runs without the agent, and says so.

The scheduler's part decides. It finds the reason itself, at its start, or a worker reports it with
its first step: a worker sees the tensors of its KV caches, and groups that vLLM flattens for the
scheduler. Then the scheduler retires: it revokes its saves, and when every worker has reported what
was in flight, its plans tell all workers to leave the agent too.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvagent.errors import KVAgentError
from kvagent.identity import identity_pairs
from kvagent.messages import Group, Role
from kvagent.registration import Registration
from kvagent.session import Session
from kvagent.vllm.link import CONNECT_S, JOIN_S, PAUSE_REFUSED_S
from kvagent.vllm.plan import uncached_plan

if TYPE_CHECKING:
    from kvagent.vllm.link import Attachment
    from kvagent.vllm.plan import StepPlan

PAIR = "uncached"
"""The key of the identity whose value is the reason."""
MAX_REASON = 1000  # characters that the agent is told

log = logging.getLogger("vllm.kvagent")


def warn(reason: str) -> None:
    """Log that the engine is served uncached, with the reason and what to do."""
    log.warning(
        "this engine is served UNCACHED: nothing is saved or loaded, and every prompt is computed. Reason: %s. "
        'To serve it cached, change what the reason names (docs/VLLM.md, "Models" and "What is not supported"); '
        '"on_unsupported": "fail" in kv_connector_extra_config ends such a start instead',
        reason.rstrip("."),
    )


class UncachedScheduler:
    """Takes the place of SchedulerSide. Its calls do nothing."""

    saves = None

    def bind(self, manager: Any) -> None:
        """Use nothing of vLLM's."""

    def on_new_request(self, request: Any) -> None:
        """Ask nothing."""

    def matched(self, request: Any, own: int) -> tuple[int, bool]:  # noqa: ARG002
        """Return that nothing will be loaded."""
        return 0, False

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Save nothing."""

    def plan(self, output: Any) -> StepPlan:  # noqa: ARG002
        """Return the plan of every step, which is one object."""
        return uncached_plan()

    def finished(self, request: Any, *, normally: bool) -> None:
        """Save nothing."""

    def transfer_params(self, request: Any) -> None:
        """Return nothing: no decode engine can receive the blocks."""

    def reset(self) -> None:
        """Do nothing: there are no blocks of this engine."""

    def before_weights_call(self, call: str) -> None:
        """Do nothing, likewise."""

    def weights_named(self, version: str) -> None:
        """Do nothing, likewise."""

    def idle(self) -> bool:
        """Return that the weights need not be looked at."""
        return False

    def pending(self) -> bool:
        """Return that no steps are needed without requests."""
        return False

    def counted(self) -> dict[str, int]:
        """Return no counters."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class NoLink:
    """Takes the place of a Link in a worker that does not join the agent: its jobs fail at once."""

    busy = False

    def current(self) -> Attachment | None:
        """Return that there is no session."""
        return None

    def lost(self, attachment: Attachment) -> None:
        """Request nothing."""

    def renew(self, *, hold: bool = False) -> Attachment | None:  # noqa: ARG002
        """Return that there was no session."""
        return None

    def proceed(self) -> None:
        """Do nothing."""

    def close(self) -> Attachment | None:
        """Return that there was no session."""
        return None


def notice(engine: str, identity: dict[str, str], reason: str) -> Registration:
    """Return the registration by which an agent lists the engine with the reason: that of a
    scheduler whose only rank never comes. ``identity`` has the keys that every identity needs.
    """
    text = " ".join(reason.split())[:MAX_REASON]
    return Registration(
        instance=engine[:128], role=Role.SCHEDULER, identity=identity_pairs(identity | {PAIR: text}),
        groups=(Group(1, 1),), hash_tokens=1,
    )  # fmt: skip


class Notice:
    """Keeps a session that says that the engine is served uncached, in a thread of its own."""

    def __init__(self, socket_dir: str, registration: Registration) -> None:
        self._path = Path(socket_dir) / "session.sock"
        self._registration = registration
        self._closed = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvagent notice", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the session and the thread, which a stopped agent may hold for a while."""
        self._closed.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._hold()
            except (OSError, KVAgentError) as error:
                log.debug("notice: %s", error)
            self._closed.wait(PAUSE_REFUSED_S)

    def _hold(self) -> None:
        """Register, and read until the agent's end of the session is gone."""
        session = Session.connect(self._path, CONNECT_S)
        try:
            session.register(self._registration, CONNECT_S)
            poller = select.poll()
            poller.register(session.fileno(), select.POLLIN)
            poller.register(self._wake, select.POLLIN)
            while not self._closed.is_set():
                poller.poll()
                session.poll()
        finally:
            session.close()
