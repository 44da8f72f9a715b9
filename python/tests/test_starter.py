"""An agent that engines start: one for all of them, of no process of theirs, back after its end."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvagent import messages as m
from kvagent import starter
from kvagent.errors import NotStarted, WrongSetting
from kvagent.registration import Registration, identity_pairs
from kvagent.vllm.link import Link, start_agent
from kvagent.vllm.options import OptionError, parse
from kvagent.vllm.tier.options import parse as parse_tier
from tests.agent import BINARY, START_S, eventually
from tests.tier_rig import Rig, keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent import StartedAgents

POOL = "16MiB"


@pytest.fixture(autouse=True)
def patient_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "START_S", START_S)


@contextmanager
def asker(started: StartedAgents, after: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process, in a session of its own, that asks for an agent, prints a line when it has
    one, and goes on. It is killed at the end.
    """
    code = (
        "import sysconfig\nfrom kvagent import starter\n"
        f"starter.START_S = {START_S}\nsysconfig.get_path = lambda _: {str(started.programs)!r}\n"
        f"starter.ensure({str(started.folder)!r}, {POOL!r})\nprint('there', flush=True)\n{after}"
    )
    package = {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", code]
    environment = os.environ | package
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def replace_program(started: StartedAgents, script: str) -> None:
    program = started.programs / "kvagent"
    program.unlink()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)


def replace_silent(started: StartedAgents, mark: Path) -> None:
    """Replace it by one that never answers; see process_of."""
    replace_program(started, f"echo $$ >{mark}\nexec sleep 1000")


def process_of(mark: Path) -> int:
    def text() -> str:
        return mark.read_text().strip() if mark.exists() else ""

    return int(eventually(text, "its start", START_S))


def scheduler(started: StartedAgents) -> Link:
    registration = Registration(
        instance="one", role=m.Role.SCHEDULER, groups=(m.Group(16, 1),), hash_tokens=16,
        identity=identity_pairs(dict.fromkeys(("model", "dtype", "tenant"), "t")),
    )  # fmt: skip
    return Link(str(started.folder), "scheduler", lambda: registration, pool=POOL)


def test_eight_processes_at_once_start_one_agent(started: StartedAgents) -> None:
    started.folder.mkdir(0o700)
    (started.folder / starter.LOCK).write_text("of an engine that is gone\n")
    with ExitStack() as all_of_them:
        askers = [all_of_them.enter_context(asker(started)) for _ in range(8)]
        assert [one.communicate()[0] for one in askers] == [b"there\n"] * 8
    (process,) = started.running()
    assert started.serving() == process
    log = started.log.read_text()
    assert (log.count("ready"), log.count("in use")) == (1, 0)


def test_processes_killed_while_they_start_one_leave_room_for_the_next(started: StartedAgents) -> None:
    """One with an agent that never answers, which has not even the lock's descriptor; then some at
    any moment.
    """
    program = started.programs / "kvagent"
    replace_silent(started, mark := started.programs / "mark")
    with asker(started):
        stub = process_of(mark)
    program.unlink()
    program.symlink_to(BINARY)
    for _ in range(3):
        length = started.log.stat().st_size
        with asker(started):
            eventually(lambda: started.log.stat().st_size > length, "a start", START_S)  # noqa: B023
        starter.ensure(str(started.folder), POOL)
        assert eventually(lambda: started.running() == [started.serving()], "one agent")
        started.close()
    os.kill(stub, signal.SIGKILL)


def test_an_agent_that_an_engine_left_starting_is_waited_for(started: StartedAgents) -> None:
    """The next one finds the directory taken, by one that does not answer yet."""
    again = started.programs / "again"
    replace_program(started, f'mkdir {again} || exec {BINARY} "$@"\n{BINARY} "$@" &\nexit 3')
    starter.ensure(str(started.folder), POOL)
    assert eventually(lambda: started.running() == [started.serving()], "one agent")


def test_an_agent_that_was_ending_is_followed(started: StartedAgents) -> None:
    replace_program(started, f'mkdir {started.programs}/again && exit 3\nexec {BINARY} "$@"')
    starter.ensure(str(started.folder), POOL)
    assert started.running() == [started.serving()]


def test_a_crash_is_no_wrong_setting(started: StartedAgents) -> None:
    """Go's runtime ends with the exit code of one."""
    replace_program(started, "echo 'runtime: failed to create new OS thread' >&2\nexit 2")
    with pytest.raises(NotStarted, match=r"(?s)ended at once, with 2; .*\n  runtime: failed to create"):
        starter.ensure(str(started.folder), POOL)


def test_a_log_that_is_a_pipe_holds_up_nothing(started: StartedAgents) -> None:
    started.folder.mkdir(0o700)
    os.mkfifo(started.log)
    with pytest.raises(OSError, match="No such device"):
        starter.ensure(str(started.folder), POOL)


def test_it_belongs_to_no_engine(started: StartedAgents) -> None:
    """The terminal's interrupt, the end of the engine and of all its children do not reach it."""
    with asker(started, "import signal\nsignal.signal(2, signal.SIG_DFL)\nsignal.pause()") as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"there\n"
        agent = started.serving()
        assert os.getsid(agent) != engine.pid
        ancestor = agent
        while ancestor > 1:  # 0 is outside of this PID namespace
            ancestor = int(Path(f"/proc/{ancestor}/stat").read_text().rpartition(")")[2].split()[1])
            assert ancestor != engine.pid
        os.killpg(engine.pid, signal.SIGINT)
        engine.wait()
    assert started.serving() == agent
    inside = Path(f"/proc/{agent}")
    assert (inside / "cwd").readlink() == Path("/")
    assert [(inside / "fd" / str(fd)).readlink() for fd in range(3)] == [Path("/dev/null"), started.log, started.log]
    assert [path.stat().st_mode & 0o777 for path in (started.folder, started.log)] == [0o700, 0o600]


def test_it_has_the_environment_but_not_what_is_the_engines_alone(
    started: StartedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOG_JSON", "true"), ("POOL", "1GiB"), ("SOCKET_DIR", "/elsewhere"), ("END_IDLE", "1ms")):
        monkeypatch.setenv(f"KVAGENT_{name}", value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        starter.ensure(str(started.folder), POOL)
        assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)
    assert os.sched_getaffinity(started.serving()) == allowed
    assert started.log.read_text().startswith("{")
    assert started.status()["pool"]["capacity_bytes"] == 16 << 20
    assert b"CUDA_VISIBLE" not in Path(f"/proc/{started.serving()}/environ").read_bytes()


def test_an_agent_that_was_killed_comes_back_and_an_idle_one_ends(
    started: StartedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "END_IDLE", "500ms")
    link = scheduler(started)
    first = eventually(link.current, "a session", START_S)
    os.kill(started.serving(), signal.SIGKILL)
    link.lost(first)
    second = eventually(link.current, "a session with the next agent", START_S)
    assert second.boot != first.boot
    first.close()
    link.close()
    second.close()
    eventually(lambda: not started.running(), "the end of an idle agent", START_S)
    assert "no session has been open" in started.log.read_text()


def test_a_link_without_the_option_starts_none(
    started: StartedAgents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm.kvagent")
    link = Link(str(started.folder), "scheduler", lambda: pytest.fail("there is nothing to register at"))
    eventually(lambda: "no agent" in caplog.text, "an attempt")
    link.close()
    start_agent(str(started.folder), "")
    assert not started.running()
    assert not started.folder.exists()
    started.folder.symlink_to(started.programs)
    monkeypatch.setattr("kvagent.socketdir._temporary", lambda: str(started.folder))
    link = Link(str(started.folder), "scheduler", lambda: pytest.fail("there is nothing to register at"))
    eventually(lambda: "connecting is retried: socket_dir" in caplog.text, "a refusal")
    link.close()


def test_what_prevents_a_start_is_said_once(
    started: StartedAgents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the engine's start goes on."""
    monkeypatch.setattr("kvagent.vllm.link.PAUSE_FIRST_S", 0.001)
    monkeypatch.setattr("kvagent.vllm.link.PAUSE_REFUSED_S", 0.001)
    monkeypatch.setenv("PATH", "/nowhere")
    (started.programs / "kvagent").unlink()
    with pytest.raises(NotStarted, match=f"no program kvagent, neither in {started.programs} nor on the PATH"):
        starter.ensure(str(started.folder), POOL)
    start_agent(str(started.folder), POOL)
    (started.programs / "kvagent").touch()
    tries = started.programs / "tries"
    replace_program(started, f"echo x >>{tries}\necho $$ at $(/bin/date +%N)\necho kvagent: no room >&2\nexit 1")
    with pytest.raises(NotStarted, match=r"(?s)ended at once, with 1; .*agent\.log ends with\n.*kvagent: no room$"):
        starter.ensure(str(started.folder), POOL)
    caplog.set_level(logging.WARNING, "vllm.kvagent")
    link = scheduler(started)
    begin = len(tries.read_text())
    eventually(lambda: len(tries.read_text()) > begin + 10, "five attempts")
    link.close()
    (line,) = caplog.records
    assert "a start is retried: the agent ended at once, with 1" in line.getMessage()
    assert "no room" in line.getMessage()


def test_an_agent_that_does_not_answer_is_not_waited_for_for_ever(
    started: StartedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = iter([started.programs / "one", started.programs / "two"])
    replace_silent(started, mark := next(marks))
    link = scheduler(started)
    stub = process_of(mark)
    link.close()
    assert not link.busy, "its thread was told to end"
    os.kill(stub, signal.SIGKILL)
    monkeypatch.setattr(starter, "START_S", 0.0)
    replace_silent(started, mark := next(marks))
    with pytest.raises(NotStarted, match=r"has not answered \(its log is .*agent\.log\) for 0 s"):
        starter.ensure(str(started.folder), POOL)
    os.kill(process_of(mark), signal.SIGKILL)


def test_a_pool_that_the_machine_cannot_give_ends_the_engines_start(started: StartedAgents) -> None:
    there = r"agent: start; pool: 2TiB: dram: .*: the machine has [0-9.]+ GiB, of which .* the cgroup allows"
    with pytest.raises(WrongSetting, match=there):
        starter.ensure(str(started.folder), "2TiB")
    with pytest.raises(OptionError, match=there):
        start_agent(str(started.folder), "2TiB")
    assert not started.running()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"agent": "run", "pool": "1GiB"}, "agent: 'run', allowed is one of start"),
        ({"agent": True, "pool": "1GiB"}, "agent: True is not a string"),
        ({"agent": "", "pool": "1GiB"}, "agent: '', allowed is one of start"),
        ({"agent": "start"}, "pool: '', allowed is a size such as 64GiB"),
        ({"agent": "start", "pool": "64GB"}, "pool: '64GB', allowed is a size such as 64GiB"),
        ({"agent": "start", "pool": "-1GiB"}, "pool: '-1GiB', allowed is a size"),
        ({"agent": "start", "pool": 1 << 30}, "pool: 1073741824 is not a string"),
        ({"pool": "1GiB"}, "pool: '1GiB', allowed only where agent is start"),
    ],
)
def test_options(given: dict[str, object], said: str) -> None:
    for read in (parse, parse_tier):
        with pytest.raises(OptionError, match=said):
            read(given)
        for pool in ("1GiB", "1.5 TiB", "1048576"):
            assert read({"agent": "start", "pool": pool}).pool == pool


def test_the_tier_starts_one_too(started: StartedAgents) -> None:
    with closing(Rig(started.folder, agent="start", pool=POOL)) as rig:
        rig.ready()
        content = rig.fill(3, "a")
        job = rig.store(keys("p", 1), [3])
        assert rig.finished(job).done
        job = rig.load(keys("p", 1), [7])
        assert rig.finished(job).done
        assert rig.row(7) == content


def test_an_ordinary_user_names_no_directory(started: StartedAgents) -> None:
    """The engine starts one in the user's own directory, and the user's commands find it."""
    if os.geteuid() != 0:
        pytest.skip("SKIPPED: only root can become another user")
    uid = random.randrange(200_000, 2_000_000_000)
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder:
        Path(folder).chmod(0o711)
        program = Path(folder) / "kvagent"
        program.write_bytes(BINARY.read_bytes())
        program.chmod(0o755)
        code = (
            "import os, sysconfig\nfrom kvagent import socketdir, starter\nfrom kvagent.session import Session\n"
            f"os.setuid({uid})\nstarter.START_S = {START_S}\nsysconfig.get_path = lambda _: {folder!r}\n"
            f"starter.ensure(socketdir.default(), {POOL!r})\n"
            "Session.connect(socketdir.default() + '/session.sock').close()\nprint(socketdir.default())\n"
        )
        environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-c", code]
        said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()
        started.folder = Path(said)
        status = subprocess.run([program, "status"], env={}, user=uid, capture_output=True, text=True)
        try:
            assert said == f"/tmp/kvagent-{uid}"
            assert (Path(said).stat().st_uid, Path(said).stat().st_mode & 0o777) == (uid, 0o700)
            assert (status.returncode, "ready" in status.stdout) == (0, True), status
        finally:
            started.close()
            subprocess.run(["rm", "-r", said], check=False)
