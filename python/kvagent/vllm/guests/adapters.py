"""LoRA adapters: a request's blocks are keyed by its adapter's content, not by its name.

vLLM keeps what it loaded under an adapter's number, whatever a request's name and path say, and
whatever has become of the files since. So the content is learned where vLLM loads it: its files are
stated before, and digested after, when they are still in the page cache. The digest counts only if
they are as they were, and had not changed shortly before the load.

Where vLLM pins no memory (on CPUs), what it keeps of an adapter are the pages of its files, which
it copies into a slot each time that the adapter gets one (max_loras, max_cpu_loras). So a file that
is written to in place changes a loaded adapter, and the files have to stay as they were.

The keys of a request's blocks are hashes of the hashes that it would have without an adapter and of
the digest of the content. Until all workers have reported the same digest, its requests are
uncached.

The engine's own cache goes by vLLM's hashes. Under one name it may have blocks of several contents
if the content changed, or if the name's requests had several numbers. A request that finds such
blocks must not be saved: the caller is told to treat all blocks as stale (``new_weights``).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvagent import files
from kvagent.files import State, Unreadable
from kvagent.vllm import internals
from kvagent.vllm.hooks import Guest, WorkerGuest
from kvagent.vllm.internals import further_hashes
from kvagent.vllm.plan import SaveJob

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvagent.vllm.plan import LoadJob, Report
    from kvagent.vllm.scheduler.requests import Tracked


READ = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt",
        "new_embeddings.safetensors", "new_embeddings.bin")  # fmt: skip
"""The files of an adapter that vLLM may read."""
SETTLED_NS = 50_000_000
"""A file that changed later than so before a load may change again under the same time stamp."""
MAX_ADAPTERS = 4096  # whose content is known; vLLM keeps fewer loaded
_CONFIGURED = ("lora_dtype", "target_modules", "enable_mixed_moe_lora_format", "enable_moe_shared_loras")
"""The options of vLLM's LoRAConfig that change what an adapter computes."""

log = logging.getLogger("vllm.kvagent")

ADAPTERS = "adapters"
"""The name under which workers tell what they have loaded."""


@dataclass(slots=True)
class LoadedAdapter:
    """A LoRA adapter that a worker has loaded: other content than before, if any, under its number.
    ``serial`` is greater for later content, ``digest`` empty if that cannot be determined.
    """

    number: int
    serial: int
    digest: bytes = b""


class LoadedAdapters(WorkerGuest):
    """The adapters that one worker has loaded.

    The serial of a content is the count of loads, of whatever adapter, when it was first loaded. So
    it never comes back, ranks agree on it, and the scheduler's plans can name what they are for.
    """

    name = ADAPTERS

    def __init__(self, config: Any, *, mapped: bool = False) -> None:
        """``config``: vLLM's LoRAConfig, the very object that the worker's manager has.

        ``mapped``: what vLLM keeps of an adapter are the pages of its files.
        """
        self.config = config
        self._mapped = mapped
        self._loads = 0
        self._serials: OrderedDict[int, int] = OrderedDict()
        self._states: dict[int, tuple[tuple[str, State], ...]] = {}
        self._requests: dict[int, Any] = {}  # the LoRARequests with which they were loaded
        self._manager: Any = None  # a weak reference to vLLM's manager
        self._news: list[LoadedAdapter] = []

    def serves(self, job: SaveJob | LoadJob) -> bool:
        """Return whether the adapters that a job depends on are still loaded as of these serials.
        What follows a load is computed with what is loaded again, of files that are the same, if
        vLLM has dropped one.
        """
        for number, serial in job.depends:
            if self._serials.get(number) != serial or (self._mapped and self._changed(number)):
                return False
        if isinstance(job, SaveJob):
            return True
        manager = None if self._manager is None else self._manager()
        kept = () if manager is None else manager.list_adapters()
        return manager is not None and all(number in kept or not self._changed(number) for number, _ in job.depends)

    def news(self) -> tuple[LoadedAdapter, ...]:
        """Return what has been loaded since the last call."""
        news, self._news = tuple(self._news), []
        return news

    def close(self) -> None:
        """Observe no more loads."""
        _listening.discard(self)

    @staticmethod
    def states(request: Any) -> tuple[tuple[str, State], ...]:
        """Return the states of the files that vLLM reads for a LoRARequest; none if they are not
        here.
        """
        with contextlib.suppress(OSError):
            if not getattr(request, "tensorizer_config_dict", None):  # else vLLM reads another folder
                return _states(_folder(request))
        return ()

    def loaded(self, manager: Any, request: Any, before: tuple[tuple[str, State], ...], begun: int) -> None:
        """Record that vLLM's manager has loaded an adapter, whose files were in these states
        ``before``.
        """
        number = int(request.lora_int_id)
        self._manager, self._requests[number] = weakref.ref(manager), request
        self._loads += 1
        settled = all(state.changed + SETTLED_NS < begun for _, state in before)
        stable = bool(before) and settled and self.states(request) == before
        if stable and self._states.get(number) == before:
            return  # vLLM had dropped it, or was told to load it again
        digest = self._digest(request, before) if stable else b""
        self._states[number] = before if digest else ()
        serial = self._serials[number] = self._loads
        self._serials.move_to_end(number)
        if len(self._serials) > MAX_ADAPTERS:
            oldest, _ = self._serials.popitem(last=False)
            del self._states[oldest], self._requests[oldest]
        self._news.append(LoadedAdapter(number, serial, digest))
        if not digest:
            log.info("LoRA adapter %s: its files are not here, or just changed: it is not cached", request.lora_name)

    def unknown(self, request: Any, error: Exception) -> None:
        """Handle an error: what vLLM loads for a request is not known, and its jobs fail."""
        log.error("LoRA adapter %s is not cached: %s", request.lora_name, error, exc_info=error)
        self._serials.pop(int(request.lora_int_id), None)

    def _changed(self, number: int) -> bool:
        """Return whether an adapter's files are not as they were when it was loaded."""
        return self.states(self._requests[number]) != self._states[number]

    def _digest(self, request: Any, states: tuple[tuple[str, State], ...]) -> bytes:
        """Return the digest of an adapter; empty if its files are not in these states any more."""
        folder = _folder(request)
        about = [f"LoRA {getattr(request, 'is_3d_lora_weight', False)}"]
        about += [f"{name} {getattr(self.config, name, None)}" for name in _CONFIGURED]
        try:
            found = {name: files.files(folder / name)[name] for name, _ in states}
            digest = files.digest(found, about, None)
            return hashlib.sha256(digest.encode()).digest() if _states(folder) == states else b""
        except (Unreadable, OSError) as error:
            log.warning("LoRA adapter %s: %s", request.lora_name, error)
            return b""


_listening: weakref.WeakSet[LoadedAdapters] = weakref.WeakSet()


def listen(config: Any) -> LoadedAdapters | None:
    """Return the adapters of a worker from now on. None: this vLLM does not let them be seen."""
    from vllm.lora import worker_manager
    from vllm.platforms import current_platform

    manager = worker_manager.WorkerLoRAManager
    reason = internals.missing(internals.ADAPTERS)
    if reason or any("_load_adapter" in vars(cls) for cls in manager.__subclasses__()):
        log.warning("LoRA: this vLLM loads adapters in another way: their requests are not cached. %s", reason)
        return None
    internals.replace(manager, "_load_adapter", _observed)
    adapters = LoadedAdapters(config, mapped=not current_platform.is_pin_memory_available())
    _listening.add(adapters)
    return adapters


def _observed(load: Any) -> Any:
    """Return vLLM's method that loads an adapter, with a record of each load."""

    def observed(self: Any, lora_request: Any) -> Any:
        begun, before = time.time_ns(), {}
        for one in [one for one in _listening if one.config is self.lora_config]:
            try:
                before[one] = one.states(lora_request)
            except Exception as error:  # noqa: BLE001
                one.unknown(lora_request, error)
        loaded = load(self, lora_request)
        for one, states in before.items():
            try:
                one.loaded(self, lora_request, states, begun)
            except Exception as error:  # noqa: BLE001
                one.unknown(lora_request, error)
        return loaded

    return observed


def _folder(request: Any) -> Path:
    """Return the folder that vLLM reads a path as; one of the hub is not found."""
    return Path(str(request.lora_path)).expanduser().absolute()


def _states(folder: Path) -> tuple[tuple[str, State], ...]:
    """Return the states of the files that are there. Each is opened: a network's file system may
    answer from memory else.
    """
    found = []
    for name in READ:
        try:
            with (folder / name).open("rb") as file:
                found.append((name, State.of(os.fstat(file.fileno()))))
        except FileNotFoundError:
            continue
    return tuple(found)


MAX_KNOWN = 4096  # adapters, and names
ADAPTER = "lora_request"  # the reason for which a request is barred
SEVERAL = 0  # in place of a number: a name's requests had several at once


@dataclass(slots=True)
class Content:
    """What the workers have loaded under a number. ``digest`` is empty unless all of them have
    reported the same.
    """

    serial: int
    digests: list[bytes] = field(default_factory=list)
    digest: bytes = b""


class Adapters(Guest):
    """The adapters of one engine, and the names under which its requests use them."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._contents: OrderedDict[int, Content] = OrderedDict()
        self._dropped = False  # whether a content was dropped from it
        self._alive: dict[str, Counter[int]] = {}  # by name: the numbers of its requests
        self._last: OrderedDict[str, int] = OrderedDict()  # by name: the number of its last request, or SEVERAL
        self._forgot = False  # whether a name was dropped from it
        self._never: set[Tracked] = set()  # requests that are not keyed, whatever becomes known

    def seen(self, tracked: Tracked) -> None:
        """Key a request that has arrived, if the adapter's content is known."""
        request = tracked.request
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return
        tracked.barred.add(ADAPTER)
        # The encoder may have an adapter too, a session's later turns replace hashes, and a request
        # may tell vLLM to load its adapter again in each of its steps.
        others = getattr(request, "mm_features", None), getattr(request, "resumable", False)
        if any(others) or getattr(lora, "load_inplace", False):
            self._never.add(tracked)
        self._name(lora)
        if not self.key(tracked):
            self.side.counts.adapters_unknown += 1

    def _name(self, lora: Any) -> None:
        """Note that a request uses a name. If others use it for another adapter, none is keyed; if
        others did, the engine's own cache may have blocks of that one.
        """
        name, number = str(lora.lora_name), int(lora.lora_int_id)
        alive = self._alive.setdefault(name, Counter())
        alive[number] += 1
        before = self._last.pop(name, SEVERAL if self._forgot else number)
        self._last[name] = number if len(alive) == 1 else SEVERAL
        if len(self._last) > MAX_KNOWN:
            self._last.popitem(last=False)
            self._forgot = True
        if len(alive) > 1:
            for other in self._users():
                if other.request.lora_request.lora_name == name:
                    self._unkey(other)
                    self._never.add(other)
        elif before != number:
            self.side.new_weights()

    def heard(self, report: Report, over: Any, now: float) -> None:  # noqa: ARG002
        """Key the requests whose adapters have become known, after the others were unkeyed."""
        news = report.news.get(ADAPTERS)
        if not news:
            return
        changed, known, stale = self.report(news)
        if stale:
            self.side.new_weights()
        for tracked in self._users():
            number = tracked.request.lora_request.lora_int_id
            if number in changed:
                self._unkey(tracked)
            if number in known and ADAPTER in tracked.barred:
                self.key(tracked)

    def ended(self, tracked: Tracked) -> None:
        """Forget a request."""
        self._never.discard(tracked)
        if (lora := getattr(tracked.request, "lora_request", None)) is not None:
            name = str(lora.lora_name)
            self._alive[name] -= Counter([int(lora.lora_int_id)])  # drops what has no request left
            if not self._alive[name]:
                del self._alive[name]

    def _users(self) -> list[Tracked]:
        return [one for one in self.side.requests.values() if getattr(one.request, "lora_request", None)]

    def _unkey(self, tracked: Tracked) -> None:
        self.side.bar(tracked, ADAPTER)
        if isinstance(tracked.request, Adapted):
            tracked.request = tracked.request.plain

    def key(self, tracked: Tracked) -> bool:
        """Key a request by the content of its adapter. Return False if that is not known."""
        number = int(tracked.request.lora_request.lora_int_id)
        content = self._contents.get(number)
        if content is None or not content.digest or tracked in self._never:
            return False
        tracked.request = Adapted(tracked.request, content.digest)
        tracked.depends = ((number, content.serial),)
        self.side.unbar(tracked, ADAPTER)
        return True

    def report(self, some: Iterable[LoadedAdapter]) -> tuple[set[int], set[int], bool]:
        """Handle what workers have reported. Return the numbers whose content has changed, those
        whose content has become known, and whether the engine's own cache may have blocks of
        another one.
        """
        changed: set[int] = set()
        became: set[int] = set()
        stale = False
        for one in some:
            content = self._contents.get(one.number)
            if content is None or one.serial > content.serial:
                changed.add(one.number)
                stale |= self._dropped or content is not None
                self._contents[one.number] = content = Content(one.serial)
                self._contents.move_to_end(one.number)
                if len(self._contents) > MAX_KNOWN:
                    self._contents.popitem(last=False)
                    self._dropped = True
            if one.serial == content.serial:
                content.digests.append(one.digest)
                if one.digest and content.digests == [one.digest] * self._world:
                    content.digest = one.digest
                    became.add(one.number)
        return changed, became, stale


class _Plain:
    """A request of vLLM as one without an adapter, with the hashes that it has then."""

    lora_request = None

    def __init__(self, request: Any) -> None:
        self._request = request
        self.block_hashes: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class Adapted:
    """A request of vLLM whose block hashes depend on its adapter's content, whatever its name."""

    def __init__(self, request: Any, digest: bytes) -> None:
        self.plain = request
        self._unadapted = _Plain(request)
        self._digest = digest
        self._keys: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    @property
    def block_hashes(self) -> list[bytes]:
        """Return keys in place of vLLM's hashes, as many and as long as there are by now."""
        if len(self._keys) < len(self.plain.block_hashes):
            hashes = self._unadapted.block_hashes
            hashes += further_hashes(self.plain, self._unadapted)
            new = hashes[len(self._keys) :]
            self._keys += [hashlib.sha256(self._digest + one).digest()[: len(one)] for one in new]
        return self._keys
