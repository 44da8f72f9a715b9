"""The socket directory that is used if none is named, and the ones that are refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvagent import socketdir
from kvagent.doctor import main
from kvagent.errors import WrongSetting
from kvagent.session import Session
from kvagent.vllm.options import OptionError, parse
from kvagent.vllm.tier.options import parse as parse_tier
from tests.agent import BINARY, need_agent

NOBODY = 65534


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({}, ""),
        ({"XDG_RUNTIME_DIR": "relative"}, ""),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/kvagent"),
        ({"XDG_RUNTIME_DIR": "/run/user/7", "KVAGENT_SOCKET_DIR": "/x/y"}, "/x/y"),
        ({"KVAGENT_SOCKET_DIR": "/" + "d" * 95}, "allowed"),
        ({"KVAGENT_SOCKET_DIR": ""}, "allowed"),
    ],
)
def test_an_ordinary_user_and_all_programs_have_one_directory(environment: dict[str, str], directory: str) -> None:
    """Whatever the user, `kvagent` and Python find the same one; root has /run/kvagent."""
    need_agent()
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    if "KVAGENT_SOCKET_DIR" not in environment and Path(socketdir.SYSTEM).exists():
        directory = socketdir.SYSTEM
    directory = directory or f"/tmp/kvagent-{uid}"
    code = (
        "import os; from kvagent import socketdir\n"
        f"if os.geteuid() == 0: os.setuid({NOBODY})\n"
        "try: found = socketdir.default(); socketdir.check(found)\n"
        "except Exception as error: found = error\n"
        "print(found)"
    )
    python = [sys.executable, "-c", code]
    package = {"PYTHONPATH": str(Path(__file__).parents[1])}
    said = subprocess.run(python, env=environment | package, check=True, capture_output=True, text=True).stdout
    assert directory in said
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        Path(folder).chmod(0o711)
        program = shutil.copy(BINARY, folder)  # where every user can run it
        run = subprocess.run(
            [program, "status"], env=environment, capture_output=True, text=True, user=uid, cwd="/", timeout=60
        )
    assert directory in run.stderr
    assert run.returncode == (2 if directory == "allowed" else 1)


def test_roots_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVAGENT_SOCKET_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert socketdir.default() == parse({}).socket_dir == parse_tier({}).socket_dir == "/run/kvagent"


def test_a_directory_of_another_user_or_a_link_is_refused_where_everybody_may_create_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(tempfile.mkdtemp(prefix="kvagent-", dir="/tmp"))
    try:
        monkeypatch.setattr(socketdir, "_temporary", lambda: str(directory))
        socketdir.check(str(directory))
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(WrongSetting, match="allowed is a directory of user 12345, and no link"):
            socketdir.check(f"{directory}/../{directory.name}")
        monkeypatch.undo()
        monkeypatch.setattr(socketdir, "_temporary", lambda: str(tmp_path / "link"))
        (tmp_path / "link").symlink_to(directory)
        with pytest.raises(WrongSetting, match="and no link"):
            socketdir.check(str(tmp_path / "link"))
        socketdir.check(str(directory))
        with pytest.raises(WrongSetting, match="and no link"):  # which was made after the check
            Session.connect(tmp_path / "link" / "session.sock")
    finally:
        directory.rmdir()


def test_who_names_a_wrong_directory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    long = "/" + "d" * 94
    said = "socket_dir: '/ddd.*', 95 bytes, allowed is 1 to 94"
    with pytest.raises(OptionError, match=said):
        parse({"socket_dir": long})
    with pytest.raises(OptionError, match=said):
        parse_tier({"socket_dir": long})
    with pytest.raises(SystemExit) as end:
        main(["--socket-dir", long])
    assert end.value.code == 2
    assert "95 bytes" in capsys.readouterr().err
