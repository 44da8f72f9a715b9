"""A finding of the doctor: one line, and what to do if it is a problem."""

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
