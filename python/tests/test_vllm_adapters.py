"""Requests with LoRA adapters: keyed by the content that the workers have loaded."""

from __future__ import annotations

import itertools
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent import files
from kvagent.vllm.guests import adapters as loading
from kvagent.vllm.guests.adapters import Adapters, LoadedAdapter, LoadedAdapters
from tests.agent import AgentProcess, eventually
from tests.sides import guest
from tests.simulated import BLOCK, SimulatedEngine
from tests.test_vllm_sides import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CONFIG = SimpleNamespace(lora_dtype="float32", target_modules=None)


class Engine(SimulatedEngine):
    """An engine whose worker loads adapters when the test says so."""

    def __init__(self, agent: AgentProcess, name: str, *, mapped: bool = False, **more: Any) -> None:
        self.adapters = LoadedAdapters(CONFIG, mapped=mapped)
        self.kept: set[int] = set()
        """The adapters that the worker keeps loaded."""
        super().__init__(agent, name, adapters=self.adapters, **more)

    def load_adapter(self, lora: Any) -> None:
        """Load an adapter as vLLM does. The next step reports it."""
        before, begun = self.adapters.states(lora), time.time_ns()
        self.adapters.loaded(self, lora, before, begun)
        self.kept.add(lora.lora_int_id)

    def list_adapters(self) -> set[int]:
        """Return the loaded adapters, like vLLM's manager."""
        return self.kept

    def close(self) -> None:
        super().close()
        self.adapters.close()


@pytest.fixture
def engines(agent: AgentProcess) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(name: str = "one", **more: Any) -> Engine:
        made.append(Engine(agent, name, **more))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def write(folder: Path, content: str) -> Path:
    """Write an adapter, by replacing its files, and wait until it counts as settled."""
    folder.mkdir(exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "new").write_text(f"{content} {name}")
        (folder / "new").rename(folder / name)
    (folder / "README.md").write_text(str(folder))
    settle(folder)
    return folder


def settle(folder: Path) -> None:
    changed = max(one.stat().st_ctime_ns for one in folder.iterdir())
    eventually(lambda: time.time_ns() > changed + 2 * loading.SETTLED_NS, "settled files")


def adapter(path: Path, number: int = 1, name: str = "a") -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path))


def start(engine: Engine, name: str, prompt: str, blocks: int, salt: int, lora: Any) -> Any:
    """Let a request arrive and get blocks, which a step will compute."""
    request = engine.request(name, prompt, blocks, lora_request=lora)
    assert engine.matched(request) == 0
    engine.admit(request)
    engine.fill(request, salt)
    return request


def test_equal_adapters_share_whatever_their_names(
    engines: Callable[..., Engine], agent: AgentProcess, tmp_path: Path
) -> None:
    first, second = engines("one"), engines("two")
    one = adapter(write(tmp_path / "x", "equal"), 1, "a")
    two = adapter(write(tmp_path / "y", "equal"), 7, "b")
    for engine, lora in ((first, one), (second, two)):
        engine.load_adapter(lora)
        engine.step()
    first.save("bare", "p", 4, 1)
    first.save("adapted", "p", 4, 2, lora_request=one)
    assert agent.status()["blocks_stored"] == 8
    request = second.request("other", "p", 4, lora_request=two)
    second.admit(request, second.matched(request))
    second.until_received(request)
    assert second.scheduler.counts.tokens_loaded == 4 * BLOCK
    assert second.holds(request, 2, 4)
    load(second, "bare", "p", 4, 1)


def test_different_adapters_never_share_though_their_names_are_equal(
    engines: Callable[..., Engine], tmp_path: Path
) -> None:
    first, second = engines("one"), engines("two")
    one, two = adapter(write(tmp_path / "x", "one")), adapter(write(tmp_path / "y", "two"))
    for engine, lora in ((first, one), (second, two)):
        engine.load_adapter(lora)
        engine.step()
    first.save("adapted", "p", 4, 2, lora_request=one)
    assert second.matched(second.request("other", "p", 4, lora_request=two)) == 0
    assert second.scheduler.counts.lookups == 1
    assert first.matched(first.request("same", "p", 4, lora_request=one)) == 4 * BLOCK


def test_a_request_is_uncached_until_its_adapter_is_known(
    engines: Callable[..., Engine], agent: AgentProcess, tmp_path: Path
) -> None:
    """The step that first needs an adapter loads it; what it computed is saved once it is known."""
    engine, lora = engines(), adapter(write(tmp_path / "x", "one"))
    request = start(engine, "first", "p", 4, 3, lora)
    engine.load_adapter(lora)
    engine.step((request, request.num_tokens))
    assert engine.scheduler.counts.lookups == 0
    engine.step((request, 1))
    engine.step((request, 1))
    engine.quiet()
    engine.scheduler.finished(request, normally=True)
    assert agent.status()["blocks_stored"] == 4
    assert engine.scheduler.counts.adapters_unknown == 1
    again = engine.request("again", "p", 4, lora_request=lora)
    engine.admit(again, engine.matched(again))
    engine.until_received(again)
    assert engine.holds(again, 3, 4)


def test_an_adapter_replaced_under_its_name(
    engines: Callable[..., Engine], agent: AgentProcess, tmp_path: Path
) -> None:
    """Neither content gets what the other computed, and a request across both is not saved."""
    engine, lora = engines(), adapter(write(tmp_path / "x", "old"))
    engine.load_adapter(lora)
    engine.step()
    engine.save("old", "p", 4, 1, lora_request=lora)
    running = engine.request("running", "q", 6, lora_request=lora)
    assert engine.matched(running) == 0
    engine.admit(running)
    engine.step((running, 2 * BLOCK))
    engine.quiet()
    stored = agent.status()["blocks_stored"]
    write(tmp_path / "x", "new")
    engine.load_adapter(lora)
    engine.step((running, BLOCK))
    engine.step((running, 3 * BLOCK))
    engine.quiet()
    engine.scheduler.finished(running, normally=True)
    assert agent.status()["blocks_stored"] == stored, "a request of two contents was saved"
    engine.save("new", "p", 4, 2, lora_request=lora)
    assert engine.scheduler.counts.tokens_promised == 0, "blocks of the old content are found"
    other = engines("other")
    for content, salt in (("old", 1), ("new", 2)):
        loaded = adapter(write(tmp_path / content, content), salt, content)
        other.load_adapter(loaded)
        other.step()
        request = other.request(content, "p", 4, lora_request=loaded)
        external = other.matched(request)
        assert external == 4 * BLOCK, (content, external)
        other.admit(request, external)
        other.until_received(request)
        assert other.holds(request, salt, 4)


def test_a_change_that_the_scheduler_does_not_know_of(
    engines: Callable[..., Engine], agent: AgentProcess, tmp_path: Path
) -> None:
    """The step that is planned for the old content loads the new one: it moves no block."""
    engine, lora = engines(), adapter(write(tmp_path / "x", "old"))
    engine.load_adapter(lora)
    engine.step()
    engine.save("old", "p", 4, 1, lora_request=lora)
    running = engine.request("running", "q", 4, lora_request=lora)
    assert engine.matched(running) == 0
    loading_one = engine.request("loading", "p", 4, lora_request=lora)
    external = engine.matched(loading_one)
    assert external == 4 * BLOCK
    engine.admit(running)
    engine.admit(loading_one, external)
    stored = agent.status()["blocks_stored"]
    write(tmp_path / "x", "new")
    engine.load_adapter(lora)
    step = engine.step((running, running.num_tokens))
    assert [job.depends for job in (*step.plan.saves, *step.plan.loads)] == [((1, 1),), ((1, 1),)]
    results = step.results if step.results.received else engine.until_received(loading_one)
    assert results.bad_blocks == {block.block_id for block in engine.tables["loading"][:4]}
    engine.quiet()
    assert agent.status()["blocks_stored"] == stored
    engine.scheduler.finished(running, normally=True)


def test_a_load_that_ends_after_its_adapter_has_changed_fails(
    engines: Callable[..., Engine], agent: AgentProcess, tmp_path: Path
) -> None:
    engine, lora = engines(), adapter(write(tmp_path / "x", "old"))
    engine.load_adapter(lora)
    engine.step()
    engine.save("old", "p", 4, 1, lora_request=lora)
    request = engine.request("loading", "p", 4, lora_request=lora)
    engine.admit(request, engine.matched(request))
    agent.freeze()
    assert not engine.step().results.received
    write(tmp_path / "x", "new")
    engine.load_adapter(lora)
    agent.thaw()
    assert engine.until_received(request).bad_blocks == {block.block_id for block in engine.tables["loading"][:4]}


def gone(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_model.safetensors").unlink()


def touched(folder: Path) -> None:
    os.utime(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("change", [gone, touched])
def test_files_that_are_not_what_was_loaded(
    engines: Callable[..., Engine], tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are digested they may become those of another adapter."""
    engine, folder = engines(), write(tmp_path / "x", "one")
    lora, digest = adapter(folder), files.digest

    def digested(*given: Any) -> str:
        found = digest(*given)
        change(folder)
        return found

    monkeypatch.setattr(files, "digest", digested)
    engine.load_adapter(lora)
    engine.save("one", "p", 4, 1, lora_request=lora)
    assert (engine.scheduler.counts.saves_planned, engine.scheduler.counts.lookups) == (0, 0)
    assert contents(guest(engine.scheduler, Adapters)) == ()


@pytest.mark.parametrize("change", [gone, touched])
def test_files_that_change_during_or_just_before_a_load(
    engines: Callable[..., Engine], tmp_path: Path, change: Callable[[Path], None]
) -> None:
    engine, folder = engines(), write(tmp_path / "x", "one")
    before, begun = engine.adapters.states(adapter(folder)), time.time_ns()
    change(folder)
    engine.adapters.loaded(engine, adapter(folder), before, begun)  # during
    before = engine.adapters.states(adapter(folder))
    soonest = max((state.changed for _, state in before), default=0) + loading.SETTLED_NS
    engine.adapters.loaded(engine, adapter(folder), before, soonest)  # before
    assert [one.digest for one in engine.adapters.news()] == [b"", b""]
    if change is touched:
        settle(folder)
        engine.load_adapter(adapter(folder))
        assert [bool(one.digest) for one in engine.adapters.news()] == [True]


def test_a_folder_that_is_another_at_the_load(engines: Callable[..., Engine], tmp_path: Path) -> None:
    """What is loaded again has another content then, and is not known."""
    engine, link = engines(), tmp_path / "link"
    folders = [write(tmp_path / content, content) for content in ("one", "two")]
    link.symlink_to(folders[0])
    engine.load_adapter(adapter(link))
    assert [bool(one.digest) for one in engine.adapters.news()] == [True]
    before, begun = engine.adapters.states(adapter(link)), time.time_ns()
    link.unlink()
    link.symlink_to(folders[1])
    engine.adapters.loaded(engine, adapter(link), before, begun)
    assert [one.digest for one in engine.adapters.news()] == [b""]


def test_an_adapter_that_was_dropped_and_replaced(engines: Callable[..., Engine], tmp_path: Path) -> None:
    """vLLM loads it when it computes, after the blocks have come."""
    engine, lora = engines(), adapter(write(tmp_path / "x", "old"))
    engine.load_adapter(lora)
    engine.step()
    engine.save("old", "p", 4, 1, lora_request=lora)
    engine.kept.clear()
    request = engine.request("dropped", "p", 4, lora_request=lora)
    engine.admit(request, engine.matched(request))
    assert not engine.until_received(request).bad_blocks
    engine.scheduler.finished(request, normally=False)
    write(tmp_path / "x", "new")
    request = engine.request("replaced", "p", 4, lora_request=lora)
    engine.admit(request, engine.matched(request))
    bad = {block.block_id for block in engine.tables["replaced"][:4]}
    assert engine.until_received(request).bad_blocks == bad


@pytest.mark.parametrize("mapped", [True, False])
def test_an_adapter_whose_files_are_written_to_in_place(
    engines: Callable[..., Engine], agent: AgentProcess, tmp_path: Path, mapped: bool
) -> None:
    """Where vLLM keeps their pages, it copies those from then on when the adapter gets a slot, and
    loads nothing.
    """
    engine, lora = engines(mapped=mapped), adapter(write(tmp_path / "x", "one"))
    engine.load_adapter(lora)
    engine.step()
    engine.save("before", "p", 4, 1, lora_request=lora)
    loading_one = engine.request("loading", "p", 4, lora_request=lora)
    external = engine.matched(loading_one)
    assert external == 4 * BLOCK
    (tmp_path / "x" / "adapter_model.safetensors").write_text("two")
    engine.admit(loading_one, external)
    results = engine.until_received(loading_one)
    assert bool(results.bad_blocks) == mapped
    running = start(engine, "after", "q", 4, 2, lora)
    engine.step((running, running.num_tokens))
    engine.quiet()
    engine.scheduler.finished(running, normally=False)
    assert agent.status()["blocks_stored"] == (4 if mapped else 8)


def test_a_request_that_loads_its_adapter_again_is_uncached(
    engines: Callable[..., Engine], agent: AgentProcess, tmp_path: Path
) -> None:
    """vLLM does so in the request's own steps, after it was looked up."""
    engine, lora = engines(), adapter(write(tmp_path / "x", "old"))
    engine.load_adapter(lora)
    engine.step()
    engine.save("old", "p", 4, 1, lora_request=lora)
    lora.load_inplace = True
    engine.save("again", "p", 4, 1, lora_request=lora)
    assert engine.scheduler.counts.lookups == 1
    assert agent.status()["blocks_stored"] == 4


def test_an_adapter_that_is_loaded_again_unchanged_stays_known(
    engines: Callable[..., Engine], agent: AgentProcess, tmp_path: Path
) -> None:
    """vLLM drops the adapter that was used longest ago."""
    engine, lora = engines(), adapter(write(tmp_path / "x", "one"))
    for _ in range(3):
        engine.load_adapter(lora)
        engine.step()
    assert contents(guest(engine.scheduler, Adapters)) == ((1, 1),)
    engine.save("one", "p", 4, 1, lora_request=lora)
    assert agent.status()["blocks_stored"] == 4


def test_one_name_with_two_adapters_at_once(
    engines: Callable[..., Engine], agent: AgentProcess, tmp_path: Path
) -> None:
    """The engine's own cache may give each the other's blocks: neither is saved or loaded."""
    engine = engines()
    one, two = adapter(write(tmp_path / "x", "one"), 1), adapter(write(tmp_path / "y", "two"), 2)
    for lora in (one, two):
        engine.load_adapter(lora)
    engine.step()
    engine.save("before", "p", 4, 1, lora_request=one)
    assert agent.status()["blocks_stored"] == 4
    first = start(engine, "first", "f", 5, 1, adapter(tmp_path / "x", 1, "b"))
    second = engine.request("second", "q", 5, lora_request=adapter(tmp_path / "y", 2, "b"))
    assert engine.matched(second) == 0
    engine.admit(second)
    engine.pool.blocks[40].block_hash = b"of either"
    engine.step((first, first.num_tokens), (second, second.num_tokens))
    engine.quiet()
    assert agent.status()["blocks_stored"] == 4
    assert not engine.scheduler.blocks.is_stale(engine.pool.blocks[40])
    engine.scheduler.finished(first, normally=True)
    engine.scheduler.finished(second, normally=True)
    engine.save("after", "r", 4, 1, lora_request=adapter(tmp_path / "y", 2, "b"))
    assert engine.scheduler.blocks.is_stale(engine.pool.blocks[40]), "blocks of two adapters may be saved"
    assert agent.status()["blocks_stored"] == 8


def test_a_name_that_goes_to_another_adapter(engines: Callable[..., Engine], tmp_path: Path) -> None:
    """As with /v1/unload_lora_adapter and /v1/load_lora_adapter, which gives it another number."""
    engine = engines()
    one, two = adapter(write(tmp_path / "x", "one"), 1), adapter(write(tmp_path / "y", "two"), 2)
    for lora in (one, two):
        engine.load_adapter(lora)
    engine.step()
    engine.save("before", "p", 4, 1, lora_request=one)
    engine.pool.blocks[40].block_hash = b"of the first"
    assert engine.matched(engine.request("after", "p", 4, lora_request=two)) == 0
    assert engine.scheduler.blocks.is_stale(engine.pool.blocks[40])


def contents(adapters: Adapters) -> tuple[tuple[int, int], ...]:
    """Return the adapters whose content is known."""
    return tuple((number, one.serial) for number, one in adapters._contents.items() if one.digest)


def test_a_content_that_was_dropped_may_have_left_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvagent.vllm.guests.adapters.MAX_KNOWN", 1)
    adapters = Adapters(1)
    assert not adapters.report([LoadedAdapter(1, 1, b"1" * 32)])[2]
    assert not adapters.report([LoadedAdapter(2, 2, b"2" * 32)])[2]
    assert adapters.report([LoadedAdapter(1, 3)])[2], "the blocks of its other content may be saved"


def test_workers_that_have_loaded_different_contents() -> None:
    adapters, digests = Adapters(2), [bytes([i]) * 32 for i in range(3)]
    assert adapters.report([LoadedAdapter(1, 1, digests[0])]) == ({1}, set(), False)
    assert adapters.report([LoadedAdapter(1, 1, digests[1])]) == (set(), set(), False)
    assert contents(adapters) == ()
    both = list(itertools.repeat(LoadedAdapter(1, 2, digests[2]), 2))
    assert adapters.report(both) == ({1}, {1}, True), "blocks of the unknown content may be saved"
    assert contents(adapters) == ((1, 2),)
    assert adapters.report([LoadedAdapter(1, 1, digests[0])] * 2) == (set(), set(), False), "an old content is back"
    assert contents(adapters) == ((1, 2),)
    assert adapters.report([LoadedAdapter(1, 3)])[2]
    assert contents(adapters) == ()
