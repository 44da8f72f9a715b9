"""The configuration of the engine whose OffloadingConnector is being constructed.

vLLM hands a tier no VllmConfig. Its connector has it, and makes its tiers in its own ``__init__``;
so the plugin keeps it at hand while that runs. Afterwards the connector passes on to its tiers what
the engine core says of the weights (weight_changes), and what they need for KV events, which it
publishes (events).
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvagent.vllm.internals import around, replace

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from kvagent.vllm.tier.events import TierEvents
    from kvagent.vllm.tier.manager import KVAgentTier

OFFLOADING = "OffloadingConnector"


@dataclass(slots=True)
class Construction:
    """A connector under construction."""

    vllm_config: Any
    kv_cache_config: Any
    listeners: list[KVAgentTier] = field(default_factory=list)
    """The tiers that it has made."""


_now: ContextVar[Construction | None] = ContextVar("kvagent_construction", default=None)


def under_construction() -> Construction | None:
    """Return the connector that is being constructed; None without the plugin."""
    return _now.get()


def observe(registry: MutableMapping[str, Callable[[], Any]]) -> None:
    """Have an OffloadingConnector keep its ``__init__``'s arguments at hand while that runs."""
    load = registry.get(OFFLOADING)
    if load is None:
        return

    def loading() -> Any:
        connector = load()
        replace(connector, "__init__", _constructing)
        return connector

    registry[OFFLOADING] = loading


def _constructing(construct: Callable[..., None]) -> Callable[..., None]:
    def constructing(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(construct).bind(self, *args, **kwargs).arguments
        construction = Construction(given["vllm_config"], given["kv_cache_config"])
        token = _now.set(construction)
        try:
            construct(self, *args, **kwargs)
        finally:
            _now.reset(token)
        if construction.listeners:
            _forward(self, construction.listeners)
        for source in [one.events for one in construction.listeners if one.events is not None]:
            _publish(self, source)

    return constructing


def _forward(connector: Any, listeners: list[KVAgentTier]) -> None:
    """Give a connector the methods by which weight_changes notifies, for its tiers."""

    def notify(name: str, *args: Any) -> None:
        for listener in listeners:
            getattr(listener, name)(*args)

    for name in ("before_weights_call", "weights_named", "before_reset"):
        setattr(connector, name, partial(notify, name))


def _publish(connector: Any, source: TierEvents) -> None:
    """Have a connector publish a source's events after its own."""
    events, arrived, bind = connector.take_events, connector.on_new_request, connector.bind_kv_cache_manager

    def take_events() -> list[Any]:
        return [*events(), *source.take()]

    def on_new_request(request: Any) -> None:
        source.begin(request)
        arrived(request)

    def bind_kv_cache_manager(kv_cache_manager: Any) -> None:
        source.bind(kv_cache_manager)
        bind(kv_cache_manager)
        around(
            kv_cache_manager.block_pool, "reset_prefix_cache", lambda succeeded: source.cleared() if succeeded else None
        )

    connector.take_events = take_events
    connector.on_new_request = on_new_request
    connector.bind_kv_cache_manager = bind_kv_cache_manager
