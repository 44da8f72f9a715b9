"""Lets the configurations of tests set the constants of the connector."""

from __future__ import annotations

from kvagent.vllm import options


def allow() -> None:
    """Take constants as options from now on, in this process."""
    options.DEFAULTS.update(options.CONSTANTS)
