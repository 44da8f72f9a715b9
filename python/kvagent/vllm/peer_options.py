"""Options of other connectors, which are understood by name (peer_table).

An option whose meaning is the same is accepted, and the log says what it became. One whose meaning
differs, or that has no counterpart, is refused with the reason.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvagent.vllm.peer_rules import Given, Meaning
from kvagent.vllm.peer_table import PEER_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class Translation:
    """The result for a whole ``kv_connector_extra_config``."""

    options: dict[str, Any] = field(default_factory=dict)
    """Our own options, those of other connectors translated."""
    accepted: dict[str, str] = field(default_factory=dict)
    """What each accepted option of another connector became."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why each refused one, or unknown one, is refused."""
    unknown: list[str] = field(default_factory=list)
    """Those of the refused ones that no connector has."""
    origins: dict[str, str] = field(default_factory=dict)
    """The option of another connector that set one of our own."""


def translate(given: Mapping[str, Any], role: str, known: frozenset[str]) -> Translation:
    """Translate the options of other connectors; ``known`` are the names of our own."""
    result = Translation()
    context = Given(role, given, known)
    for name, value in given.items():
        if name in known:
            result.options[name] = value
    for name, value in given.items():
        if name in known:
            continue
        peer = PEER_OPTIONS.get(name)
        if peer is None:
            result.refused[name] = _unknown(name, known)
            result.unknown.append(name)
            continue
        meaning = peer.rule(value, context)
        if not meaning.refused and meaning.option:
            meaning = _assign(result, name, meaning)
        said = f"{meaning.text} (an option of {peer.of})"
        (result.refused if meaning.refused else result.accepted)[name] = said
    return result


def _assign(result: Translation, name: str, meaning: Meaning) -> Meaning:
    """Set the option of a meaning, unless it was given another value."""
    if meaning.option not in result.options:
        result.options[meaning.option] = meaning.value
        result.origins[meaning.option] = name
    if (present := result.options[meaning.option]) != meaning.value:
        return Meaning(f"means {meaning.text}, but {meaning.option} is {present!r}", refused=True)
    return meaning


def _unknown(name: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    near += difflib.get_close_matches(name, PEER_OPTIONS, n=1, cutoff=0.8)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"no such option; {hint}there are {', '.join(sorted(known))}"
