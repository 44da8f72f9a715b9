"""Loads that a step waits for, without vllm: where they are possible, and their deadline."""

from __future__ import annotations

import struct
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvagent.vllm.guests.sync import preemption
from kvagent.vllm.plan import LoadJob
from kvagent.vllm.worker.side import InflightJob, WorkerSide
from kvagent.vllm.worker.sync import make_sync

CLASSES = {name: members for _, name, members in preemption._OF_OTHERS}
USED = [f"Scheduler.{name}" for name in preemption._OF_THE_SCHEDULER]
USED += [f"{name}.{member}" for name, members in CLASSES.items() for member in members]


def of(name: str, members: tuple[str, ...], missing: str) -> type:
    """Return a class whose objects have those members but one: methods or attributes."""
    members = tuple(member for member in members if f"{name}.{member}" != missing)
    set_members = "; ".join(f"self.{member} = 0" for member in members[::2]) or "pass"
    space: dict[str, Any] = dict.fromkeys(members[1::2])
    exec(f"def __init__(self): {set_members}", space)  # noqa: S102
    base = type(f"{name}Base", (), space)
    return type(name, (base,), {})


def scheduler(monkeypatch: pytest.MonkeyPatch, missing: str) -> Any:
    """Return a scheduler of a vLLM without a member."""
    for module, name, members in preemption._OF_OTHERS:
        namespace = {} if name == missing else {name: of(name, members, missing)}
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**namespace))
    one = of("Scheduler", preemption._OF_THE_SCHEDULER, missing)()
    one.vllm_config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="own"))

    def preempt(request: Any, timestamp: float, drop_stale_output: bool = False) -> None: ...

    one._preempt_request = preempt
    return one


def test_a_scheduler_that_has_all_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    one = scheduler(monkeypatch, "")
    assert not preemption.unsupported(one, "own")
    assert "another connector" in preemption.unsupported(one, "other")
    one._preempt_request = lambda _request, _timestamp: None
    assert "cannot drop the output" in preemption.unsupported(one, "own")


@pytest.mark.parametrize("missing", [*USED, *CLASSES])
def test_a_scheduler_that_lacks_something(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """It is refused at the start, instead of failing in a step."""
    why = preemption.unsupported(scheduler(monkeypatch, missing), "own")
    assert why.startswith("this vLLM has no ")
    assert why.endswith(missing)


@pytest.mark.parametrize("waited_for", [True, False])
def test_the_deadline_of_a_load_that_a_step_waits_for(*, waited_for: bool) -> None:
    """VLLM expects no end of it, and would stop if one was reported."""
    sync, link = make_sync(None), SimpleNamespace(current=lambda: None)
    side = WorkerSide(link, sync.words, per_block=True)  # type: ignore[arg-type]
    load = LoadJob(1, b"", 0, "warm", 0, 1.0, (), struct.pack("<2I", 3, 4), sync=waited_for)
    side.jobs[1] = InflightJob(load, None, [None])
    side._expire_loads(2.0)
    assert side.pending_results.received == (set() if waited_for else {"warm"})
    assert side.counts.loads_late == int(not waited_for)
    sync.close()
