"""Operations on agents: read their figures, change a byte of a pool, wait for an engine that
reconnects.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.agent import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.agent import AgentProcess


def flip(pid: int, value: bytes, pool: str = "/memfd:kvagent-pool") -> None:
    """Change a slot's content in the agent's memory: the first place with 8 such consecutive
    values. ``pool``: part of the name of its mapping.

    It searches the pool, not the mapped memory of an engine, which may hold the same values.
    """
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for line in maps:
            begin, end, mode = re.match(r"(\w+)-(\w+) (\S+)", line).groups()  # type: ignore[union-attr]
            if not mode.startswith("rw-s") or pool not in line:
                continue
            low = int(begin, 16)
            memory.seek(low)
            at = memory.read(int(end, 16) - low).find(value * 8)
            if at >= 0:
                memory.seek(low + at)
                memory.write(b"\xff\xff\x01\x42")
                return
    raise AssertionError("the pool does not hold what was saved")


def figures(agent: AgentProcess) -> str:
    """Return the agent's counters since its start."""
    status = agent.status()
    saved, loaded = status["blocks_saved"], status["blocks_loaded"]
    return f"agent: {saved} blocks saved, {loaded} loaded, {status['lookup_hits']} hits in {status['lookups']} look-ups"


def joined(side: Any, workers: Sequence[Any], agent: AgentProcess) -> None:
    """Wait until all parts of an engine, which lost the last agent, are at the running one."""
    session = agent.connect()
    boot = session.boot
    session.close()
    links = [side._agent._link, *(worker._link for worker in workers)]

    def there() -> bool:
        return all(link.current() is not None and link.current().session.boot == boot for link in links)

    eventually(there, "the engine at the new agent")
