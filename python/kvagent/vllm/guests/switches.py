"""Switches: what single requests ask for in their ``kv_transfer_params`` (docs/VLLM.md).

A client sends them, so a bad one is counted, logged and ignored, and its request runs as without
it. They concern the cache: a prompt that is computed for a decode engine is saved, and one that a
prefill engine computes is loaded, whatever they say.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvagent.vllm.guests.hints import Bad, expect, integer, shown
from kvagent.vllm.hooks import Guest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvagent.vllm.guests.hints import Hints
    from kvagent.vllm.scheduler.requests import Tracked

PREFIX = "kvagent"
SWITCHES = ("save", "load", "max_load_tokens", "session", "hints")
MAX_TOKENS = 1 << 30
MAX_LOGGED = 64  # reasons that are logged as warnings; clients could send new ones without end

log = logging.getLogger("vllm.kvagent")


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
            for name, value in _given(params):
                try:
                    self._apply(tracked, name, value, params)
                except Bad as reason:
                    self._ignore(f"kv_transfer_params: {PREFIX}.{name if name in SWITCHES else shown(name)}: {reason}")
        elif params is not None:
            self._ignore(f"kv_transfer_params: {shown(params)}, allowed is a mapping")
            request.kv_transfer_params = None

    def _apply(self, tracked: Tracked, name: str, value: Any, params: Mapping[str, Any]) -> None:
        counts, receives = self.side.counts, self._transfers and params.get("do_remote_prefill") is True
        if name == "session":
            self._hints.name(tracked, value)
        elif name == "hints":
            self._hints.add(tracked, value)
        elif name == "max_load_tokens":
            most = integer("", value, MAX_TOKENS)
            expect(not receives, "a prompt of a prefill engine is loaded")
            tracked.asking.most = min(tracked.asking.most, most)
            counts.requests_limited += 1
        else:
            expect(name in SWITCHES, f"no such switch; there are {', '.join(SWITCHES)}")
            expect(isinstance(value, bool), f"{shown(value)}, allowed is true or false")
            if name == "save" and not value:
                delivers = self._transfers and params.get("do_remote_decode") is True
                expect(not delivers, "a prompt for a decode engine is saved")
                tracked.saving.most = 0
                counts.requests_unsaved += 1
            elif name == "load" and not value:
                expect(not receives, "a prompt of a prefill engine is loaded")
                tracked.asking.most = 0
                counts.requests_unloaded += 1

    def _ignore(self, reason: str) -> None:
        self.side.counts.switches_ignored += 1
        if reason not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(reason)
            log.warning("%s; it is ignored", reason)


def _given(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the switches; of two with one name, that with the full name."""
    nested = params.get(PREFIX, {})
    if isinstance(nested, Mapping):
        yield from ((str(name), value) for name, value in nested.items() if f"{PREFIX}.{name}" not in params)
    elif nested is not None:
        yield "", nested
    for name, value in params.items():
        if isinstance(name, str) and name.startswith(f"{PREFIX}."):
            yield name.removeprefix(f"{PREFIX}."), value
