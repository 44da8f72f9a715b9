"""Where a configuration is read from: files, standard input, and arguments with JSON.

A source is told by its content: a ``kv_transfer_config``, a configuration of LMCache, variables
named ``LMCACHE_...``, or a configuration of Mooncake's client.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_BYTES = 1 << 20  # of one source

_VARIABLE = re.compile(r"\s*(?:export\s+)?([A-Z_][A-Z0-9_]*)=(.*)")
_PREFIX = "LMCACHE_"
_NESTED = ("kv_transfer_config", "kv-transfer-config")


class SourceError(ValueError):
    """A source that cannot be read, or that is none of those known."""


@dataclass(slots=True)
class Sources:
    """All that was read."""

    transfer: dict[str, Any] | None = None
    """The ``kv_transfer_config``."""
    lmcache: dict[str, Any] | None = None
    """LMCache's options by name; those of variables win over those of a file."""
    mooncake: dict[str, Any] | None = None
    """The configuration of Mooncake's client (MOONCAKE_CONFIG_PATH)."""
    variables: dict[str, Any] = field(default_factory=dict)


def read(given: Sequence[str], environment: Mapping[str, str]) -> Sources:
    """Read the sources, and the ``LMCACHE_...`` variables of an environment. Raise SourceError."""
    sources = Sources()
    _add_variables(sources, environment)
    for one in given:
        _add(sources, *_text(one))
    if sources.variables:
        sources.lmcache = (sources.lmcache or {}) | sources.variables
    return sources


def _text(given: str) -> tuple[str, str]:
    """Return a source's name and text."""
    if given.lstrip().startswith("{"):
        return "the argument", given
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if given == "-" else _bytes(Path(given))
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{given}: {error}") from error
    if len(data) > MAX_BYTES:
        raise SourceError(f"{given}: longer than {MAX_BYTES} bytes")
    return given, text


def _bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _add(sources: Sources, name: str, text: str) -> None:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if lines and all(_VARIABLE.fullmatch(line) for line in lines):
        pairs = (match.groups() for line in lines if (match := _VARIABLE.fullmatch(line)))
        _add_variables(sources, {key: value.strip().strip("\"'") for key, value in pairs})
        return
    content = _parsed(name, text)
    content = next((_nested(name, content[key]) for key in _NESTED if key in content), content)
    if "kv_connector" in content:
        kind, present = "kv_transfer_config", sources.transfer
        sources.transfer = content
    elif "master_server_address" in content:
        kind, present = "configuration of Mooncake", sources.mooncake
        sources.mooncake = content
    else:
        kind, present = "configuration of LMCache", sources.lmcache
        sources.lmcache = content
    if present is not None:
        raise SourceError(f"{name}: a second {kind}")


def _nested(name: str, content: Any) -> dict[str, Any]:
    """Return the part of a vLLM configuration, which may be JSON within a string."""
    if isinstance(content, str):
        content = _parsed(name, content)
    if not isinstance(content, dict):
        raise SourceError(f"{name}: kv-transfer-config is no mapping")
    return content


def _parsed(name: str, text: str) -> dict[str, Any]:
    """Return a JSON or YAML mapping."""
    try:
        content = json.loads(text)
    except ValueError as error:
        content = _yaml(name, text, str(error))
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SourceError(f"{name}: allowed are a JSON or YAML mapping, or lines {_PREFIX}NAME=VALUE")
    return content


def _yaml(name: str, text: str, why_not_json: str) -> Any:
    if text.lstrip().startswith("{"):
        raise SourceError(f"{name}: not JSON: {why_not_json}")
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]  # vLLM brings it
    except ImportError as error:
        raise SourceError(
            f"{name}: YAML needs PyYAML, which is not installed here. Use the environment of vLLM or give JSON"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SourceError(f"{name}: {error}") from error


def _add_variables(sources: Sources, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        if name.startswith(_PREFIX):
            sources.variables[name.removeprefix(_PREFIX).lower()] = value
