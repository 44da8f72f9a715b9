"""Turns the configuration of another KV connector of vLLM into kvagent's, and says what of it has
no counterpart.

A SOURCE is a file, - for standard input, or JSON: a kv_transfer_config, a configuration of LMCache
(LMCACHE_CONFIG_FILE), lines LMCACHE_NAME=VALUE, or a configuration of Mooncake's client
(MOONCAKE_CONFIG_PATH). Several are taken together.

Exit codes: 0 everything was translated; 1 something has no counterpart; 2 nothing was translated.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from typing import TYPE_CHECKING

from kvagent.limits import MAX_WORLD
from kvagent.migrate.connectors import ConfigError
from kvagent.migrate.convert import Result, convert
from kvagent.migrate.sources import SourceError, read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Print our configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m kvagent.migrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="*", metavar="SOURCE")
    parser.add_argument("--environment", action="store_true", help="also take LMCACHE_... of the environment")
    parser.add_argument(
        "--ranks", type=int, default=1, help="ranks of engines on a node, for sizes that are each rank's (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    if not 1 <= given.ranks <= MAX_WORLD:
        parser.error(f"--ranks: {given.ranks}, allowed: 1 to {MAX_WORLD}")
    try:
        result = convert(read(given.source, os.environ if given.environment else {}), given.ranks)
    except (SourceError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(_json(result) if given.json else _text(result))
    return 1 if result.missing else 0


def _json(result: Result) -> str:
    content = {
        "kv_transfer_config": result.transfer,
        "serve": result.serve.command(),
        "became": result.became,
        "no_counterpart": result.missing,
        "notes": result.notes,
    }
    return json.dumps(content, indent=2) + "\n"


def _text(result: Result) -> str:
    lines = [
        "# vLLM:",
        f"--kv-transfer-config {shlex.quote(json.dumps(result.transfer))}",
        "",
        "# The agent, once on each node:",
        shlex.join(result.serve.command()),
    ]
    lines += _section("What the options became", result.became)
    lines += _section("No counterpart", result.missing)
    lines += _section("Note", {str(i): note for i, note in enumerate(dict.fromkeys(result.notes), 1)})
    return "\n".join(lines) + "\n"


def _section(title: str, entries: Mapping[str, str]) -> list[str]:
    return ["", f"# {title}:", *(f"#   {name}: {text}" for name, text in entries.items())] if entries else []


if __name__ == "__main__":
    sys.exit(main())
