"""The options of an entry of ``secondary_tiers``. They are checked once, at the start."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from kvagent import socketdir
from kvagent.vllm import options as connector
from kvagent.vllm.options import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The validated options.

    Those that the connector has too mean the same there (kvagent.vllm.options).
    """

    socket_dir: str = field(default_factory=socketdir.default)
    agent: str = ""
    pool: str = ""
    tenant: str = ""
    """Engines share chunks only with engines of the same tenant."""
    lookup_age_ms: float = 500.0
    """The longest that a request waits for an answer to a look-up."""
    tier_wait_ms: float = 200.0
    """The longest that a request waits, besides, while the agent queries its lower tiers."""
    load_deadline_ms: float = 10_000.0
    """A load or save that has not ended after this time is given up."""
    drain_wait_ms: float = 2_000.0
    """The longest that a reset of vLLM's cache waits for the agent; then all jobs are given up."""
    staging_bytes: int = 256 << 20
    """The memory into which the agent loads; what has arrived and verified is copied on from it."""
    trust_media: bool = False
    """Whether engines share chunks of models that take images, audio or video, keyed by the
    identifiers that vLLM hashes, which clients may choose.
    """
    weights_version: str = ""
    """Of the weights that the engine starts with. Later ones have no name here, since vLLM's region
    and its running requests may still hold KV of those before.
    """
    weights_fixed: bool = False
    start_wait_ms: float = 2_000.0
    """The longest that the engine's start waits for a running agent to accept its registration."""
    events: str = connector.AUTO
    """Whether the engine's KV events tell which chunks the agent holds."""


_RANGES: dict[str, tuple[int, int]] = {"drain_wait_ms": (0, 60_000), "staging_bytes": (1 << 20, 1 << 36)}
_OURS = {one.name: getattr(TierOptions(), one.name) for one in fields(TierOptions)}
_SHARED = frozenset(_OURS) & {one.name for one in fields(connector.Options)}


def parse(given: Mapping[str, Any]) -> TierOptions:
    """Return the options of an entry, without ``type`` and ``module_path``. Raise OptionError."""
    for name in given:
        if name not in _OURS:
            near = difflib.get_close_matches(name, _OURS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise OptionError(
                f"{name}: no such option of KVAgentTier; {hint}there are {', '.join(sorted(_OURS))}", name
            )
    options = TierOptions(**{name: _checked(name, value) for name, value in given.items()})
    connector_options(options)
    return options


def connector_options(options: TierOptions) -> connector.Options:
    """Return the connector's options with the same values. Raise OptionError where they exclude
    each other.
    """
    given = {name: getattr(options, name) for name in _SHARED}
    return connector.build({name: value for name, value in given.items() if value != _OURS[name]})


def _checked(name: str, value: Any) -> Any:
    if name in _SHARED:
        return connector.checked(name, value)
    default = _OURS[name]
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise OptionError(f"{name}: {value!r}, allowed is true or false", name)
        return value
    low, high = _RANGES[name]
    whole = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
        raise OptionError(
            f"{name}: {value!r}, allowed is {'an integer' if whole else 'a number'} {low} to {high}", name
        )
    return value
