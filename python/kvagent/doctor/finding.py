"""What the doctor finds: one line each, and what to do if it is a problem."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact. With a ``cure`` it is a problem."""

    text: str
    hint: str = ""

    def lines(self) -> str:
        """As it is printed."""
        return f"PROBLEM  {self.text}\n         fix: {self.hint}" if self.hint else f"OK       {self.text}"
