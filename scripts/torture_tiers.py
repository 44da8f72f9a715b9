"""The stacks of tiers for `torture tiers`, and the servers that it kills and pauses."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 20
LISTEN_POLL_S = 0.02
BUCKET = "blocks"
KEYS = {
    "KVAGENT_TORTURE_S3_ID": "kvagent-torture",
    "KVAGENT_TORTURE_S3_SECRET": "not-a-secret",
}  # of a server on loopback
# Memory and engines' own caches are far smaller than the trace, so that most hits come from a tier.
SMALL = ("--pool", "12MiB", "--engine-blocks", "600")
KILLS = ("--kill-agent-every", "150", "--kill-engine-every", "150")
# A server is used again within a second after it continues; a look-up that waited for its question
# would be 400 ms late.
TROUBLE = "within=1s"
MAX_OVER_DEADLINE_US = 5_000
# A machine whose own short waits end later than that cannot show 5 ms; then only what is far beyond
# its lateness fails. An agent that computes gets a processor later than the sleeper that it is
# compared with.
MAX_LAG_US = 5_000
BUSY_FACTOR = 10


class Server:
    """A server on a free port of loopback, in a process that ends with the context."""

    def __init__(self, name: str, where: Path) -> None:
        self.name, self.where, self.port, self.admin = name, where, free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None
        where.mkdir()
        (where / BUCKET).mkdir()

    def command(self) -> list[str]:
        """Return its command line."""
        port = str(self.port)
        match self.name:
            case "redis":
                return ["redis-server", "--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no"]
            case "s3":
                return ["versitygw", "--keep-alive", "--port", f"127.0.0.1:{port}", "posix", str(self.where)]
            case _:
                master = ["mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
                return [*master, "--metrics_host=127.0.0.1", f"--metrics_port={self.admin}", "--rpc_thread_num=2"]

    def tier(self) -> str:
        """Return its URL as a tier."""
        match self.name:
            case "redis":
                return f"redis://127.0.0.1:{self.port}?{TROUBLE}"
            case "s3":
                keys = "access-key-env=KVAGENT_TORTURE_S3_ID&secret-key-env=KVAGENT_TORTURE_S3_SECRET"
                where = f"endpoint=127.0.0.1:{self.port}&tls=off&path-style=on&region=us-east-1"
                return f"s3://{BUCKET}?{where}&{keys}&{TROUBLE}"
            case _:
                python = Path(os.path.realpath(program("mooncake_master"))).parent / "python"
                return f"mooncake://127.0.0.1:{self.port}?segment=256MiB&python={python}&{TROUBLE}"

    def start(self) -> None:
        """Start it, and return when it listens."""
        command = self.command()
        command[0] = program(command[0])
        env = {**os.environ, "ROOT_ACCESS_KEY": KEYS["KVAGENT_TORTURE_S3_ID"]}
        env["ROOT_SECRET_KEY"] = KEYS["KVAGENT_TORTURE_S3_SECRET"]
        with (self.where.parent / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.where, env=env, stdout=log, stderr=log)
        end = time.monotonic() + START_LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > end or self.process.poll() is not None:
                    self.kill()
                    sys.exit(f"torture: {command[0]} does not listen on port {self.port}")
                time.sleep(LISTEN_POLL_S)

    def kill(self) -> None:
        """Kill it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def pause(self) -> None:
        """Stop it: its sockets stay open but do not answer."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def signal_helpers(self, sent: signal.Signals) -> None:
        """Send a signal to the helpers that agents have for it, if there are any."""
        for pid in helpers(f":{self.port}?"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)


@dataclasses.dataclass(frozen=True)
class Form:
    """The length of a replay, and the times of its faults, in seconds from its start."""

    requests: int
    pace: float
    kill: float
    restart: float
    pause: float
    resume: float

    def events(self, server: Server, *, helper: bool) -> list[tuple[float, Callable[[], None]]]:
        """Return what happens to the server, or to the agents' helpers for it, in order."""
        if helper:
            return [
                (self.kill, lambda: server.signal_helpers(signal.SIGKILL)),
                (self.pause, lambda: server.signal_helpers(signal.SIGSTOP)),
                (self.resume, lambda: server.signal_helpers(signal.SIGCONT)),
            ]
        return [
            (self.kill, server.kill),
            (self.restart, server.start),
            (self.pause, server.pause),
            (self.resume, server.resume),
        ]


SHORT_FORM = Form(requests=400, pace=16, kill=3, restart=4, pause=6, resume=11)
LONG_FORM = Form(requests=1000, pace=75, kill=10, restart=14, pause=22, resume=52)


@dataclasses.dataclass(frozen=True)
class Stack:
    """A stack of tiers, and the least blocks from each: a third of what a busy machine reaches."""

    server: str  # empty: disk alone, and the agent is killed instead
    disk: str = ""  # options
    nodes: int = 1
    floors: tuple[tuple[str, int], ...] = ()
    helper: bool = False  # the agents' helpers are killed and paused, and the server is left alone
    kills: bool = False  # engines and the first agent are killed too

    def name(self) -> str:
        """Return the name of the stack."""
        parts = ["dram", *(["disk"] if self.disk else []), *([self.server] if self.server else [])]
        more = [
            f"{self.nodes} nodes" if self.nodes > 1 else "",
            "helper" if self.helper else "",
            "kills" if self.kills else "",
        ]
        return ", ".join(["+".join(parts), *filter(None, more)])

    def flags(self, where: Path, server: Server | None, form: Form) -> list[str]:
        """Return the flags of the replay."""
        flags = [*SMALL, "--seed", "1", "--requests", str(form.requests), "--nodes", str(self.nodes)]
        if self.disk:
            flags += ["--tier", f"disk:{where}/disk?{self.disk}"]
        if server is None:
            return [*flags, *KILLS]
        return [*flags, "--shared", server.tier(), "--pace", f"{form.pace}s", *(KILLS if self.kills else ())]


SHORT_STACKS = (
    Stack("", "capacity=1GiB&write=save", floors=(("disk", 200),)),
    Stack("redis", floors=(("redis", 40),)),
    Stack("s3", floors=(("s3", 20),)),
)
LONG_STACKS = (
    Stack("", "capacity=1GiB&write=save", floors=(("disk", 400),)),
    Stack("redis", floors=(("redis", 300),)),
    Stack("redis", "capacity=1GiB&write=save", nodes=2, floors=(("disk", 200), ("redis", 300))),
    Stack("s3", floors=(("s3", 300),)),
    Stack("s3", nodes=2, floors=(("s3", 300),)),
    Stack("mooncake", "capacity=64MiB", floors=(("mooncake", 50),)),
    Stack("mooncake", "capacity=64MiB", helper=True, floors=(("mooncake", 50),)),
    Stack("mooncake", "capacity=64MiB", kills=True, floors=(("disk", 15),)),
)


def program(name: str) -> str:
    """Return a server's path; exit without it."""
    path = shutil.which(name)
    if path is None and name != "redis-server":
        what = "mooncake" if name == "mooncake_master" else "servers"
        done = subprocess.run([ROOT / "scripts" / "env", what], capture_output=True, text=True, check=True)
        path = shutil.which(name, path=done.stdout.strip())
    if path is None:
        sys.exit(f"torture: {name} is not installed: make deps")
    return path


def free_port() -> int:
    """Return a free port of loopback."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def helpers(server: str) -> Iterator[int]:
    """Return the process numbers of Mooncake's helpers whose agent has a tier on that server."""
    for where in Path("/proc").iterdir():
        if not where.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended
            parent = (where / "stat").read_text().rpartition(")")[2].split()[1]
            if b"kvagent.mooncake" in (where / "cmdline").read_bytes() and (
                server.encode() in Path("/proc", parent, "cmdline").read_bytes()
            ):
                yield int(where.name)


def follow(events: list[tuple[float, Callable[[], None]]], ended: threading.Event) -> None:
    """Do each thing at its time, until the replay has ended."""
    start = time.monotonic()
    for at, act in events:
        if ended.wait(max(0, start + at - time.monotonic())):
            return
        act()


def troubled(stack: Stack, form: Form, where: Path, run: Callable[[list[str]], dict[str, float]]) -> dict[str, float]:
    """Run one replay over a stack; its server is killed, restarted, paused and continued meanwhile."""
    if not stack.server:
        return run(stack.flags(where, None, form))
    server = Server(stack.server, where / "server")
    ended = threading.Event()
    thread = threading.Thread(target=follow, args=(form.events(server, helper=stack.helper), ended))
    try:
        server.start()
        flags = stack.flags(where, server, form)
        thread.start()
        return run(flags)
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
        server.kill()


def broken(stack: Stack, form: Form, figures: dict[str, float], strict: bool) -> Iterator[str]:
    """Return which promises of tiers a replay broke. Strict: also on a busy machine."""
    came = blocks_from(figures)
    for name, floor in stack.floors:
        if came.get(name, 0) < floor:
            yield f"{came.get(name, 0)} blocks came from {name}, at least {floor} are asked for"
    over, lag = figures["lookup_over_deadline_max_us"], figures["machine_lag_max_us"]
    if over > MAX_OVER_DEADLINE_US + (BUSY_FACTOR * lag if lag > MAX_LAG_US and not strict else 0):
        yield f"a look-up was {over:.0f} µs over its deadline, a wait of the machine itself {lag:.0f} µs"
    if figures["wall_s"] < form.resume and stack.server:
        yield f"it was over after {figures['wall_s']:.0f} s, before the server went on"
    if (stack.kills or not stack.server) and figures["agent_kills"] == 0:
        yield "no agent was killed"


def blocks_from(figures: dict[str, float]) -> dict[str, int]:
    """Return the blocks by source."""
    sources: list[dict[str, int | str]] = figures["sources"]  # type: ignore[assignment]
    return {str(s["name"]): int(s["blocks"]) for s in sources}
