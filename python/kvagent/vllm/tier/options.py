"""The options of an entry of ``secondary_tiers``. They are checked once, at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.vllm.options import RANGES, OptionError, Options, check, checked, unknown

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class TierOptions(Options):
    """The validated options. Those that the connector has too mean the same there."""

    lookup_age_ms: float = 500.0
    """The longest that a request waits for an answer to a look-up."""
    drain_wait_ms: float = 2_000.0
    """The longest that a reset of vLLM's cache waits for the agent; then all jobs are given up."""
    staging_bytes: int = 256 << 20
    """The memory into which the agent loads; what has arrived and verified is copied on from it."""
    trust_media: bool = False
    """Whether engines share chunks of models that take images, audio or video, keyed by the
    identifiers that vLLM hashes, which clients may choose.
    """


_RANGES = RANGES | {"drain_wait_ms": (0, 60_000), "staging_bytes": (1 << 20, 1 << 36)}
_NAMES = (
    "agent", "drain_wait_ms", "events", "load_deadline_ms", "lookup_age_ms", "pool", "socket_dir", "staging_bytes",
    "start_wait_ms", "tenant", "tier_wait_ms", "trust_media", "weights_fixed", "weights_version",
)  # fmt: skip
"""The options that an entry may set."""


def parse(given: Mapping[str, Any]) -> TierOptions:
    """Return the options of an entry, without ``type`` and ``module_path``. Raise OptionError."""
    defaults = TierOptions()
    if wrong := [name for name in given if name not in _NAMES]:
        raise OptionError(f"{wrong[0]}: {unknown(wrong[0], _NAMES, 'option of KVAgentTier')}", wrong[0])
    options = TierOptions(
        **{name: checked(name, value, getattr(defaults, name), _RANGES) for name, value in given.items()}
    )
    check(options)
    return options
