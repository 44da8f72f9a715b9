"""The agent's socket directory: the one that is used if none is named, and which may be used. The
agent has the same rules (settings/values.go).
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from kvagent.errors import WrongSetting
from kvagent.limits import MAX_PATH

SYSTEM = "/run/kvagent"
MAX_BYTES = MAX_PATH - len("/session.sock")


def default() -> str:
    """Return KVAGENT_SOCKET_DIR, or without it /run/kvagent if that exists or this user is root,
    else kvagent in XDG_RUNTIME_DIR, else /tmp/kvagent-UID.
    """
    if (named := os.environ.get("KVAGENT_SOCKET_DIR")) is not None:
        return named
    if os.geteuid() == 0 or Path(SYSTEM).exists():
        return SYSTEM
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return f"{runtime}/kvagent" if runtime.startswith("/") else _temporary()


def check(directory: str) -> None:
    """Raise WrongSetting for a directory in which no socket can be, and for a temporary one that
    another user made, or a link.
    """
    if not directory:
        raise WrongSetting("socket_dir", "'', allowed is a directory")
    path = os.path.abspath(directory)  # noqa: PTH100  which resolves no links
    size = len(os.fsencode(path))
    if size > MAX_BYTES:
        raise WrongSetting("socket_dir", f"{path!r}, {size} bytes, allowed is 1 to {MAX_BYTES}")
    with contextlib.suppress(OSError):  # there is none yet, or using it fails
        check_owner(path)


def check_owner(directory: str) -> None:
    """Raise WrongSetting for a temporary directory that another user made, or a link, and OSError
    if there is none: another user may make it any time. Once it is this user's, none can replace
    it.
    """
    path = os.path.abspath(directory)  # noqa: PTH100
    if path != _temporary():
        return
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise WrongSetting(
            "socket_dir",
            f"{path!r}, of user {found.st_uid} ({stat.filemode(found.st_mode)}), allowed is a directory of user "
            f"{os.geteuid()}, and no link",
        )


def _temporary() -> str:
    return f"/tmp/kvagent-{os.geteuid()}"  # noqa: S108  its owner is checked
