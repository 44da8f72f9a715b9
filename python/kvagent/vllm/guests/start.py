"""The start of an engine with its guests, and which ones it has."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvagent.vllm import geometry as geo
from kvagent.vllm import internals
from kvagent.vllm.hooks import Guest, Joined, Start
from kvagent.vllm.link import Link
from kvagent.vllm.options import EAGER, LAZY, OFF, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvagent.registration import Registration
    from kvagent.vllm.geometry import Geometry, Identity, Ranks
    from kvagent.vllm.guests.cells import Cells
    from kvagent.vllm.guests.events import Events
    from kvagent.vllm.guests.parts import NodePart
    from kvagent.vllm.guests.sync import SyncLoads
    from kvagent.vllm.hooks import WorkerGuest
    from kvagent.vllm.options import Options
    from kvagent.vllm.worker.memory import ExtentsOf, Memory

ASYNC = "async"

log = logging.getLogger("vllm.kvagent")


class GuestStart(Start):
    """A start with guests: each method answers for those that the engine has."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        super().__init__(vllm_config, kv_cache_config, options)
        self._cells: Cells | None = None
        self._node: NodePart | None = None
        if self.part.count > 1:
            from kvagent.vllm.guests.parts import NodePart

            self.part = self._node = NodePart(self.part.index, self.part.count, self.part.world, self.part.tp)

    def following(self) -> int:
        """Return Geometry.following, of draft models that are served. Raise Unsupported."""
        from kvagent.vllm.guests.drafts import check_options, following_tokens

        tokens = following_tokens(self.vllm_config, self.kv_cache_config)
        check_options(tokens, self.options)
        return tokens

    def check(self, geometry: Geometry, kv_role: str) -> None:
        """Raise Unsupported or OptionError; an engine over several nodes has other options."""
        if geometry.states:
            from kvagent.vllm.guests.states import check_states

            check_states(self.vllm_config, geometry, self.options)
        if self._node is not None:
            self.options = self._node.check(self.vllm_config, geometry, self.options, kv_role)
        if self.options.share_tp or self.options.share_pp:
            from kvagent.vllm.guests.cells import cells

            shares = self.options.share_tp, self.options.share_pp
            self._cells = cells(self.vllm_config, self.kv_cache_config, *shares)
        if self.options.offload == LAZY and (reason := internals.missing(internals.LAZY)):
            log.warning("offload: lazy is eager here: %s", reason)
            self.options = replace(self.options, offload=EAGER)
        if self.options.offload == LAZY and not self.vllm_config.cache_config.enable_prefix_caching:
            log.warning("offload: lazy has no effect without prefix caching: every block is saved once it is computed")

    def distribution(self, whole: Ranks) -> tuple[Ranks, dict[str, str] | None]:
        """Return the shards and pairs of cells, if there are some."""
        if self._cells is None:
            return whole, None
        from kvagent.vllm.guests.cells import distribution

        return geo.Ranks(whole.world, self._cells.count), distribution(self._cells, self.kv_cache_config)

    def extents(self, rank: int) -> ExtentsOf | None:
        """Return what finds the extents of cells, or those of layers that wait for their part."""
        if self.options.layerwise:
            from kvagent.vllm.guests.sync import asynchronous_only, calling_layers, staged

            if not asynchronous_only(self.kv_cache_config):
                return partial(staged, calling=calling_layers(self.vllm_config))
        if self._cells is not None:
            from kvagent.vllm.guests.cells import cell_extents

            return partial(cell_extents, plan=self._cells, rank=rank)
        return None

    def scheduler(self, geometry: Geometry, world: int, *, saves: bool) -> Joined:
        """Return the guests of the scheduler's side."""
        from kvagent.vllm.guests.hints import tool_tokens

        config, transfer = self.vllm_config, self.vllm_config.kv_transfer_config
        return joined(
            self.options, geometry, world=world, saves=saves, media=self._media(),
            multimodal=config.model_config.multimodal_config is not None, lora=config.lora_config is not None,
            engine_id=str(transfer.engine_id), tp_size=self.part.tp, waits=self._waits(geometry),
            step_tokens=int(config.scheduler_config.max_num_batched_tokens), events=self._events(),
            parts=self.part.count, tool_tokens=tool_tokens(config.model_config),
        )  # fmt: skip

    def worker(
        self, memory: Memory, rank: int, registration: Callable[[], Registration], identity: Callable[[], Identity]
    ) -> Sequence[WorkerGuest]:
        """Return the guests of a worker."""
        found: list[WorkerGuest] = []
        if self.vllm_config.lora_config is not None:
            from kvagent.vllm.guests.adapters import listen

            found += [one for one in [listen(self.vllm_config.lora_config)] if one is not None]
        if self.options.load_mode != ASYNC:
            from kvagent.vllm.guests.sync import StepWaits

            found.append(StepWaits(self.options.sync_wait_ms / 1e3, memory.stages))
        if self.part.index and rank == self.part.ranks[0]:
            from kvagent.vllm.guests.nodes import Delegate

            link = Link(
                self.options.socket_dir, f"delegate of node {self.part.index}", registration, pool=self.options.pool
            )
            link.wait(self.options.start_wait_ms / 1e3)
            found.append(Delegate(link, self.options, self.part.index, identity))
        return found

    @property
    def _name(self) -> str:
        return str(self.vllm_config.kv_transfer_config.kv_connector)

    def _media(self) -> str:
        """Return how requests with items are keyed: an item's encoder output may come from another
        engine and another content.
        """
        elsewhere = self.options.media != "trust" and self.vllm_config.ec_transfer_config is not None
        return "bypass" if elsewhere else self.options.media

    def _waits(self, geometry: Geometry) -> SyncLoads | None:
        """Return which loads steps wait for, if they are to wait for some.

        Raise OptionError where a failed load would not be handled right.
        """
        if self.options.load_mode == ASYNC:
            return None
        from kvagent.vllm.guests.sync import SyncLoads, asynchronous_only, token_bytes

        scheduler = internals.constructing(lambda one: hasattr(one, "_preempt_request"))
        reason = asynchronous_only(self.kv_cache_config) or internals.missing(internals.WAITS)
        if not reason and scheduler is None:
            reason = "vLLM's scheduler is not accessible"
        if not reason and scheduler is not None:
            if scheduler.vllm_config.kv_transfer_config.kv_connector == self._name:
                size = token_bytes(self.kv_cache_config)
                return SyncLoads(self.options, geometry, size, internals.Scheduler(scheduler))
            reason = "another connector could save what is computed before a load has succeeded"
        if self.options.load_mode == "sync":
            raise OptionError(f"load_mode: sync, allowed is async or auto where {reason}")
        log.info("load_mode: auto: every load is asynchronous, since %s", reason)
        return None

    def _events(self) -> Events | None:
        """Return the guest that makes KV events, if the engine publishes some."""
        config = self.vllm_config.kv_events_config
        if self.options.events == OFF or config is None or not config.enable_kv_cache_events:
            return None
        if self.part.count > 1:
            log.info("KV events tell of the engine's own cache alone: no agent has whole blocks of it")
            return None
        from vllm.v1.engine import core  # these modules exist only in the process of the scheduler

        from kvagent.vllm.guests.events import EventForm, Events, Waker

        wake = internals.waker(core)
        return Events(EventForm(), Waker(wake) if wake is not None else None)


def joined(
    options: Options, geometry: Geometry, *, world: int = 1, saves: bool = True, engine_id: str = "", tp_size: int = 1,
    parts: int = 1, media: str = "content", multimodal: bool = True, lora: bool = True,
    step_tokens: int = 0, waits: SyncLoads | None = None, events: Events | None = None,
    tool_tokens: frozenset[int] = frozenset(),
) -> Joined:  # fmt: skip
    """Return the guests of an engine, in the order in which they hear of a request.

    ``parts``: the nodes that it is on. ``media``: how requests with items are keyed, as the option.
    ``step_tokens``: the most that a step computes. ``waits``: which loads steps wait for, if there
    are some. ``events``: what makes KV events. ``tool_tokens``: those that call a tool.
    """
    from kvagent.vllm.guests.hints import Hints
    from kvagent.vllm.guests.switches import Switches

    hints = Hints(options.remote_wait_ms / 1e3, tool_tokens, nodes=parts)
    one = Joined([Switches(hints, transfers=options.transfers)])  # it reads what clients ask for
    one.guests += [*_keys(geometry, world, media, multimodal=multimodal, lora=lora), hints]
    if media == "trust":
        one.answered = frozenset({"mm_features"})
    if options.transfers:
        from kvagent.vllm.guests.transfers import Transfers

        one.guests.append(Transfers(options, engine_id, tp_size, saves=saves))
    if geometry.states:
        from kvagent.vllm.guests.states import States

        one.guests.append(States(geometry))
    if events is not None:
        one.guests.append(events)
        one.attached = None if events.waker is None else events.waker.wake
    if parts > 1:
        from kvagent.vllm.guests.nodes import JointSession

        one.session = partial(JointSession, parts=parts)
    if options.offload == LAZY:
        from kvagent.vllm.guests.lazy import saves_of

        one.saves = saves_of(options, step_tokens)
    if waits is not None:
        one.waits = waits
        one.guests.append(waits)
    return one


def _keys(geometry: Geometry, world: int, media: str, *, multimodal: bool, lora: bool) -> list[Guest]:
    """Return the guests that key blocks by more than their tokens."""
    found: list[Guest] = []
    if media != "trust":
        from kvagent.vllm.guests.media import Media

        found.append(Media(media, geometry.hash_tokens, multimodal=multimodal))
    if lora:
        from kvagent.vllm.guests.adapters import Adapters

        found.append(Adapters(world))
    if geometry.following:
        from kvagent.vllm.guests.drafts import Following

        found.append(Following())
    return found
