"""Operations on agents: read their figures, change bytes of a pool, wait for an engine that
reconnects.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tests.agent import PATIENCE_S, eventually

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from tests.agent import AgentProcess


PAGE = 4096  # bytes
POOL = "/memfd:kvagent-pool"  # part of the name of its mapping


def flip(pid: int, value: bytes, pool: str = POOL) -> None:
    """Change a slot's content in the agent's memory: the first place with 8 such consecutive
    values. ``pool``: part of the name of its mapping.

    It searches the pool, not the mapped memory of an engine, which may hold the same values.
    """
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for low, content in _pool(pid, memory, pool):
            at = content.find(value * 8)
            if at >= 0:
                memory.seek(low + at)
                memory.write(b"\xff\xff\x01\x42")
                return
    raise AssertionError("the pool does not hold what was saved")


def spoil(pid: int, dice: random.Random | None = None, share: float = 1.0) -> int:
    """Change a byte of every page of the agent's pool that is in use, or of a ``share`` of them.

    Return how many were changed.
    """
    spoiled = 0
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for low, content in _pool(pid, memory):
            for at in range(0, len(content), PAGE):
                if content[at] and (dice is None or dice.random() < share):
                    memory.seek(low + at)
                    memory.write(bytes([content[at] ^ 1]))
                    spoiled += 1
    return spoiled


def _pool(pid: int, memory: IO[bytes], pool: str = POOL) -> Iterator[tuple[int, bytes]]:
    """Yield the address and content of each part of an agent's pool, once: a device may have mapped
    the same memory again.
    """
    seen: set[tuple[str, str]] = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, mode, offset, _, inode, *_ = line.split()
        if not mode.startswith("rw-s") or pool not in line or (inode, offset) in seen:
            continue
        seen.add((inode, offset))
        low, end = (int(address, 16) for address in addresses.split("-"))
        memory.seek(low)
        yield low, memory.read(end - low)


def figures(agent: AgentProcess) -> str:
    """Return the agent's counters since its start."""
    status = agent.status()
    saved, loaded = status["blocks_saved"], status["blocks_loaded"]
    return f"agent: {saved} blocks saved, {loaded} loaded, {status['lookup_hits']} hits in {status['lookups']} look-ups"


def boot(agent: AgentProcess) -> bytes:
    """Return what tells this run of the agent from others."""
    session = agent.connect()
    session.close()
    return session.boot


def at(links: Sequence[Any], boot: bytes) -> bool:
    """Return whether all of an engine's links are at one run of an agent."""
    current = [link.current() for link in links]
    return all(one is not None and one.boot == boot for one in current)


def joined(side: Any, workers: Sequence[Any], agent: AgentProcess, step: Callable[[], object] | None = None) -> None:
    """Wait until all parts of an engine, which lost the last agent, are at the running one.

    ``step`` runs a step: a part notices only in one that the last agent is gone. Without it, all
    parts have to know.
    """
    now = boot(agent)
    links = [side.agent._link, *(worker._link for worker in workers)]

    def there() -> bool:
        if step is not None and any((one := link.current()) and one.boot != now for link in links):
            step()
        return at(links, now)

    eventually(there, "the engine at the new agent")


def metric(agent: AgentProcess, name: str) -> int:
    """Return one of the agent's counters."""
    with socket.socket(socket.AF_UNIX) as admin:
        admin.settimeout(PATIENCE_S)
        admin.connect(str(agent.folder / "admin.sock"))
        admin.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = b"".join(iter(lambda: admin.recv(1 << 16), b"")).decode()
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    assert found, f"no metric {name}"
    return int(found[1])
