"""The options of ``kv_connector_extra_config``: names, units, ranges and defaults. They are checked
once, at the start of the engine.

The table foreign.json says what the options of other connectors mean here. An entry has the
connectors that read the option (``of``) and at least one of these:

- ``option``: our option with the same meaning and the same values; the connector takes it too.
- ``values``: what some of its values mean here, as options of ours; none if nothing is needed.
- ``agent``: the flag of ``kvagent serve`` that it belongs to.
- ``leave_out``: why nothing is needed, whatever its value.
- ``here``: what to write instead, or why it has no counterpart.

An option of LMCache's own configuration has ``lmcache.`` in front, as in its connector's options.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvagent import socketdir, starter
from kvagent.errors import WrongSetting
from kvagent.limits import MAX_BUDGET
from kvagent.vllm.weight_changes import ALLOWED, is_version

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


_TABLE = Path(__file__).with_name("foreign.json")


@dataclass(frozen=True, slots=True)
class Foreign:
    """An option of other connectors."""

    of: list[str]
    option: str = ""
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    agent: str = ""
    leave_out: str = ""
    here: str = ""

    def meaning(self, value: Any) -> dict[str, Any] | None:
        """Return the options of ours that a value means, or None if it means none that there is."""
        if (means := self.values.get(text(value).lower())) is not None:
            return means
        if self.leave_out:
            return {}
        return {self.option: value} if self.option else None

    def advice(self, value: Any) -> str:
        """Return what to write instead of the option with this value, or why there is nothing."""
        means = self.meaning(value)
        if means is None:
            return self.otherwise()
        if means:
            return f"write {', '.join(f'{name}: {text(one)}' for name, one in means.items())}"
        return f"leave it out: {self.leave_out or 'this is what happens here'}"

    def otherwise(self) -> str:
        """Return what holds for the values that mean no options of ours."""
        if not self.agent:
            return self.here or f"allowed are {', '.join(self.values)}"
        return f"is a setting of the agent: kvagent serve {self.agent}" + (f" ({self.here})" if self.here else "")


@functools.cache
def table() -> dict[str, Foreign]:
    """Return the options of other connectors by their names."""
    return {name: Foreign(**entry) for name, entry in json.loads(_TABLE.read_text()).items()}


def text(value: Any) -> str:
    """Return a value as JSON has it, without the quotes of a string."""
    return str(value).lower() if isinstance(value, bool) else str(value)


LAYOUTS = ("auto", "none", "LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
MEDIA = ("content", "trust", "bypass")
LOAD_MODES = ("async", "sync", "auto")
EAGER, LAZY = "eager", "lazy"
UNCACHED, FAIL = "uncached", "fail"
AUTO, OFF = "auto", "off"
START = "start"
LAYERWISE_BYTES = 64 << 20
"""What a step waits for at most, per rank, while its first layers compute."""
ROLES = ("kv_both", "kv_producer", "kv_consumer")


class OptionError(ValueError):
    """An option that is unknown, out of range or excluded by another. The text names it."""

    def __init__(self, text: str, *options: str) -> None:
        super().__init__(text)
        self.options = options
        """The options that it concerns, the refused one first."""


@dataclass(frozen=True, slots=True)
class Constants:
    """What no configuration sets; tests replace it. Names in ``_ms`` are milliseconds. VLLM.md says
    what each limits.
    """

    lookup_wait_ms: float = 1.0
    lookup_grace_ms: float = 200.0
    lookup_age_ms: float = 2_000.0
    tier_wait_ms: float = 200.0
    min_load_tokens: int = 64
    load_deadline_ms: float = 10_000.0
    sync_load_bytes: int = 16 << 20  # per rank; LAYERWISE_BYTES with layerwise
    sync_wait_ms: float = 250.0
    watermark_percent: float = 16.0
    pin_percent: float = 12.0  # less than watermark_percent
    remote_wait_ms: float = 30_000.0
    transfer_ttl_ms: int = 30_000
    start_wait_ms: float = 2_000.0


@dataclass(frozen=True, slots=True)
class Options(Constants):
    """The validated options, as VLLM.md describes them."""

    socket_dir: str = field(default_factory=socketdir.default)
    agent: str = ""
    pool: str = ""
    tenant: str = ""
    load_mode: str = "async"  # auto where layerwise is given without it
    layerwise: bool = False
    save_decode: bool = True
    offload: str = EAGER
    cpu_bytes_to_use_per_rank: int = 0
    transfers: bool = True
    layout: str = "auto"
    consumer_saves: bool = False
    weights_version: str = ""
    weights_fixed: bool = False
    media: str = "content"
    share_tp: int = 0
    share_pp: int = 0
    events: str = AUTO
    on_unsupported: str = UNCACHED


RANGES: dict[str, tuple[float, float]] = {
    "lookup_age_ms": (0, 60_000),
    "tier_wait_ms": (0, 60_000),
    "load_deadline_ms": (1, 600_000),
    "cpu_bytes_to_use_per_rank": (0, MAX_BUDGET),
    "share_tp": (0, 256),
    "share_pp": (0, 256),
    "start_wait_ms": (0, 60_000),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "layout": LAYOUTS, "media": MEDIA, "load_mode": LOAD_MODES, "offload": (EAGER, LAZY),
    "on_unsupported": (UNCACHED, FAIL), "events": (AUTO, OFF), "agent": (START,),
}  # fmt: skip
CONSTANTS = {one.name: one.default for one in fields(Constants)}
DEFAULTS = {one.name: getattr(Options(), one.name) for one in fields(Options) if one.name not in CONSTANTS}
"""The options that a configuration may set."""


def parse(given: Mapping[str, Any]) -> Options:
    """Return the options of a ``kv_connector_extra_config``. Raise OptionError."""
    origins, refused = _ours(given)
    if refused:
        raise OptionError("; ".join(f"{name}: {why}" for name, why in refused.items()))
    try:
        values = {ours: checked(ours, given[name], DEFAULTS[ours]) for ours, name in origins.items()}
        if values.get("layerwise"):
            values = {"load_mode": "auto", "sync_load_bytes": LAYERWISE_BYTES} | values
        options = Options(**values)
        check(options)
        return options
    except OptionError as error:
        names = [origins[name] for name in error.options if origins.get(name, name) != name]
        raise OptionError(f"{', '.join(names)}: {error}", *error.options) if names else error from None


def check(options: Options) -> None:
    """Raise OptionError for options that exclude each other, or that an agent cannot have."""
    if options.pool and not options.agent:
        raise OptionError(f"pool: {options.pool!r}, allowed only where agent is {START}", "pool", "agent")
    try:
        socketdir.check(options.socket_dir)
        if options.agent:
            starter.check_pool(options.pool)
    except WrongSetting as error:
        raise OptionError(str(error), error.setting) from None
    if options.weights_version and not is_version(options.weights_version):
        raise OptionError(f"weights_version: {options.weights_version!r}, allowed is {ALLOWED}", "weights_version")
    if options.layerwise and options.load_mode == "async":
        text = "layerwise: true, allowed only where load_mode is sync or auto"
        raise OptionError(text, "layerwise", "load_mode")
    if options.layerwise and (options.share_tp or options.share_pp):
        text = "layerwise: true, allowed only where share_tp and share_pp are 0"
        raise OptionError(text, "layerwise", "share_tp", "share_pp")


def synonyms(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of other connectors that are taken as ours, and which of ours each is."""
    return {name: foreign.option for name in given if (foreign := table().get(name)) and foreign.option}


def _ours(given: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the given name of each of our options, and why the other names are refused."""
    origins = {name: name for name in given if name in DEFAULTS}
    refused: dict[str, str] = {}
    for name in [name for name in given if name not in DEFAULTS]:
        if (foreign := table().get(name)) is None:
            refused[name] = _unknown(name)
        elif not foreign.option:
            refused[name] = f"{foreign.advice(given[name])} (an option of {', '.join(foreign.of)})"
        elif given[name] != given[present := origins.setdefault(foreign.option, name)]:
            refused[name] = f"means {foreign.option}, but {present} is {text(given[present])}"
    return origins, refused


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, table(), n=1, cutoff=0.8)
    return unknown(name, DEFAULTS, "option", near)


def unknown(name: str, known: Collection[str], what: str, further: Sequence[str] = ()) -> str:
    """Return what is said of a name that is not known."""
    near = [*difflib.get_close_matches(name, known, n=1, cutoff=0.5), *further]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"no such {what}; {hint}there are {', '.join(sorted(known))}"


def saves(role: str, options: Options) -> bool:
    """Return whether an engine with this ``kv_role`` saves."""
    return role in ("kv_both", "kv_producer") or options.consumer_saves


def checked(name: str, value: Any, default: Any, ranges: Mapping[str, tuple[float, float]] = RANGES) -> Any:
    """Return an option's value. Raise OptionError if it is not allowed, whatever the others."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise OptionError(f"{name}: {value!r}, allowed is true or false", name)
    elif isinstance(default, str):
        if not isinstance(value, str):
            raise OptionError(f"{name}: {value!r} is not a string", name)
        if value not in _CHOICES.get(name, (value,)):
            raise OptionError(f"{name}: {value!r}, allowed is one of {', '.join(_CHOICES[name])}", name)
    else:
        low, high = ranges.get(name, (0, math.inf))
        whole = isinstance(default, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
            kind = "an integer" if whole else "a number"
            raise OptionError(f"{name}: {value!r}, allowed is {kind} {low} to {high}", name)
    return value
