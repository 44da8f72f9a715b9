"""Tests of the Dockerfile without a container engine: rules, build, Mooncake's helper."""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
IN_BASE = {"libc6", "libgcc-s1", "libcrypt1", "zlib1g", "liblzma5", "libzstd1", "libbz2-1.0"}  # of debian:12-slim


def read_stages() -> list[list[tuple[str, str]]]:
    """Return the steps of each stage: instruction, arguments."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text()))
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith("FROM ")] + [len(lines)]
    return [[(*line.split(" ", 1), "")[:2] for line in lines[a:b]] for a, b in itertools.pairwise(starts)]


STAGES = read_stages()


def output(*command: str | Path, **more: Any) -> str:
    """Return what a command prints."""
    return str(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **more).stdout)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what .dockerignore leaves: the last pattern decides that fits it or a folder above."""
    target = tmp_path_factory.mktemp("image")
    patterns = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    for name in output("git", "-C", ROOT, "ls-files").splitlines():
        heads = [Path(name).name, name, *map(str, Path(name).parents)]
        fits = [one for one in patterns if any(fnmatch.fnmatch(head, one.lstrip("!*/")) for head in heads)]
        if (ROOT / name).is_file() and not (fits and fits[-1][0] != "!"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())
    return target


def test_rules() -> None:
    assert [stage[0][1] for stage in STAGES if not re.search(r":[^: ]*\d+\.\d+", stage[0][1])] == [], "a version"
    for stage in STAGES[1:]:
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", dict(stage)["USER"]), "numbers other than 0"
        assert all(isinstance(json.loads(dict(stage)[name]), list) for name in ("ENTRYPOINT", "CMD")), "in exec form"
        for _, arguments in stage:
            packages = re.findall(r"apt-get install -y --no-install-recommends ([^&]*)", arguments)
            assert packages or "apt-get install" not in arguments, "without --no-install-recommends"
            assert all("=" in one for found in packages for one in found.split()), "a package is not pinned"
    assert "python" not in str(STAGES[-1]).lower(), "Python in the final stage"


def test_the_build_makes_the_program_that_the_final_stage_can_run(context: Path) -> None:
    pairs = re.findall(r'(\w+)="([^"]*)"', dict(STAGES[0])["ENV"].replace("/src/", f"{context}/"))
    command = next(one for name, one in STAGES[0] if name == "RUN" and one.startswith("go build"))
    binary = context / "out/kvagent"
    output("bash", "-ec", command.replace("/out/kvagent", str(binary)), cwd=context,
           env=os.environ | dict(pairs) | {"VERSION": "1.2.3-test"})  # fmt: skip
    assert "1.2.3-test" in output(binary, "version")
    assert set(re.findall(r"(\S+) =>", output("ldd", binary))) <= {"libc.so.6"}, "the final stage has no packages"
    assert b"cuMemcpyBatchAsync" in binary.read_bytes(), "no CUDA path"


def test_mooncakes_helper_starts_and_its_packages_bring_its_libraries(context: Path) -> None:
    stage = next(one for one in STAGES if one[0][1].endswith(" mooncake"))
    lock = "/usr/share/doc/kvagent/mooncake.txt"
    assert ("COPY", f"python/locks/mooncake.txt {lock}") in stage
    assert f"--require-hashes -r {lock}" in str(stage)
    venv = Path(output(ROOT / "scripts/env", "mooncake").strip(), "mooncake_master").resolve().parent.parent
    output(venv / "bin/python", "-m", "kvagent.mooncake", "check", env={"PYTHONPATH": str(context / "python")}, cwd="/")
    brought, more = set(IN_BASE), {one.partition("=")[0] for one in re.findall(r"[\w.+-]+=[\w.]+-", str(stage))}
    while more := more - brought:
        brought |= more
        found = output("bash", "-c", f"dpkg-query -W -f '${{Depends}},${{Pre-Depends}},' {' '.join(more)} || true")
        more = set(re.findall(r"(?:^|[,|]) *([\w.+-]+)", found))
    client = next(venv.glob("lib/python3*/site-packages/mooncake/store*.so"))
    libraries = [one for one in re.findall(r"=> (/\S+)", output("ldd", client)) if str(venv) not in one]
    for path in (os.path.realpath(one).removeprefix("/usr") for one in libraries):
        owner = output("bash", "-c", f"dpkg-query -S {path} || dpkg-query -S /usr{path}").partition(":")[0]
        assert owner in brought, "a package of the client's"
