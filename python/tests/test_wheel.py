"""The wheel: two dependencies, importable without an engine; pure Python without the agent."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
# Derive from vllm's classes: imported in an engine alone.
OF_VLLM = {f"kvagent.vllm.{name}" for name in ("connector", "tier.manager")}


def build(folder: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(PROJECT)]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=dict(os.environ) | environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.parametrize(("machine", "platform"), [(62, "x86_64"), (183, "aarch64")])
def test_the_wheel_with_the_agent_is_for_its_machine(tmp_path: Path, machine: int, platform: str) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF".ljust(18, b".") + machine.to_bytes(2, "little") + bytes(44))
    program.chmod(0o755)
    wheel = build(tmp_path, KVAGENT_PROGRAM=str(program))
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{platform}.whl")
    with zipfile.ZipFile(wheel) as archive:
        (script,) = [each for each in archive.infolist() if each.filename.endswith(".data/scripts/kvagent")]
        assert archive.read(script) == program.read_bytes()
        assert script.external_attr >> 16 & 0o111
        (tags,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/WHEEL")]
    assert "Root-Is-Purelib: false" in tags


def test_the_wheel_is_pure_and_imports_alone(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        requires = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
    assert {"kvagent/py.typed", "kvagent/vllm/foreign.json"} <= set(names)
    assert all(name.startswith("kvagent/") for name in names)
    assert [line.split()[1].split(">")[0] for line in requires] == ["msgpack", "pyzmq"]
    modules = [name.removesuffix(".py").replace("/", ".") for name in names if name.endswith(".py")]
    assert set(modules) >= OF_VLLM
    modules = [name for name in modules if name not in OF_VLLM and not name.endswith("__main__")]
    script = (
        f"import sys; sys.path.insert(0, {str(wheel)!r})\n"
        + "".join(f"import {name.removesuffix('.__init__')}\n" for name in modules)
        + "assert sys.modules['kvagent'].__file__.startswith(sys.path[0])\n"
        + "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-I", "-c", script], check=True, timeout=60)
