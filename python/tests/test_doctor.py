"""The doctor with the real agent: what works, and every problem with its hint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvagent import doctor as on
from kvagent.doctor import findings, main
from kvagent.vllm.weight_changes import UNSHARED
from tests.agent import BINARY, AgentProcess, Engine
from tests.simulated import SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvagent.doctor import Finding


@pytest.fixture(autouse=True)
def an_engines_python(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"kvagent": "0.1.0", "vllm": "0.33.0"}
    monkeypatch.setattr(on, "_version", versions.get)


@pytest.fixture
def engines(agent: AgentProcess) -> Iterator[Callable[..., SimulatedEngine]]:
    made: list[SimulatedEngine] = []

    def make(name: str, **identity: str) -> SimulatedEngine:
        made.append(SimulatedEngine(agent, name, identity=identity))
        return made[-1]

    yield make
    agent.thaw()
    for engine in made:
        engine.close()


def problems(agent: AgentProcess) -> list[Finding]:
    return [finding for finding in findings(agent.folder) if finding.hint]


def test_engines_that_share_are_well(
    agent: AgentProcess, engines: Callable[..., SimulatedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    engines("one").save("a", "p", 3, 1)
    engines("two")
    assert main(["--socket-dir", str(agent.folder)]) == 0
    said = capsys.readouterr().out
    assert "PROBLEM" not in said
    for part in (
        "session.sock answers: protocol 3",
        "lookup.sock answers after",
        "PID namespace is shared",
        "all 2 engines share one space",
        "engine one: space",
        "1 of 1 ranks",
        "3 blocks stored",
        "all is well",
    ):
        assert part in said


def test_why_two_engines_do_not_share(agent: AgentProcess, engines: Callable[..., SimulatedEngine]) -> None:
    engines("one", weights="aa", hash_seed="default", tenant="t").save("a", "p", 3, 1)
    engines("two", weights="bb", hash_seed="PYTHONHASHSEED 7", tenant="t")
    (found,) = problems(agent)
    assert "engines one and two do not share: hash_seed: 'default' and 'PYTHONHASHSEED 7'; weights: 'aa' and 'bb'" in (
        found.text
    )
    assert "PYTHONHASHSEED in both" in found.hint
    assert "their files differ" in found.hint


def test_a_private_engine_is_reported(agent: AgentProcess, engines: Callable[..., SimulatedEngine]) -> None:
    private = "private:" + 31 * "0"
    made = {"changed": {"weights": "aa"}, "unknown": {"weights": ""}, "opaque": {"weights": "aa", UNSHARED: private}}
    simulated = [
        SimulatedEngine(agent, name, identity=pairs, generation=f"{private}{i}")
        for i, (name, pairs) in enumerate(made.items())
    ]
    simulated.append(SimulatedEngine(agent, "named", identity=made["changed"], generation="named:v2"))
    simulated[0].save("a", "p", 3, 1)
    said = {finding.text for finding in findings(agent.folder)}
    for part in (
        "engine changed: shares with no other engine, since its weights were changed in place, or can change",
        "engine unknown: shares with no other engine, since its weight files are not in a local folder there",
        "engine opaque: shares with no other engine, since a value of its configuration has no form",
        "engine named: its weights are version v2",
    ):
        assert any(part in text for text in said), part
    pairs = [finding for finding in problems(agent) if "changed and named do not share: generation" in finding.text]
    assert "give both the same weights_version" in pairs[0].hint
    for engine in simulated:
        engine.close()


def test_different_models_are_no_problem(agent: AgentProcess, engines: Callable[..., SimulatedEngine]) -> None:
    engines("one", model="x", weights="aa").save("a", "p", 3, 1)
    engines("two", model="y", weights="bb")
    assert problems(agent) == []


def test_nothing_registered_nothing_saved_and_a_rank_that_is_missing(agent: AgentProcess) -> None:
    (found,) = problems(agent)
    assert found.text == "no engine is registered"
    engine = Engine(agent, "half", world=2)
    first, second = problems(agent)
    assert "1 of 2 ranks: its ranks are not all registered, so it finds nothing" in first.text
    assert "nothing was saved yet" in second.text
    engine.close()


def test_switches(agent: AgentProcess, engines: Callable[..., SimulatedEngine]) -> None:
    engines("one").save("a", "p", 3, 1)
    command = [str(BINARY), "set", "loads=off", "--socket-dir", str(agent.folder)]
    subprocess.run(command, check=True, capture_output=True)
    (found,) = problems(agent)
    assert (found.text, found.hint) == ("loads are switched off", "kvagent set loads=on")


def test_an_agent_that_is_frozen_dead_or_was_never_there(
    agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(on, "CONNECT_S", 0.2)
    monkeypatch.setattr("kvagent.doctor.TIMEOUT_S", 0.2)
    agent.freeze()
    assert all("the agent is there and does not answer" in finding.hint for finding in problems(agent))
    agent.thaw()
    agent.kill()
    assert all("start" in finding.hint for finding in problems(agent))
    assert "is gone: start it again" in problems(agent)[0].hint
    agent.start()
    (found, *_) = [finding for finding in findings(tmp_path) if finding.hint]
    assert "kvagent serve" in found.hint
    (found,) = [finding for finding in findings(tmp_path / "none") if finding.hint]
    assert "mount the agent's socket directory" in found.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_user_without_access(agent: AgentProcess) -> None:
    agent.folder.parent.chmod(0o755)
    said = _as_other_user(agent.folder)
    assert "PROBLEM" in said
    assert "may not be entered (0700, uid 0, gid 0) by uid 65534" in said
    assert "--socket-group" in said
    agent.folder.parent.chmod(0o700)
    assert "let this user enter the folders above it" in _as_other_user(agent.folder)


def _as_other_user(folder: Path) -> str:
    """Return the findings of another user, in a child that has imported everything."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        said = on.of_directory(folder).lines()
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize(
    ("owner", "text", "hint"),
    [(0, "another PID namespace", "hostPID: true"), (1 << 22, "cannot be seen from here", ""), (None, "", "")],
)
def test_namespaces(monkeypatch: pytest.MonkeyPatch, owner: int | None, text: str, hint: str) -> None:
    monkeypatch.setattr(on, "_owner", lambda _: owner)
    found = list(on.namespaces(Path("x")))
    assert any(text in one.text for one in found) or not found
    assert any(hint in one.hint for one in found) or not found


def test_another_ipc_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on, "_owner", lambda _: os.getpid())
    monkeypatch.setattr(on, "_ipc_namespace", Path)
    assert any("hostIPC: true" in one.hint for one in on.namespaces(Path("x")))


def test_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(one.hint for one in on.packages({}))
    assert any("kvagent to it" in one.hint for one in on.packages({"VLLM_PLUGINS": "other"}))
    assert not any(one.hint for one in on.packages({"VLLM_PLUGINS": "other,kvagent"}))
    monkeypatch.setattr(on, "_version", {"vllm": "0.28.1"}.get)
    first, second = (one for one in on.packages({}) if one.hint)
    assert "kv_connector_module_path" in first.hint
    assert "0.31 to 0.33" in second.hint
    assert "only engines with the same one" in on.seed({"PYTHONHASHSEED": "1"}).text


def test_what_an_agent_of_another_release_says(agent: AgentProcess) -> None:
    boot = bytes(16)
    (found,) = (one for one in on.health({"boot": "aa"}, boot) if one.hint)
    assert "different runs" in found.text
    pair: dict[str, Any] = {"engine_list": [{"instance": "a", "space": "1"}, {"instance": "b", "space": "2"}]}
    (found,) = on.sharing(pair)
    assert "does not say why" in found.text
    for engine in pair["engine_list"]:
        engine["identity"] = {"model": "m"}
    (found,) = on.sharing(pair)
    assert "block sizes" in found.text


def test_every_key_of_an_identity_has_a_hint() -> None:
    """The keys are those of space.identity."""
    text = (Path(on.__file__).parent / "vllm" / "space.py").read_text()
    keys = set(re.findall(r'^ {8,12}"(\w+)":', text, re.MULTILINE))
    assert keys | {UNSHARED, "cells"} == set(on.HINTS)


def test_it_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvagent.doctor", "--socket-dir", "/nowhere"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert "PROBLEM  /nowhere: No such file or directory" in done.stdout
    assert json.dumps(done.stderr) == '""'


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_an_agent_of_another_user(agent: AgentProcess) -> None:
    """Like a pod with another user, which may enter the folder but not use the sockets."""
    for folder in (agent.folder, agent.folder.parent):
        folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        hints = [finding.hint for finding in findings(agent.folder) if finding.hint]
        os._exit(0 if len(hints) == 2 and all("run the engine as the agent's user" in hint for hint in hints) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("config", "environment", "problems"),
    [
        ('{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5558"}', {}, []),
        ('{"enable_kv_cache_events": true, "replay_endpoint": "x", "endpoint": "ipc:///e"}', {on.HASHES: "1"}, []),
        ('{"enable_kv_cache_events": true}', {}, ["cannot be replayed"]),
        ('{"enable_kv_cache_events": true, "replay_endpoint": "x", "publisher": "null"}', {}, ["are dropped"]),
        (
            '{"enable_kv_cache_events": true, "replay_endpoint": "x", "endpoint": "tcp://10.0.0.1:5557"}', {},
            ["instead of listening"],
        ),
        ('{"enable_kv_cache_events": true, "replay_endpoint": "x"}', {on.HASHES: "0"}, ["are bytes"]),
        ("{}", {}, ["publishes no KV events"]), ("[]", {}, ["publishes no KV events"]), ("{", {}, ["is no JSON"]),
    ],
)  # fmt: skip
def test_what_keeps_routers_from_hearing(config: str, environment: dict[str, str], problems: list[str]) -> None:
    found = [finding for finding in on.published(config, environment) if finding.hint]
    assert len(found) == len(problems)
    for finding, part in zip(found, problems, strict=True):
        assert part in finding.text


def test_events_are_looked_at_only_if_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["--socket-dir", str(tmp_path / "none")])
    assert "KV events" not in capsys.readouterr().out
    main(["--socket-dir", str(tmp_path / "none"), "--kv-events-config", "{}"])
    assert "PROBLEM  the engine publishes no KV events" in capsys.readouterr().out
