"""Diagnoses, from inside an engine's pod, why it cannot work with its agent: ``python -m
kvagent.doctor``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact. With a ``hint`` it is a problem."""

    text: str
    hint: str = ""

    def lines(self) -> str:
        """Return the printed form."""
        return f"PROBLEM  {self.text}\n         fix: {self.hint}" if self.hint else f"OK       {self.text}"
