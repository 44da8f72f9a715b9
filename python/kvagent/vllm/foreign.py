"""What the options of other connectors mean here: the table foreign.json.

An entry has the connectors that read the option (``of``) and at least one of these:

- ``option``: our option with the same meaning and the same values; the connector takes it too.
- ``values``: what some of its values mean here, as options of ours; none if nothing is needed.
- ``agent``: the flag of ``kvagent serve`` that it belongs to.
- ``leave_out``: why nothing is needed, whatever its value.
- ``here``: what to write instead, or why it has no counterpart.

An option of LMCache's own configuration has ``lmcache.`` in front, as in its connector's options.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).with_name("foreign.json")


@dataclass(frozen=True, slots=True)
class Foreign:
    """An option of other connectors."""

    of: list[str]
    option: str = ""
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    agent: str = ""
    leave_out: str = ""
    here: str = ""

    def meaning(self, value: Any) -> dict[str, Any] | None:
        """Return the options of ours that a value means, or None if it means none that there is."""
        if (means := self.values.get(text(value).lower())) is not None:
            return means
        if self.leave_out:
            return {}
        return {self.option: value} if self.option else None

    def advice(self, value: Any) -> str:
        """Return what to write instead of the option with this value, or why there is nothing."""
        means = self.meaning(value)
        if means is None:
            return self.otherwise()
        if means:
            return f"write {', '.join(f'{name}: {text(one)}' for name, one in means.items())}"
        return f"leave it out: {self.leave_out or 'this is what happens here'}"

    def otherwise(self) -> str:
        """Return what holds for the values that mean no options of ours."""
        if not self.agent:
            return self.here or f"allowed are {', '.join(self.values)}"
        return f"is a setting of the agent: kvagent serve {self.agent}" + (f" ({self.here})" if self.here else "")


@functools.cache
def table() -> dict[str, Foreign]:
    """Return the options of other connectors by their names."""
    return {name: Foreign(**entry) for name, entry in json.loads(_TABLE.read_text()).items()}


def text(value: Any) -> str:
    """Return a value as JSON has it, without the quotes of a string."""
    return str(value).lower() if isinstance(value, bool) else str(value)
