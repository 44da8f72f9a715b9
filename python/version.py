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
    r"v?(?P<release>\d+(\.\d+)*)(-?(?P<pre>a|b|rc)\.?(?P<nth>\d+))?"
    r"((?P<dev>-dev)?-(?P<after>\d+)-g(?P<commit>[0-9a-f]+))?"
)
NEXT = "v0.1.0"  # what commits are builds of as long as there is no tag


def described() -> str:
    """Return the Makefile's VERSION: `v1.2.3`, `v1.2.3-4-gabc1234-dirty`, `unknown`; before the
    first tag `v0.1.0-dev-N-gabc1234`, where N is the number of commits.
    """
    if version := os.environ.get("KVAGENT_VERSION"):
        return version
    try:
        return _git("describe", "--tags", "--dirty")
    except (OSError, subprocess.CalledProcessError):
        pass
    try:
        return f"{NEXT}-dev-{_git('rev-list', '--count', 'HEAD')}-g{_git('describe', '--always', '--dirty')}"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(HERE), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def pep440(version: str) -> str:
    """Return the PEP 440 form. What `described` does not return is a local version of 0."""
    clean = version.removesuffix("-dirty")
    local = ["dirty"] if clean != version else []
    match = DESCRIBED.fullmatch(clean)
    if match is None:
        name = re.sub(r"[^A-Za-z0-9]+", ".", clean).strip(".") or "unknown"
        return "0+" + ".".join([name, *local])
    public = match["release"]
    if match["pre"]:
        public += match["pre"] + match["nth"]
    if match["after"]:
        public += (".dev" if match["dev"] else ".post") + match["after"]
        local.insert(0, "g" + match["commit"])
    return "+".join([public, *filter(None, [".".join(local)])])


if __name__ == "__main__":
    print(pep440(described()))  # noqa: T201
