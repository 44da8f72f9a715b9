"""An engine that the connector cannot serve: it runs without the agent, and says so.

The scheduler's part decides. It finds the reason itself, at its start, or a worker reports it with
its first step: a worker sees the tensors of its KV caches, and groups that vLLM flattens for the
scheduler. Then the scheduler retires (boundary).
"""

from __future__ import annotations

import logging

from kvagent.identity import identity_pairs
from kvagent.messages import Group, Role
from kvagent.registration import Registration
from kvagent.vllm.link import Link
from kvagent.vllm.options import Options
from kvagent.vllm.scheduler.agent_session import AgentSession

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


def notice(engine: str, identity: dict[str, str], reason: str) -> Registration:
    """Return the registration by which an agent lists the engine with the reason: that of a
    scheduler whose only rank never comes. ``identity`` has the keys that every identity needs.
    """
    text = " ".join(reason.split())[:MAX_REASON]
    return Registration(
        instance=engine[:128], role=Role.SCHEDULER, identity=identity_pairs(identity | {PAIR: text}),
        groups=(Group(1, 1),), hash_tokens=1,
    )  # fmt: skip


class Notice(AgentSession):
    """Keeps a session that says that the engine is served uncached, as long as it is polled."""

    def __init__(self, socket_dir: str, registration: Registration) -> None:
        super().__init__(Link(socket_dir, "an engine that is not served", lambda: registration), Options())
