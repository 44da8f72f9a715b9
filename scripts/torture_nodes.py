"""Two and three nodes over a shared store. `torture nodes` kills and pauses engines, the agents of all nodes, their
helpers and the store's server. The replay itself does that, from its seed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torture_tiers as tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STORES = ("redis", "s3", "mooncake")
HELPERS = ("mooncake",)  # stores whose client is a process of its own
HITS = (
    "blocks_loaded",
    "agent_kills_by_node",
    "engine_pauses",
    "helper_kills",
    "helper_pauses",
    "server_kills",
    "server_pauses",
)
STALLED_AFTER_S = 90  # without a report of any engine
# A server is used again soon after it continues: a run is short, and its store is down for a third
# of it.
TROUBLE = "within=1s"
TIERS_WITHIN_S = 60


@dataclasses.dataclass(frozen=True)
class Form:
    """The requests of a run, and the intervals and lengths of its kills and pauses."""

    requests: int
    pace: int  # seconds at least
    kill_engine: int
    kill_agent: int
    kill_server: int
    kill_helper: int
    pause_engine: int
    pause_agent: int
    pause_server: int
    pause_helper: int
    pause_s: float
    seeds: tuple[int, ...]
    movers: int = 0  # requests between kills of a mover; 0: agents have none

    def flags(self, *, helper: bool) -> Iterator[str]:
        """Return the flags of the replay."""
        yield from (
            "--requests",
            str(self.requests),
            "--pace",
            f"{self.pace}s",
            "--pause-for",
            f"{self.pause_s}s",
            "--server-down",
            "500ms",
        )
        for name, every in self.faults(helper=helper):
            yield from (f"--{name}-every", str(every))
        if self.movers:
            yield from ("--device", "host-mover")

    def faults(self, *, helper: bool) -> Iterator[tuple[str, int]]:
        """Return each fault and the requests between two of them."""
        yield from (("kill-engine", self.kill_engine), ("kill-agent", self.kill_agent))
        yield from (
            ("kill-server", self.kill_server),
            ("pause-engine", self.pause_engine),
        )
        yield from (
            ("pause-agent", self.pause_agent),
            ("pause-server", self.pause_server),
        )
        if helper:
            yield from (
                ("kill-helper", self.kill_helper),
                ("pause-helper", self.pause_helper),
            )
        if self.movers:
            yield ("kill-mover", self.movers)


# The numbers are coprime, so that faults coincide now and then.
SHORT = Form(250, 6, 59, 61, 149, 101, 71, 83, 97, 89, 0.3, (1,))
LONG = Form(1000, 40, 97, 113, 311, 151, 139, 199, 173, 127, 2, (1, 2, 3))
LONG_MOVERS = dataclasses.replace(LONG, movers=61, seeds=(4,))


@dataclasses.dataclass(frozen=True)
class Stack:
    """A shared store and the number of its nodes."""

    store: str
    nodes: int
    least_loaded: int  # blocks, from any tier, over all lives of the agents

    def name(self, seed: int) -> str:
        """Return the name of the run."""
        return f"{self.store}, {self.nodes} nodes, seed {seed}"

    def run(
        self,
        form: Form,
        seed: int,
        where: Path,
        replay: Callable[[list[str]], dict[str, float]],
    ) -> dict[str, float]:
        """Run one replay; its server's files are in ``where``."""
        server = tiers.Server(self.store, where / "server")
        command = server.command()
        command[0] = tiers.program(command[0])
        if self.store == "redis":  # its --save takes an empty word, which a command line split at blanks has not
            conf = where / "redis.conf"
            conf.write_text(f'bind 127.0.0.1\nport {server.port}\nsave ""\nappendonly yes\ndir {where}\n')
            command = [command[0], str(conf)]
        flags = [
            *tiers.SMALL,
            "--nodes",
            str(self.nodes),
            "--engines",
            str(self.nodes + 1),
            "--seed",
            str(seed),
        ]
        flags += [
            "--server",
            " ".join(command),
            "--shared",
            server.tier().replace(tiers.TROUBLE, TROUBLE),
            "--tiers-within",
            f"{TIERS_WITHIN_S}s",
        ]
        flags += [
            "--stalled-after",
            f"{STALLED_AFTER_S}s",
            *form.flags(helper=self.store in HELPERS),
        ]
        return replay(flags)

    def broken(self, form: Form, figures: dict[str, float]) -> Iterator[str]:
        """Return what a run should have done and did not."""
        for name, _ in form.faults(helper=self.store in HELPERS):
            verb, whom = name.split("-")
            key = f"{whom}_{verb}s"
            if figures[key] == 0:
                yield f"{key} is 0, at least 1 is asked for"
        if figures["blocks_loaded"] < self.least_loaded:
            yield f"{figures['blocks_loaded']} blocks were loaded, at least {self.least_loaded} are asked for"
        by_node: list[int] = figures["agent_kills_by_node"]  # type: ignore[assignment]
        if 0 in by_node:
            yield f"agents were killed {by_node} times, by node: at least once each is asked for"


STACKS = tuple(Stack(store, nodes, 50 if store != "mooncake" else 1) for store in STORES for nodes in (2, 3))
