"""Faults in the middle of a run: what goes wrong with the agent at a random moment of an engine's
step, and when it comes back.

One fault at a time: it is armed, strikes when its moment comes, and ends after a number of steps; a
delay lasts until a load that it holds is given up.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.vllm import agents
from tests.vllm.world import joined

if TYPE_CHECKING:
    import random

    from tests.holding import HoldingAgent
    from tests.vllm.world import World

KINDS = ("delay", "spoil", "freeze", "kill")
MOMENTS = ("promise", "load", "save", "step")
"""Between the plan of a load and its start; after its start, which is before the first layer waits
or in the middle of the load; after saves were sent; between two steps.
"""
STEPS = (5, 60)  # that a fault lasts
SPOILED = 0.3  # of the pool's pages


class Faults:
    """The faults of a world, whose agent can hold copies of loads."""

    def __init__(self, world: World, agent: HoldingAgent, dice: random.Random) -> None:
        self._world, self._agent, self._dice = world, agent, dice
        self.struck = Counter[str]()
        """How often each kind struck, by kind and moment, and by kind alone."""
        self._armed: tuple[str, str] | None = None
        self._ends: int | None = None
        self._last = ""
        self._late = 0  # loads, when the last fault struck
        self._hook()

    def step(self) -> None:
        """Arm a fault, if none is, strike or end one: called between two steps."""
        if self._armed is not None:
            self._strike("step")
        elif self._ends is None:
            kind = min(KINDS, key=lambda one: (self.struck[one], self._dice.random()))
            self._armed = kind, self._dice.choice(MOMENTS)
        elif self._world.steps >= self._ends and not self._delays():
            self.end()

    def end(self) -> None:
        """End what lasts. After a kill, the engine goes on when it is at the agent again."""
        self._armed = None
        if self._ends is None:
            return
        self._ends = None
        if self._last == "delay":
            self._agent.release()
        elif self._last == "freeze":
            self._agent.thaw()
        elif self._last == "kill":
            self._agent.start()
            joined(self._world, self._agent)  # the kill may have struck in the last step

    def _delays(self) -> bool:
        """Return whether a load may wait for what is delayed: it does so until it is given up."""
        side = self._world.side
        return self._last == "delay" and side.counts.loads_late == self._late and bool(side.loads.busy())

    def _strike(self, moment: str) -> None:
        if self._armed is None or self._armed[1] != moment:
            return
        kind, self._armed = self._armed[0], None
        if kind == "spoil":
            if not agents.spoil(self._agent.process.pid, self._dice, SPOILED):
                return
        elif kind == "delay":
            self._agent.hold(self._dice.randrange(3))
        else:
            getattr(self._agent, kind)()
        self.struck.update((kind, f"{kind} at {moment}"))
        self._late = self._world.side.counts.loads_late
        self._last, self._ends = kind, self._world.steps + self._dice.randrange(*STEPS)

    def _hook(self) -> None:
        """Strike in the calls of the connector's sides."""
        side, worker = self._world.side, self._world.workers[0]._worker
        plan, start, end = side.plan, worker.start, worker.end

        def planned(output: Any) -> Any:
            made = plan(output)
            if made.loads:
                self._strike("promise")
            return made

        def started(made: Any) -> None:
            start(made)
            if made.loads:
                self._strike("load")

        def ended(made: Any) -> None:
            end(made)
            if made.saves:
                self._strike("save")

        side.plan, worker.start, worker.end = planned, started, ended
