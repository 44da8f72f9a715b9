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

from kvagent.vllm.guests.hints.actions import BadHint, shown
from kvagent.vllm.hooks import Guest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvagent.vllm.guests.hints.guest import Hints
    from kvagent.vllm.scheduler.requests import Tracked

PREFIX = "kvagent"
MAX_TOKENS = 1 << 30
MAX_LOGGED = 64  # reasons that are logged as warnings; clients could send new ones without end

log = logging.getLogger("vllm.kvagent")


class BadSwitch(ValueError):
    """A switch that does not exist, or a value that is not allowed."""


class Switches(Guest):
    """Reads the switches of requests."""

    def __init__(self, hints: Hints, *, transfers: bool) -> None:
        """``transfers``: the engine takes part in transfers."""
        self._hints = hints
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
            self._ignore(f"kv_transfer_params: {shown(params)}, allowed is a mapping")
            request.kv_transfer_params = None

    def _apply(self, tracked: Tracked, params: Mapping[str, Any]) -> None:
        delivers = self._transfers and params.get("do_remote_decode") is True
        receives = self._transfers and params.get("do_remote_prefill") is True
        counts = self.side.counts
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
                elif name == "session":
                    self._hints.name(tracked, value)
                elif name == "hints":
                    self._hints.add(tracked, value)
                elif name not in NAMES:
                    raise BadSwitch(f"{shown(name)}: no such switch; there are {', '.join(NAMES)}")
            except BadSwitch as reason:
                self._ignore(f"kv_transfer_params: {PREFIX}.{reason}")
            except BadHint as reason:
                self._ignore(f"kv_transfer_params: {PREFIX}.{name}: {reason}")

    def _ignore(self, reason: str) -> None:
        self.side.counts.switches_ignored += 1
        if reason not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(reason)
            log.warning("%s; it is ignored", reason)


NAMES = ("save", "load", "max_load_tokens", "session", "hints")


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
        raise BadSwitch(f"{name}: {shown(value)}, allowed is true or false")
    return value


def _tokens(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise BadSwitch(f"{name}: {shown(value)}, allowed is an integer 0 to {MAX_TOKENS}")
    return value


def _check(allowed: bool, name: str, why: str) -> None:
    if not allowed:
        raise BadSwitch(f"{name}: {why}")
