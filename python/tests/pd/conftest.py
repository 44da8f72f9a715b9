"""Tests with real `vllm serve` processes: they are collected only in the environment that runs them
(scripts/env vllm-serve).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent import AgentProcess, eventually
from tests.pd.processes import UPSTREAM, Engine, Nursery, free_port, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

# A look-up that is late is a miss.
PATIENT = {"weights_fixed": True, "lookup_grace_ms": 10_000, "lookup_age_ms": 60_000}

collect_ignore_glob: list[str] = [] if UPSTREAM.exists() else ["test_*.py"]


class Node:
    """An agent and its engines, which are started once and end with it."""

    def __init__(self, folder: Path, model: Path, nursery: Nursery, *flags: str) -> None:
        self.folder, self.model, self._nursery = folder, model, nursery
        run = folder / "run"
        run.mkdir(mode=0o700)
        self.http_port = free_port()
        self._flags = ("--http", f"127.0.0.1:{self.http_port}", *flags)
        self.agent = AgentProcess(run, *self._flags)
        self._transfers: dict[str, dict[str, Any]] = {}
        self.engines: dict[str, Engine] = {}

    def restart_agent(self, *flags: str) -> None:
        """Restart the agent with these flags besides its own; its engines join it again."""
        self.agent.close()
        self.agent = AgentProcess(self.agent.folder, *self._flags, *flags)

    def joined(self, *names: str) -> None:
        """Wait until engines that lost the last agent are at the running one.

        An idle engine takes no steps, so it is given some.
        """

        def there() -> bool:
            for name in names:
                self.engines[name].complete([5, 6, 7], 2)
            return all(map(self._registered, names))

        eventually(there, f"{' and '.join(names)} at the new agent", 60.0)

    def _registered(self, name: str) -> bool:
        """Return whether an engine is at the agent, with its scheduler and worker."""
        return any(
            one["instance"] == name and sum(session["registered"] for session in one["sessions"]) == 2
            for one in self.agent.status()["engine_list"]
        )

    def again(self, engine: Engine) -> Engine:
        """Start an engine that was killed again, on its port."""
        name = engine.log.stem
        self.engines[name] = Engine(self._nursery, self.model, engine.log, self._transfers[name], port=engine.port)
        self.engines[name].wait()
        return self.engines[name]

    def engine(self, name: str, role: str, **options: Any) -> Engine:
        """Return the engine of this name; start it if it is not there yet."""
        return self.engines_of({name: role}, **options)[0]

    def engines_of(self, roles: dict[str, str], **options: Any) -> list[Engine]:
        """Return engines by name; those that are not there start together."""
        started = []
        for name, role in roles.items():
            if name not in self.engines:
                self.engines[name] = self._start(name, role, options)
                started.append(self.engines[name])
        for one in started:
            one.wait()
        return [self.engines[name] for name in roles]

    def _start(self, name: str, role: str, options: dict[str, Any]) -> Engine:
        transfer = {
            "kv_connector": "KVAgentConnector", "kv_connector_module_path": "kvagent.vllm", "kv_role": role,
            "kv_load_failure_policy": "recompute", "engine_id": name,
            "kv_connector_extra_config": {"socket_dir": str(self.agent.folder), **PATIENT, **options},
        }  # fmt: skip
        self._transfers[name] = transfer
        return Engine(self._nursery, self.model, self.folder / f"{name}.log", transfer)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.kill()
        self.agent.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    from tests.vllm import engine

    model = engine.write_model(tmp_path_factory.mktemp("tiny") / "model")
    write_tokenizer(model)
    return model


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def node(tiny: Path, nursery: Nursery) -> Iterator[Node]:
    """One agent, and engines that tests start and share."""
    yield from _started(tiny, nursery)


@pytest.fixture(scope="session")
def second(tiny: Path, nursery: Nursery) -> Iterator[Node]:
    """Another agent, with engines of its own."""
    yield from _started(tiny, nursery)


def _started(model: Path, nursery: Nursery) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="kvagent-pd-") as folder:
        made = Node(Path(folder), model, nursery)
        yield made
        made.close()
