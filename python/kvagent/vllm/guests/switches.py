"""Switches of single requests, in their ``kv_transfer_params`` (docs/VLLM.md).

They are named ``kvagent.save`` and so on, or ``save`` and so on in a mapping named ``kvagent``. A
client sends them, so a bad one is counted, logged and ignored, and its request runs as without it.
They concern the cache: a prompt that is computed for a decode engine is saved, and one that a
prefill engine computes is loaded, whatever they say.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvagent.limits import MAX_KEEP_MS
from kvagent.vllm.hooks import Guest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvagent.vllm.guests.keeps import Keeps
    from kvagent.vllm.scheduler.requests import Tracked

PREFIX = "kvagent"
MAX_TOKENS = 1 << 30
MAX_SECONDS = MAX_KEEP_MS // 1000
MAX_LOGGED = 64  # reasons that are logged as warnings; clients could send new ones without end
MAX_SHOWN = 80  # characters of a client's value that are logged

log = logging.getLogger("vllm.kvagent")


class BadSwitch(ValueError):
    """A switch that does not exist, or a value that is not allowed."""


class Switches(Guest):
    """Reads the switches of requests."""

    def __init__(self, keeps: Keeps, *, transfers: bool) -> None:
        """``transfers``: the engine takes part in transfers."""
        self._keeps = keeps
        self._transfers = transfers
        self._logged: set[str] = set()

    def seen(self, tracked: Tracked) -> None:
        """Apply the switches of a request that has arrived. What is no mapping, for a client may
        have sent any JSON, is taken from the request: vLLM and other guests read it too.
        """
        request = tracked.request
        params = getattr(request, "kv_transfer_params", None)
        if isinstance(params, dict):
            self._apply(tracked, params)
        elif params is not None:
            self._ignore(f"kv_transfer_params: {_shown(params)}, allowed is a mapping")
            request.kv_transfer_params = None

    def _apply(self, tracked: Tracked, params: Mapping[str, Any]) -> None:
        delivers = self._transfers and params.get("do_remote_decode") is True
        receives = self._transfers and params.get("do_remote_prefill") is True
        counts, pin_ms, ttl_ms = self.side.counts, 0, 0
        for name, value in _given(params):
            try:
                if name == "save" and not _boolean(name, value):
                    _check(not delivers, name, "a prompt for a decode engine is saved")
                    tracked.saving.most = 0
                    counts.requests_unsaved += 1
                elif name == "load" and not _boolean(name, value):
                    _check(not receives, name, "a prompt of a prefill engine is loaded")
                    tracked.asking.most = 0
                    counts.requests_unloaded += 1
                elif name == "max_load_tokens":
                    most = _tokens(name, value)
                    _check(not receives, name, "a prompt of a prefill engine is loaded")
                    tracked.asking.most = min(tracked.asking.most, most)
                    counts.requests_limited += 1
                elif name == "pin":
                    pin_ms = _milliseconds(name, value)
                    counts.requests_pinned += 1
                elif name == "ttl":
                    ttl_ms = _milliseconds(name, value)
                    counts.requests_brief += 1
                elif name not in NAMES:
                    raise BadSwitch(f"{_shown(name)}: no such switch; there are {', '.join(NAMES)}")
            except BadSwitch as reason:
                self._ignore(f"kv_transfer_params: {PREFIX}.{reason}")
        if pin_ms or ttl_ms:
            self._keeps.add(tracked, pin_ms, ttl_ms)

    def _ignore(self, reason: str) -> None:
        self.side.counts.switches_ignored += 1
        if reason not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(reason)
            log.warning("%s; it is ignored", reason)


NAMES = ("save", "load", "max_load_tokens", "pin", "ttl")


def _given(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the switches; of two with one name, that with the full name."""
    nested = params.get(PREFIX)
    if nested is not None:
        if isinstance(nested, Mapping):
            for name, value in nested.items():
                if f"{PREFIX}.{name}" not in params:
                    yield str(name), value
        else:
            yield "", nested
    for name, value in params.items():
        if isinstance(name, str) and name.startswith(f"{PREFIX}."):
            yield name.removeprefix(f"{PREFIX}."), value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadSwitch(f"{name}: {_shown(value)}, allowed is true or false")
    return value


def _tokens(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise BadSwitch(f"{name}: {_shown(value)}, allowed is an integer 0 to {MAX_TOKENS}")
    return value


def _milliseconds(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SECONDS:
        raise BadSwitch(f"{name}: {_shown(value)}, allowed are more than 0 and at most {MAX_SECONDS} seconds")
    return max(1, round(value * 1e3))


def _check(allowed: bool, name: str, why: str) -> None:
    if not allowed:
        raise BadSwitch(f"{name}: {why}")


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
