"""Loads that a step waits for, without vllm: where they are possible, and their deadline."""

from __future__ import annotations

import struct
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvagent.vllm import internals
from kvagent.vllm.plan import LoadJob
from kvagent.vllm.worker.side import InflightJob, WorkerSide, make_clock


def of(name: str, members: list[str]) -> type:
    """Return a class whose objects have those members: methods or attributes."""
    set_members = "; ".join(f"self.{member} = 0" for member in members[::2]) or "pass"
    space: dict[str, Any] = dict.fromkeys(members[1::2])
    exec(f"def __init__(self): {set_members}", space)  # noqa: S102
    return type(name, (type(f"{name}Base", (), space),), {})


def vllm_without(monkeypatch: pytest.MonkeyPatch, feature: str, missing: str) -> None:
    """Let modules be as in a vLLM that has all that a feature uses, but for one class or member."""
    made: dict[str, dict[str, type]] = {}
    used: dict[tuple[str, str], list[str]] = {}
    for module, name, members in internals.used(feature):
        used.setdefault((module, name), []).extend(one for one in members if f"{name}.{one}" != missing)
    for (module, name), members in used.items():
        made.setdefault(module, {}).update({} if name == missing else {name: of(name, members)})
    for module, classes in made.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**classes))


USED = [
    (feature, one)
    for feature in internals.USED
    for _, name, members in internals.used(feature)
    for one in (name, *(f"{name}.{member}" for member in members))
]


@pytest.mark.parametrize("feature", internals.USED)
def test_a_vllm_that_has_all_that_is_used(monkeypatch: pytest.MonkeyPatch, feature: str) -> None:
    vllm_without(monkeypatch, feature, "")
    assert not internals.missing(feature)


@pytest.mark.parametrize(("feature", "missing"), USED)
def test_a_vllm_that_lacks_something(monkeypatch: pytest.MonkeyPatch, feature: str, missing: str) -> None:
    """The feature is off from the start, instead of failing in a step."""
    vllm_without(monkeypatch, feature, missing)
    why = internals.missing(feature)
    assert why.startswith("this vLLM has no ")
    assert missing in why


@pytest.mark.parametrize("waited_for", [True, False])
def test_the_deadline_of_a_load_that_a_step_waits_for(*, waited_for: bool) -> None:
    """VLLM expects no end of it, and would stop if one was reported."""
    sync, link = make_clock(None), SimpleNamespace(current=lambda: None)
    side = WorkerSide(link, sync, per_block=True)  # type: ignore[arg-type]
    load = LoadJob(1, b"", 0, "warm", 0, 1.0, (), struct.pack("<2I", 3, 4), sync=waited_for)
    side.jobs[1] = InflightJob(load, None, [None])
    side._expire_loads(2.0)
    assert side.pending_results.received == (set() if waited_for else {"warm"})
    assert side.counts.loads_late == int(not waited_for)
    sync.close()
