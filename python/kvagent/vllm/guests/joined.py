"""Which guests an engine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.vllm.hooks import Guest, Joined
from kvagent.vllm.options import LAZY

if TYPE_CHECKING:
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What the guests of an engine depend on."""

    options: Options
    geometry: Geometry
    world: int = 1
    saves: bool = True
    engine_id: str = ""
    tp_size: int = 1
    parts: int = 1
    """The nodes that it is on."""
    media: str = "content"
    """How requests with items are keyed, as the option."""
    multimodal: bool = True
    lora: bool = True
    """Whether requests may have LoRA adapters."""
    token_bytes: float = 0.0
    """What a rank has of a token."""
    step_tokens: int = 0
    """The most tokens that a step computes."""
    tool_tokens: frozenset[int] = frozenset()
    """Of which an output that calls a tool has one."""
    preemption: Any = None
    """vLLM's scheduler, if steps may wait for loads (internals)."""
    events: Any = None
    """How KV events are made; None without them."""


def joined(engine: Engine) -> Joined:
    """Return the guests of an engine, in the order in which they hear of a request."""
    from kvagent.vllm.guests.hints.guest import Hints
    from kvagent.vllm.guests.switches import Switches

    options, geometry, one = engine.options, engine.geometry, Joined()
    if engine.media == "trust":
        one.answered = frozenset({"mm_features"})
    hints = Hints(options.remote_wait_ms / 1e3, engine.tool_tokens)
    one.guests = [Switches(hints, transfers=options.transfers), *_keys(engine), hints, *_requests(engine)]
    if engine.events is not None and engine.events.waker is not None:
        one.attached = engine.events.waker.wake
    if engine.parts > 1:
        from kvagent.vllm.guests.nodes.joint import JointSession

        parts = engine.parts
        one.session = lambda link, options: JointSession(link, options, parts)
    if options.offload == LAZY:
        from kvagent.vllm.guests.lazy import batch_of

        one.batch = batch_of(options, geometry, engine.step_tokens)
    if engine.preemption is not None:
        from kvagent.vllm.guests.sync.scheduler import SyncLoads

        waits = SyncLoads(options, geometry, engine.token_bytes, engine.preemption)
        one.waits = waits
        one.guests.append(waits)
    return one


def _requests(engine: Engine) -> list[Guest]:
    """Return the other guests."""
    found: list[Guest] = []
    if engine.options.transfers:
        from kvagent.vllm.guests.transfers.offers import Transfers

        found.append(Transfers(engine.options, engine.engine_id, engine.tp_size, saves=engine.saves))
    if engine.geometry.states:
        from kvagent.vllm.guests.states import States

        found.append(States(engine.geometry))
    if engine.events is not None:
        from kvagent.vllm.guests.events.publication import Events

        found.append(Events(engine.events))
    return found


def _keys(engine: Engine) -> list[Guest]:
    """Return the guests that key blocks by more than their tokens."""
    found: list[Guest] = []
    if engine.media != "trust":
        from kvagent.vllm.guests.media import Media

        found.append(Media(engine.media, engine.geometry.hash_tokens, multimodal=engine.multimodal))
    if engine.lora:
        from kvagent.vllm.guests.adapters.keys import Adapters

        found.append(Adapters(engine.world))
    if engine.geometry.following:
        from kvagent.vllm.guests.drafts import Following

        found.append(Following())
    return found
