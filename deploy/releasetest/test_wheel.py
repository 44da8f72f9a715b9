"""Tests of the wheels in dist/, installed as a user does: from an empty folder, with an empty HOME,
in an empty environment of each supported Python. What cannot be had here is LEFT OUT.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEWEST_GLIBC = 28  # 2.28
MOST_BYTES = 25_000_000
# Packages that ask little of the kernel: qemu emulates the processor alone.
UNITS = ["./crc32c", "./pool", "./lookup", "./takeover", "./agent/lease", "./agent/registration"]


def output(*command: str | Path, **more: Any) -> str:
    """Return what a command prints, which pytest shows of a test that fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=False, **more)
    print(done.stdout)
    done.check_returncode()
    return str(done.stdout)


@pytest.fixture(scope="module")
def tools() -> Path:
    return Path(output(ROOT / "scripts/env", "wheel").strip())


def wheel_of(machine: str) -> Path:
    (wheel,) = (ROOT / "dist").glob(f"kvagent-*-py3-none-manylinux_2_28_{machine}.whl")
    return wheel


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_wheel_is_small_and_portable(tools: Path, machine: str) -> None:
    assert wheel_of(machine).stat().st_size <= MOST_BYTES
    said = output(tools / "bin/auditwheel", "show", wheel_of(machine))
    (glibc,) = re.findall(r'platform tag:\s+"manylinux_2_(\d+)_', said)
    assert int(glibc) <= NEWEST_GLIBC


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_the_wheel_installs_and_runs(tools: Path, python: str, tmp_path: Path) -> None:
    venv, home, sockets = tmp_path / "venv", tmp_path / "home", tmp_path / "run"
    make_environment(tools, python, venv)
    home.mkdir()
    # With nothing of this checkout or its user in the environment.
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "PATH": f"{venv}/bin:/usr/bin:/bin"}

    def user(program: str, *arguments: str | Path, **more: Any) -> str:
        return output(venv / "bin" / program, *arguments, cwd=tmp_path, env=clean | more)

    user("pip", "install", "--quiet", wheel_of(os.uname().machine))
    assert user("python", "--version").startswith(f"Python {python}.")
    assert "kvagent" in user("kvagent", "version")

    serve: list[str | Path] = [venv / "bin/kvagent", "serve", "--socket-dir", sockets, "--pool", "64MiB"]
    with subprocess.Popen(serve, cwd=tmp_path, env=clean) as agent:
        try:
            ready: list[str | Path] = [venv / "bin/kvagent", "check", "ready", "--socket-dir", sockets]
            while subprocess.run(ready, stderr=subprocess.DEVNULL, env=clean, check=False).returncode != 0:
                assert agent.poll() is None
                time.sleep(0.1)
            doctor = subprocess.run([venv / "bin/kvagent-doctor", "--socket-dir", sockets], stdout=subprocess.PIPE,
                                    text=True, cwd=tmp_path, env=clean, check=False)  # fmt: skip
        finally:
            agent.terminate()
        assert agent.wait(timeout=60) == 0
    assert "session.sock answers" in doctor.stdout
    # Its one problem is that no engine is registered.
    assert [doctor.returncode, doctor.stdout.splitlines()[-1]] == [1, "1 problems"]

    # Without hashes: pip wants one for each requirement or for none.
    locked = re.findall(r"(?m)^\S+==\S+", (ROOT / "python/requirements-dev.txt").read_text())
    (tmp_path / "versions").write_text("\n".join(locked))
    user("pip", "install", "--quiet", "--constraint", tmp_path / "versions", "pytest", "pytest-rerunfailures")
    shutil.copytree(ROOT / "python/tests", tmp_path / "tests")
    user("python", "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir",
         tmp_path, "tests/test_agent.py", "tests/test_doctor.py", KVAGENT_REQUIRE_AGENT="1",
         KVAGENT_BINARY=f"{venv}/bin/kvagent")  # fmt: skip
    output("bin/kvbench", "replay", "--kvagent", venv / "bin/kvagent", "--trace", "testdata/conversation_1000.jsonl",
           "--engines", "2", "--pace", "10s", cwd=ROOT, env=clean)  # fmt: skip


def make_environment(tools: Path, python: str, venv: Path) -> None:
    """Make an environment with a Python of pyenv or of PATH, or with one that uv downloads."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    path = ":".join([*map(str, pyenv.glob(f"versions/{python}.*/bin")), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "UV_PYTHON_INSTALL_DIR": str(venv.parent / "pythons")}
    uv: list[str | Path] = [tools / "bin/uv", "--system-certs", "run", "--no-project", "--python", python]
    try:
        output(*uv, "python", "-m", "venv", venv, cwd=venv.parent, env=environment)
    except subprocess.SubprocessError as error:
        assert not sys.version.startswith(f"{python}."), "this very Python is to be had"
        pytest.skip(f"no Python {python} is to be had here: LEFT OUT: {error}")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the wheel for aarch64 is installed above")
def test_the_wheel_for_aarch64_starts_under_qemu(tools: Path, tmp_path: Path) -> None:
    if subprocess.run([ROOT / "scripts/env", "packages", "arm64"], check=False).returncode != 0:
        pytest.skip("without qemu, the wheel for aarch64: LEFT OUT")
    emulator = ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"]
    with zipfile.ZipFile(wheel_of("aarch64")) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".data/scripts/kvagent")]
        kvagent = Path(wheel.extract(name, tmp_path))
    kvagent.chmod(0o755)
    assert "linux/arm64" in output(*emulator, kvagent, "version")
    compiler = f"{ROOT}/scripts/zig-cc {tools} aarch64-linux-gnu.2.28"
    output("go", "test", "-short", "-trimpath", "-vet=off", "-exec", " ".join(emulator), *UNITS, cwd=ROOT,
           env=os.environ | {"CGO_ENABLED": "1", "GOARCH": "arm64", "CC": compiler})  # fmt: skip
