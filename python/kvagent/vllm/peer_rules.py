"""Rules by which options of other connectors become options of ours (peer_table has them all)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Given:
    """What an option's meaning may depend on."""

    role: str
    """The engine's ``kv_role``; empty if unknown."""
    options: Mapping[str, Any]
    """All options that were given."""
    known: frozenset[str]
    """The names of our own options."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one option becomes: ``option`` set to ``value``, nothing if ``option`` is empty, or an
    error if it is ``refused``.
    """

    text: str
    option: str = ""
    value: Any = None
    refused: bool = False


Rule = Callable[[Any, Given], Meaning]


class PeerOption(NamedTuple):
    """An option: the connectors that read it, and its rule."""

    of: str
    rule: Rule


def sets(option: str) -> Rule:
    """Return the rule of an option that is the same as one of ours, which checks the value."""
    return lambda value, given: set_to(option, value, given)


def set_to(option: str, value: Any, given: Given) -> Meaning:
    """Return the meaning of an option that sets one of ours, if this version has it."""
    if option not in given.known:
        return Meaning(f"{value!r} has no counterpart: this version has no option {option}", refused=True)
    return Meaning(f"{option}: {_text(value)}", option, value)


def switch(true: Rule, false: Rule) -> Rule:
    """Return the rule of an option that is true or false, given what each of these means."""

    def rule(value: Any, given: Given) -> Meaning:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"  # some connectors read strings
        if value not in (False, True):
            return Meaning(f"{value!r}, allowed is true or false", refused=True)
        return (true if value else false)(bool(value), given)

    return rule


def becomes(option: str, value: Any) -> Rule:
    """Return the rule that sets an option to ``value``."""
    return lambda _, given: set_to(option, value, given)


def said(text: str) -> Rule:
    """Return the rule of an option that becomes what the text says."""
    return lambda *_: Meaning(text)


def as_here(text: str) -> Rule:
    """Return the rule of an option that needs nothing."""
    return said(f"needs nothing: {text}")


def refused(text: str) -> Rule:
    """Return the rule of an option that is refused."""
    return lambda *_: Meaning(text, refused=True)


def agent(flag: str) -> Rule:
    """Return the rule of a setting that belongs to the agent."""
    return refused(f"is a setting of the agent: kvagent serve {flag}")


def none(why: str) -> Rule:
    """Return the rule of an option without a counterpart."""
    return refused(f"has no counterpart: {why}")


def only_zero(otherwise: Rule, text: str) -> Rule:
    """Return the rule of a number that is off at 0."""
    return lambda value, given: Meaning(f"needs nothing: {text}") if value in (0, "0") else otherwise(value, given)


def only(allowed: Any, otherwise: Rule, text: str) -> Rule:
    """Return the rule of an option whose one value is what happens here."""
    return lambda value, given: Meaning(f"needs nothing: {text}") if value == allowed else otherwise(value, given)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
