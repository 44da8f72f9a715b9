"""The version of the wheel: that of the Go binaries, which is the tag's, in the form of PEP 440.

Hatchling reads it (pyproject.toml). It comes from KVAGENT_VERSION, which `make wheel` sets, or
from git, as in the Makefile.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
DESCRIBED = re.compile(
    r"v(?P<release>\d+(\.\d+)*)(-?(?P<pre>a|b|rc)\.?(?P<nth>\d+))?(-(?P<after>\d+)-g(?P<commit>[0-9a-f]+))?"
)
COMMIT = re.compile(r"[0-9a-f]{7,40}")


def described() -> str:
    """Return the Makefile's VERSION: `v1.2.3`, `v1.2.3-4-gabc1234`, `abc1234-dirty`, `unknown`."""
    if version := os.environ.get("KVAGENT_VERSION"):
        return version
    command = ["git", "-C", str(HERE), "describe", "--tags", "--always", "--dirty"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def pep440(version: str) -> str:
    """Return the PEP 440 form. A commit without a tag before it is a local version of 0."""
    clean = version.removesuffix("-dirty")
    local = ["dirty"] if clean != version else []
    match = DESCRIBED.fullmatch(clean)
    if match is None:
        name = re.sub(r"[^A-Za-z0-9]+", ".", clean).strip(".") or "unknown"
        return "0+" + ".".join(["g" + name if COMMIT.fullmatch(name) else name, *local])
    public = match["release"]
    if match["pre"]:
        public += match["pre"] + match["nth"]
    if match["after"]:
        public += ".post" + match["after"]
        local.insert(0, "g" + match["commit"])
    return "+".join([public, *filter(None, [".".join(local)])])


if __name__ == "__main__":
    print(pep440(described()))  # noqa: T201
