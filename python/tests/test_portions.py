from __future__ import annotations

import argparse
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.vllm.portions import MOST, divide, parse

if TYPE_CHECKING:
    from pathlib import Path

FILES = {"a.py": 60, "b.py": 1, "c.py": 90, "d.py": 25, "e.py": 25, "f.py": 3}
PLUGIN = """\
import pytest
from tests.vllm import portions

pytest_addoption = portions.add_option


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    portions.select(config, items)
"""


@pytest.mark.parametrize("of", [1, 2, 3, MOST])
def test_each_file_has_one_process_and_none_has_much_more_than_another(of: int) -> None:
    owners = divide(FILES, of)
    assert owners.keys() == FILES.keys()
    assert set(owners.values()) <= set(range(1, of + 1))
    load = [sum(count for file, count in FILES.items() if owners[file] == one) for one in range(1, of + 1)]
    assert max(load) - min(load) <= max(FILES.values())
    if of == 2:
        assert load == [94, 110]


def test_the_order_of_files_changes_nothing() -> None:
    assert divide(dict(reversed(FILES.items())), 2) == divide(FILES, 2)


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", f"1/{MOST + 1}", "1/2/3", "-1/2", "1/2 "])
def test_other_portions_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="1 <= N <= OF <= 8"):
        parse(text)


def test_together_the_processes_run_each_selected_test_once(tmp_path: Path) -> None:
    for name, count in {"test_one.py": 3, "test_two.py": 2, "test_three.py": 1}.items():
        tests = [f"def test_{'odd' if i % 2 else 'even'}_{i}(): pass" for i in range(count)]
        (tmp_path / name).write_text("\n".join(tests))
    (tmp_path / "conftest.py").write_text(PLUGIN)

    def run(*arguments: str) -> tuple[int, list[str]]:
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", "/dev/null"]
        done = subprocess.run(
            [*command, "--rootdir", str(tmp_path), str(tmp_path), *arguments], check=False, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
        return done.returncode, sorted(re.findall(r"(\w+\.py::\w+) PASSED", done.stdout))

    _, everything = run()
    assert len(everything) == 6
    portions = [run("--portion", f"{number}/2") for number in (1, 2)]
    assert sorted(name for _, passed in portions for name in passed) == everything
    assert [(status, len(passed)) for status, passed in portions] == [(0, 3), (0, 3)]
    few = [run("--portion", f"{number}/2", "-k", "odd and not two") for number in (1, 2)]
    assert few == [(0, ["test_one.py::test_odd_1"]), (5, [])]
    assert run("--portion", "2")[0] == 4
