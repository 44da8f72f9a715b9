"""The wheel and the binary have one version: the tag's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.agent import BINARY, REQUIRE, need_agent

PROJECT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("version", PROJECT / "version.py")
assert SPEC is not None
assert SPEC.loader is not None
version = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(version)


@pytest.mark.parametrize(
    ("described", "public"),
    [
        ("v1.2.3", "1.2.3"),
        ("v1.2.3-dirty", "1.2.3+dirty"),
        ("v1.2.3-4-gabc1234", "1.2.3.post4+gabc1234"),
        ("v1.2.3-4-gabc1234-dirty", "1.2.3.post4+gabc1234.dirty"),
        ("v1.2.3-rc.1", "1.2.3rc1"),
        ("v1.2.3-rc1-4-gabc1234", "1.2.3rc1.post4+gabc1234"),
        ("1.2.3", "1.2.3"),
        ("v0.1.0-dev-12-gabc1234", "0.1.0.dev12+gabc1234"),
        ("v0.1.0-dev-12-gabc1234-dirty", "0.1.0.dev12+gabc1234.dirty"),
        ("main-dirty", "0+main.dirty"),
        ("unknown", "0+unknown"),
    ],
)
def test_the_tag_in_the_form_of_pep_440(described: str, public: str) -> None:
    assert version.pep440(described) == public


def wheel_version(folder: Path, environment: dict[str, str]) -> str:
    """Builds the wheel as `make wheel` does."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(PROJECT)]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=dict(os.environ) | environment)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        lines = archive.read(metadata).decode().splitlines()
    (found,) = [line.removeprefix("Version: ") for line in lines if line.startswith("Version: ")]
    return found


def test_the_wheel_takes_the_version_that_make_gives(tmp_path: Path) -> None:
    assert wheel_version(tmp_path, {"KVAGENT_VERSION": "v7.8.9-2-gabcdef0"}) == "7.8.9.post2+gabcdef0"


def test_the_wheel_and_the_binary_agree(tmp_path: Path) -> None:
    """Fail under make, which builds the binary first; elsewhere skip an older binary."""
    need_agent()
    said = subprocess.run([BINARY, "version"], check=True, capture_output=True, text=True, timeout=60)
    binary = version.pep440(said.stdout.split()[1])
    # The tree may have become dirty since the binary was built.
    clean = [each.removesuffix(".dirty").removesuffix("+dirty") for each in (wheel_version(tmp_path, {}), binary)]
    if clean[0] != clean[1]:
        give_up = pytest.fail if os.environ.get(REQUIRE) else pytest.skip
        give_up(f"the wheel is {clean[0]}, bin/kvagent {clean[1]}: run `make build`")
