"""What the gate does with a test that fails: scripts/gotest, scripts/flaky and tests/reruns.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONCE = 'func once() bool { f, err := os.OpenFile("ran", os.O_CREATE|os.O_EXCL, 0o600); f.Close(); return err == nil }'
"""Is true in the first process of a test's folder."""


def run(command: list[str], folder: Path, listed: Path, **env: str) -> subprocess.CompletedProcess[str]:
    listed.touch()
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "KVAGENT_FLAKY": str(listed), **env},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.skipif(
    shutil.which("go") is None or not os.environ.get("KVAGENT_REQUIRE_AGENT"), reason="SKIPPED: needs Go and gotestsum"
)
@pytest.mark.parametrize(
    ("body", "passes", "listed"),
    [
        ("", True, False),
        ('if once() { t.Error("late") }', True, True),
        ('t.Error("late")', False, False),
        ('t.Run("sub", func(t *testing.T) { if once() { t.Error("late") } })', True, True),
        ('if once() { t.Error("block 3: WRONG BYTES") }', False, False),
        ('if once() { t.Errorf("wrong checksum %d", 1) }', False, False),
        ('if once() { t.Errorf("exit 1, %d wrong bytes", 0) }', True, True),
        ('if once() { panic("late") }', False, False),
        ('if once() { t.Error("an agent says:\\nWARNING: DATA RACE") }', False, False),
        ("if once() { os.Exit(1) }", False, False),
        ("leaks = once()", False, False),
        ("if once() { n := 0; c := make(chan int); go func() { n++; close(c) }(); n++; <-c }", False, False),
    ],
)
def test_a_failed_go_test_runs_again(tmp_path: Path, body: str, passes: bool, listed: bool) -> None:
    (tmp_path / "go.mod").write_text("module m\n\ngo 1.26\n")
    (tmp_path / "m_test.go").write_text(f"""package m
import ("os"; "testing")
var leaks bool
{ONCE}
func TestMain(m *testing.M) {{ code := m.Run(); if leaks {{ code = 1 }}; os.Exit(code) }}
func TestOther(t *testing.T) {{ _ = once }}
func TestIt(t *testing.T) {{ {body} }}
""")
    flags = ["-race"] if "go func" in body else []
    said = run(
        [str(ROOT / "scripts" / "gotest"), "./...", "-vet=off", "-count=1", *flags], tmp_path, tmp_path / "flaky.txt"
    )
    assert (said.returncode == 0) == passes, said.stdout
    text = (tmp_path / "flaky.txt").read_text()
    assert text.startswith("FLAKY m.TestIt: 2 runs, 1 failures\n") == listed, text
    assert not text or "_test.go:7: " in text


@pytest.mark.parametrize(
    ("body", "passes", "listed"),
    [
        ("pass", True, False),
        ("assert not once(), 'late'", True, True),
        ("raise AssertionError('late')", False, False),
        ("assert not once(), 'wrong bytes'", False, False),
        ("assert (b'1' if once() else b'2') == b'2'", False, False),
        ("assert ([1, 2] if once() else [1, 3]) == [1, 3]", False, False),
    ],
)
def test_a_failed_python_test_runs_again(tmp_path: Path, body: str, passes: bool, listed: bool) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests import reruns\npytest_runtest_logreport, pytest_configure = reruns.report, reruns.configure\n"
    )
    (tmp_path / "test_it.py").write_text(
        "from pathlib import Path\n"
        "def once():\n    try:\n        Path('ran').touch(exist_ok=False)\n"
        "    except FileExistsError:\n        return False\n    return True\n"
        f"def test_it():\n    {body}\n"
    )
    said = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", "."],
        tmp_path, tmp_path / "flaky.txt", PYTHONPATH=str(ROOT / "python"),
    )  # fmt: skip
    assert (said.returncode == 0) == passes, said.stdout
    text = (tmp_path / "flaky.txt").read_text()
    assert text.startswith("FLAKY test_it.py::test_it\n") == listed, text
    assert not text or "late" in text


@pytest.mark.parametrize(("count", "status"), [(0, 0), (5, 0), (6, 1)])
def test_a_few_may_fail_by_chance(tmp_path: Path, count: int, status: int) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "scripts" / "flaky", scripts)
    command = f'for i in $(seq {count}); do echo "FLAKY test $i" >>"$KVAGENT_FLAKY"; done'
    said = run([str(scripts / "flaky"), "bash", "-c", command], tmp_path, tmp_path / "outer", KVAGENT_FLAKY="")
    assert said.returncode == status
    assert said.stdout.count("\nFLAKY test") == count
    failed = run([str(scripts / "flaky"), "bash", "-c", "exit 3"], tmp_path, tmp_path / "outer", KVAGENT_FLAKY="")
    assert failed.returncode == 3
