"""What an agent may still touch after it was given up: a deadline is no fence.

An agent, or a mover of one, that has not let go of a worker's memory in time may still read and write it. So the memory
is kept, with the sessions whose end is the fence, until that end is seen. Where nobody looks any more, because the
connector is shut down, it is kept to the end of the process: that is a fence too, because the kernel and the driver
take the memory of a process only after its last user is gone. Nothing here waits, so a shutdown does not hang.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.vllm.worker.side import WorkerSide

log = logging.getLogger("kvagent.vllm")


@dataclass(eq=False, slots=True)
class Kept:
    """The memory of one worker, until ``fenced``."""

    who: str
    worker: WorkerSide
    """Has the sessions, which must stay open."""
    memory: tuple[Any, ...]
    """Whatever must not be freed."""
    close: Callable[[], None]
    """Closes what the memory was shown with."""
    fenced: Callable[[], bool] = field(default=lambda: False)
    """Whether the fence has come; never, where nobody looks any more."""


_kept: list[Kept] = []


def keep(one: Kept) -> None:
    """Keeps a worker's memory, and says so."""
    _kept.append(one)
    log.error(
        "%s: the agent did not let go of the KV caches in time; their memory is kept until it does, or to the end of "
        "this process",
        one.who,
    )


def let_go() -> int:
    """Frees what a fence has come for. Gives how many workers' memory is kept."""
    for one in [one for one in _kept if one.fenced()]:
        _kept.remove(one)
        one.close()
        log.info("%s: the agent has let go of the KV caches that were kept", one.who)
    return len(_kept)
