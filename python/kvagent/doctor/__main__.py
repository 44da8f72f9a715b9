"""Checks from inside an engine's pod whether it and its agent can work together, and says what to
do if not.
"""

from __future__ import annotations

import argparse
import http.client
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvagent import socketdir
from kvagent.doctor import findings as on
from kvagent.doctor.findings import Finding
from kvagent.errors import WrongSetting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per finding. Return 1 if one is a problem."""
    parser = argparse.ArgumentParser(prog="kvagent-doctor", description=__doc__)
    parser.add_argument("--socket-dir", default=socketdir.default(), help="the agent's (default %(default)s)")
    parser.add_argument("--kv-events-config", metavar="JSON", help="the engine's, to be checked for routers")
    given = parser.parse_args(arguments)
    try:
        socketdir.check(given.socket_dir)
    except WrongSetting as error:
        parser.error(str(error))
    problems = 0
    for finding in findings(Path(given.socket_dir), given.kv_events_config):
        sys.stdout.write(finding.lines() + "\n")
        problems += bool(finding.hint)
    sys.stdout.write(f"{problems} problems\n" if problems else "all is well\n")
    return 1 if problems else 0


def findings(directory: Path, kv_events_config: str | None = None) -> Iterator[Finding]:
    """Yield all findings, in the order of their dependencies."""
    yield from on.packages()
    yield on.seed()
    if kv_events_config is not None:
        yield from on.published(kv_events_config)
    here = list(on.directory(directory))
    yield from here
    if any(finding.hint for finding in here):
        return
    path = directory / "session.sock"
    found, boot = on.session(path)
    yield from found
    if boot:
        yield on.lookups(directory / "lookup.sock")
        yield from on.namespaces(path)
    yield on.shared_memory()
    yield from _of_agent(directory / "admin.sock", boot)


def _of_agent(path: Path, boot: bytes) -> Iterator[Finding]:
    try:
        status = on.status_of(path)
    except (OSError, http.client.HTTPException, ValueError) as error:
        yield Finding(f"{path}: {on.said(error)}", on.hint(error))
        return
    yield from on.health(status, boot)
    yield from on.engines(status)
    yield from on.sharing(status)


if __name__ == "__main__":
    sys.exit(main())
