"""Writes the table of docs/MIGRATING.md, from python/kvagent/vllm/foreign.json.

    PYTHONPATH=python python3 scripts/migrating.py [PAGE]

Options that mean the same here share a row.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from kvagent.vllm.options import Foreign, table, text

PAGE = Path(__file__).resolve().parents[1] / "docs" / "MIGRATING.md"
HEAD = ["| option | of | here |", "|---|---|---|"]


def here(foreign: Foreign) -> str:
    """Return what an option means here, in Markdown."""
    values = [
        f"`{value}`: {', '.join(f'`{name}: {text(one)}`' for name, one in means.items()) or 'leave it out'}"
        for value, means in foreign.values.items()
    ]
    same = [f"the same as `{foreign.option}`"] if foreign.option else []
    agent = [f"`kvagent serve {foreign.agent}`".replace("|", "\\|")] if foreign.agent else []
    out = [f"leave it out: {foreign.leave_out}"] if foreign.leave_out else []
    rest = ", ".join([*out, *agent, *([foreign.here] if foreign.here else [])])
    return "; ".join([*same, *values, *([f"otherwise {rest}" if values else rest] if rest else [])])


def rows() -> list[str]:
    """Return the rows of the table."""
    entries = [(", ".join(one.of), here(one), name) for name, one in table().items()]
    groups = itertools.groupby(sorted(entries, key=lambda entry: entry[:2]), key=lambda entry: entry[:2])
    return [f"| {', '.join(f'`{name}`' for *_, name in group)} | {of} | {said} |" for (of, said), group in groups]


def main() -> None:
    """Write the table into the page."""
    page = Path(sys.argv[1]) if sys.argv[1:] else PAGE
    before, _, _ = page.read_text().partition(HEAD[0])
    page.write_text(before + "\n".join([*HEAD, *rows()]) + "\n")


main()
