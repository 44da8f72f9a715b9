"""What happens to a real engine's load in its middle, or between its promise and its start."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.holding import HoldingAgent
from tests.sides import waits as step_waits
from tests.vllm import agents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.test_engine import Alive

EVENTS = ("delay", "spoil", "freeze", "kill")
SILENT = ("delay", "freeze")  # those after which a load is given up at its deadline
GIVEN_UP_S = 0.3  # which is then this
ASKED_S = 0.5  # after which the answer to a look-up is not waited for


@contextlib.contextmanager
def middle(alive: Alive, event: str, call: str) -> Iterator[list[str]]:
    """Let an event happen in the middle of the next load, and end it afterwards.

    ``call``: the worker's call after which it happens: ``start``, which sends loads, or ``begin``,
    before they are sent, for those that a step waits for. Yield a list that is empty before it.
    """
    agent, client = alive.agent, alive.side.agent.lookups._client
    loads, sync = alive.side.loads, step_waits(alive.worker)
    assert isinstance(agent, HoldingAgent)
    before = loads._deadline_s, sync._wait_s, client.timeout_s
    if event in SILENT:
        loads._deadline_s = sync._wait_s = GIVEN_UP_S
    if event == "delay":
        agent.hold(0)

    def act() -> None:
        client.timeout_s = ASKED_S
        if event == "spoil":
            agents.spoil(agent.process.pid)
        elif event != "delay":
            getattr(agent, event)()

    try:
        yield alive.once(call, lambda plan: bool(plan.loads), act)
    finally:
        alive.never()
        loads._deadline_s, sync._wait_s, client.timeout_s = before
        if event == "kill":
            agent.start()
        else:
            agent.thaw()
            agent.release()
    alive.joined()
