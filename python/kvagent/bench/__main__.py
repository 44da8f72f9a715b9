"""Measures what the connector adds to a step.

Needs an agent. With vllm installed, its scheduler is measured too.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

from kvagent import socketdir
from kvagent.bench import standalone

RUNNING = (1, 64, 256)  # requests


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m kvagent.bench", description=__doc__)
    parser.add_argument("--socket-dir", default=socketdir.default(), help="the agent's (default %(default)s)")
    parser.add_argument(
        "--running", type=int, nargs="+", default=RUNNING, help="running requests (default %(default)s)"
    )
    parser.add_argument("--without-vllm", action="store_true", help="leave the real scheduler out")
    arguments = parser.parse_args()
    print_standalone(arguments.socket_dir, arguments.running)
    if arguments.without_vllm or importlib.util.find_spec("vllm") is None:
        sys.stdout.write("without the real scheduler: vllm is not installed here, or was left out\n")
        return
    from kvagent.bench import real

    real.print_all(arguments.socket_dir, arguments.running)


def print_standalone(socket_dir: str, running: list[int]) -> None:
    """Print the times of the two sides alone."""
    row = "{:>9} {:>12} {:>14} {:>8} {:>8} {:>12} {:>8} {:>8}\n"
    out = sys.stdout.write
    out("us of a step in the connector alone: of the thread's own time p50, by the clock p50 and p99\n")
    out(row.format("running", "blocks/step", "scheduler own", "p50", "p99", "worker own", "p50", "p99"))
    engine = standalone.Engine(socket_dir)
    try:
        for count in running:
            scheduler, worker, blocks = standalone.steps(engine, min(count, standalone.MOST))
            out(row.format(count, f"{blocks:.1f}", *scheduler.figures(), *worker.figures()))
        own, half, most = standalone.lookups(engine).figures()
        out(f"look-up of {standalone.PROMPT_BLOCKS} blocks: own p50 {own} us, p50 {half} us, p99 {most} us\n")
    finally:
        engine.close()


if __name__ == "__main__":
    main()
