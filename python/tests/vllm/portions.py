"""Divides the tests among several processes, by files: pytest's option --portion N/OF."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

MOST = 8
"""Processes: each imports vLLM, for 10 s of processor time and 1 GiB."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--portion", type=parse, metavar="N/OF", help="of the selected files, those of process N of OF processes"
    )


def parse(text: str) -> tuple[int, int]:
    """Return N and OF."""
    found = re.fullmatch(r"([1-9]\d{0,2})/([1-9]\d{0,2})", text)
    if found is None or not int(found[1]) <= int(found[2]) <= MOST:
        raise argparse.ArgumentTypeError(f"--portion {text!r}: want N/OF with 1 <= N <= OF <= {MOST}")
    return int(found[1]), int(found[2])


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other processes."""
    if (portion := config.getoption("portion")) is None:
        return
    number, of = portion
    owners = divide(Counter(item.location[0] for item in items), of)
    others = [item for item in items if owners[item.location[0]] != number]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if owners[item.location[0]] == number]


def divide(files: Mapping[str, int], of: int) -> dict[str, int]:
    """Return each file's process, from 1. The next largest file goes where the fewest tests are.

    ``files``: how many tests each has. The result depends on nothing else.
    """
    load = [0] * of
    owners = {}
    for file in sorted(files, key=lambda file: (-files[file], file)):
        least = load.index(min(load))
        load[least] += files[file]
        owners[file] = least + 1
    return owners
