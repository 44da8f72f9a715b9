"""Checks from inside an engine's pod whether it and its agent can work together, and says what to
do if not.

The findings are on this Python's packages, vLLM's entry point, settings that keep engines apart and
the engine's KV events, which tell routers what it and its agent hold; on what the agent and the
engine share on the host (socket directory, namespaces, shared memory); and, from the agent's
/status, on its health, its engines, and why engines do not share blocks.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import itertools
import json
import os
import shutil
import socket
import stat
import struct
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvagent import socketdir
from kvagent.errors import KVAgentError, SessionEnded, WrongSetting
from kvagent.lookup import LookupClient, Request
from kvagent.messages import MIN_VERSION, VERSION
from kvagent.session import Session
from kvagent.vllm import internals
from kvagent.vllm.boundary import PAIR as UNCACHED
from kvagent.vllm.geometry import TESTED, tested
from kvagent.vllm.weight_changes import NAMED, PAIR, PRIVATE, UNSHARED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CONNECT_S = 2.0
TIMEOUT_S = 2.0  # of the admin socket
MAX_BYTES = 16 << 20  # of a response
MAX_PAIRS = 20  # of compared engines
HASHES = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
SHM = Path("/dev/shm")  # noqa: S108  the host's shared memory, used by torch
BY_PATH = (
    'add "kv_connector_module_path": "kvagent.vllm" to --kv-transfer-config, with which KVAgentTier keeps its chunks '
    "private to the engine"
)
_LOGS = "with VLLM_LOGGING_LEVEL=DEBUG both log what counts of it"
# How to make two engines agree on a key of their identity; see docs/VLLM.md.
HINTS = {
    "model": "give both the same model path or name",
    "weights": "their files differ: let both read the same files (one volume, or one revision)",
    "generation": "their weights may differ: give both the same weights_version, or, where weights were changed in "
    'place, name them to both after the change (docs/VLLM.md, "Weights that change")',
    UNSHARED: "a value of its configuration has no form that can be compared: its log names it",
    "environment": "give both the same variables of vLLM and of the libraries that compute; " + _LOGS,
    "code": "install the same plugins of vLLM in both, and give both the same code of the model",
    "dtype": "give both the same --dtype",
    "resolved": "vLLM chose other attention backends: give both the same --attention-backend or environment",
    "device": "blocks of different kinds of devices, or of their FP8 formats, cannot be exchanged",
    "tenant": "tenants do not share: that is what the option tenant is for",
    "layout": "give both the same layout option, and run both with the same attention backend",
    "groups": "give both the same --block-size and the same model",
    "stages": "set VLLM_PP_LAYER_PARTITION to the same value in both",
    "tp": "give both the same --tensor-parallel-size",
    "pp": "give both the same --pipeline-parallel-size",
    "shards": "give both the same parallel sizes, or the same share_tp and share_pp",
    "cells": "give both the same share_tp and share_pp, which say how blocks are cut",
    "hash_seed": "set the same PYTHONHASHSEED in both, or in neither and use --prefix-caching-hash-algo sha256",
    "engine": "run the same minor version of vLLM in both",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact. With a ``hint`` it is a problem."""

    text: str
    hint: str = ""

    def lines(self) -> str:
        """Return the printed form."""
        return f"PROBLEM  {self.text}\n         fix: {self.hint}" if self.hint else f"OK       {self.text}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per finding. Return 1 if one is a problem."""
    parser = argparse.ArgumentParser(prog="kvagent-doctor", description=__doc__.partition("\n\n")[0])
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
    yield from packages()
    yield seed()
    if kv_events_config is not None:
        yield from published(kv_events_config)
    yield (here := of_directory(directory))
    if here.hint:
        return
    found, boot = session(directory / "session.sock")
    yield found
    if boot:
        yield lookups(directory / "lookup.sock")
        yield from namespaces(directory / "session.sock")
    yield shared_memory()
    admin = directory / "admin.sock"
    try:
        status = status_of(admin)
    except (OSError, http.client.HTTPException, ValueError) as error:
        yield Finding(f"{admin}: {_said(error)}", _hint(error))
        return
    yield from health(status, boot)
    yield from engines(status)
    yield from sharing(status)


def packages(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield the versions, and whether vLLM can find the connector by its name."""
    own, vllm = _version("kvagent"), _version("vllm")
    if own is None:
        text = "package kvagent is imported from a folder, not installed: vLLM does not find the connector by its name"
        yield Finding(text, f"pip install it, or {BY_PATH}")
    else:
        yield Finding(f"package kvagent {own}")
    if vllm is None:
        yield Finding("vLLM is not installed in this Python: run this command with the engine's own")
        return
    fits = tested(vllm)
    text = f"vLLM {vllm}" if fits else f"vLLM {vllm}: the connector is tested with {TESTED}"
    yield Finding(text, "" if fits else f"install vLLM {TESTED}")
    for feature in internals.USED if find_spec("vllm") is not None else ():
        if reason := internals.missing(feature):
            yield Finding(f"{feature} is off: {reason}", f"install vLLM {TESTED}")
    allowed = environment.get("VLLM_PLUGINS")
    if own is not None and allowed is not None and "kvagent" not in allowed.split(","):
        text = f"VLLM_PLUGINS={allowed!r} leaves the connector's entry point out"
        yield Finding(text, f"add kvagent to it, or {BY_PATH}")


def seed(environment: Mapping[str, str] = os.environ) -> Finding:
    """Return the finding on the seed of block hashes."""
    value = environment.get("PYTHONHASHSEED")
    if value is not None:
        return Finding(f"PYTHONHASHSEED={value}: only engines with the same one share")
    return Finding(
        "PYTHONHASHSEED is not set: engines share with the hash algorithms sha256 and sha256_cbor, not with xxhash"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def published(given: str, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield what is to be said of an engine's ``--kv-events-config``, which is JSON."""
    try:
        config = json.loads(given)
    except ValueError as error:
        yield Finding(f"--kv-events-config is no JSON: {error}", "give this command what the engine gets, in quotes")
        return
    if not isinstance(config, dict) or config.get("enable_kv_cache_events") is not True:
        text = "the engine publishes no KV events: routers do not see what it and its agent hold"
        yield Finding(text, 'add "enable_kv_cache_events": true to --kv-events-config')
        return
    publisher, endpoint = config.get("publisher") or "zmq", str(config.get("endpoint", "tcp://*:5557"))
    if publisher != "zmq":
        yield Finding(f'publisher "{publisher}": KV events are dropped', '"publisher": "zmq" in --kv-events-config')
    elif "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
        yield Finding(f"KV events are published at {endpoint}, plus its data parallel rank")
    else:
        yield Finding(
            f"KV events: vLLM connects to {endpoint} instead of listening there, so no router can subscribe",
            'an endpoint with an asterisk, such as "tcp://*:5557", unless a router listens there',
        )
    if replay := config.get("replay_endpoint"):
        yield Finding(f"KV events can be replayed at {replay}")
    else:
        yield Finding(
            "KV events cannot be replayed: a router that subscribes after they were published never hears of them",
            'a "replay_endpoint" in --kv-events-config, if the router asks for one',
        )
    if environment.get(HASHES, "1") == "0":
        text = f"{HASHES}=0: block hashes in events are bytes, which Dynamo's indexer refuses"
        yield Finding(text, f"unset {HASHES}")
    else:
        yield Finding("block hashes in KV events are integers, as routers expect")


def of_directory(path: Path) -> Finding:
    """Return whether the directory exists and can be entered."""
    try:
        found = path.stat()
    except PermissionError:
        return Finding(f"{path} cannot be reached by uid {os.geteuid()}", "let this user enter the folders above it")
    except OSError as error:
        return Finding(
            f"{path}: {error.strerror}",
            "mount the agent's socket directory here (hostPath, or an emptyDir of one pod), or name it: "
            "socket_dir in kv_connector_extra_config, --socket-dir for this command",
        )
    mode = f"{stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid}, gid {found.st_gid}"
    groups = ", ".join(str(group) for group in sorted({os.getegid(), *os.getgroups()}))
    if os.access(path, os.X_OK):
        return Finding(f"{path} is there ({mode}); this process is uid {os.geteuid()}, groups {groups}")
    return Finding(
        f"{path} may not be entered ({mode}) by uid {os.geteuid()}, groups {groups}",
        f"run the engine as uid {found.st_uid}, or the agent with --socket-group and the pod with that group "
        "in supplementalGroups",
    )


def session(path: Path) -> tuple[Finding, bytes]:
    """Return whether the agent accepts a session, and its boot ID if it does."""
    try:
        opened = Session.connect(path, CONNECT_S)
    except SessionEnded as error:
        fix = "let the agent accept this user or group: --socket-group, or the same runAsUser"
        if "version" in error.text:
            fix = "pip install the kvagent package of the agent's release, or bring the agent to this package's"
        return Finding(f"{path}: the agent refuses: {error.text or error}", fix), b""
    except (OSError, KVAgentError) as error:
        return Finding(f"{path}: {_said(error)}", _hint(error)), b""
    limits = opened.limits
    finding = Finding(
        f"{path} answers: protocol {limits.version} (this package speaks {MIN_VERSION} to {VERSION}), boot "
        f"{opened.boot.hex()}, at most {limits.max_job_blocks} blocks in a job, {limits.lease_bytes} bytes of leases"
    )
    opened.close()
    return finding, opened.boot


def lookups(path: Path) -> Finding:
    """Return whether look-ups are answered."""
    with closing(LookupClient(path, CONNECT_S)) as client:
        begin = time.monotonic()
        try:
            client.lookup(Request(tokens=0, hash_len=0, hashes=b""))
        except KVAgentError as error:
            return Finding(f"{path}: {error}", "the agent runs but does not answer look-ups: see its log")
    return Finding(f"{path} answers after {(time.monotonic() - begin) * 1e3:.1f} ms")


def namespaces(path: Path) -> Iterator[Finding]:
    """Yield whether the agent is in this process's PID and IPC namespaces."""
    pid = _owner(path)
    if pid is None:
        return
    if pid == 0:
        yield Finding(
            "the agent is in another PID namespace",
            "KV caches on a GPU need a common one before Linux 6.5, and where the driver says so: hostPID: true, or "
            "shareProcessNamespace: true in one pod. KV caches in host memory need none",
        )
        return
    yield Finding(f"the agent is process {pid} here: the PID namespace is shared")
    try:
        shared = _ipc_namespace(str(pid)) == _ipc_namespace("self")
    except OSError as error:
        yield Finding(f"whether the IPC namespace is shared cannot be seen from here ({error.strerror})")
        return
    if shared:
        yield Finding("the IPC namespace is shared")
    else:
        yield Finding(
            "the agent is in another IPC namespace",
            "KV caches on a GPU need a common one, or the node's /dev/shm in both pods: hostIPC: true in both, or one "
            "pod for both",
        )


def shared_memory() -> Finding:
    """Return how much memory there is for KV caches in host memory."""
    try:
        free = shutil.disk_usage(SHM).free
    except OSError as error:
        return Finding(f"{SHM}: {error.strerror}", "mount a tmpfs there, for KV caches in host memory")
    return Finding(f"{SHM} has {free >> 20} MiB free: KV caches in host memory have to fit in there")


def _ipc_namespace(process: str) -> Path:
    return Path(f"/proc/{process}/ns/ipc").readlink()


def _owner(path: Path) -> int | None:
    """Return the process that listens there: 0 if it has no ID here, None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(str(path))
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
    return int(struct.unpack("3i", credentials)[0])


def _said(error: Exception) -> str:
    """Return what went wrong with a socket, without its path."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _hint(error: Exception) -> str:
    """Return what to do about an unusable socket."""
    if isinstance(error, FileNotFoundError):
        return "start the agent (kvagent serve --socket-dir ...), or mount the directory that it was given"
    if isinstance(error, ConnectionRefusedError):
        return "the agent that made this socket is gone: start it again"
    if isinstance(error, PermissionError):
        return "run the engine as the agent's user, or the agent with --socket-group and the pod in that group"
    return (
        "the agent is there and does not answer: see its log, and whether it is stopped (state T in ps: kill -CONT; a "
        "debugger, a frozen or throttled cgroup)"
    )


def health(status: Mapping[str, Any], boot: bytes) -> Iterator[Finding]:
    """Yield findings on version, boot and switches."""
    text = f"agent {status.get('version')}, up for {float(status.get('uptime_seconds', 0)):.0f} s"
    if boot and status.get("boot") != boot.hex():
        yield Finding(
            f"{text}: session.sock and admin.sock belong to different runs of the agent",
            "two agents use this directory, or one was just restarted: ask again, then look for the second one",
        )
    elif status.get("problem"):
        yield Finding(f"{text}: {status['problem']}", "see the agent's log")
    else:
        yield Finding(text)
    for name, on in sorted(status.get("switches", {}).items()):
        if on is False:
            yield Finding(f"{name} are switched off", f"kvagent set {name}=on")


def engines(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield whether all ranks of each engine are registered, and what is stored and found."""
    listed = _engines(status)
    if not listed:
        yield Finding(
            "no engine is registered",
            'an engine that runs with the connector logs why, in lines with "kvagent:": look there',
        )
        return
    for engine in listed:
        name, pairs = f"engine {engine.get('instance')}", _identity(engine)
        if reason := pairs.get(UNCACHED):
            yield Finding(
                f"{name} is served UNCACHED, so every prompt is computed: {reason}",
                'change what the reason names (docs/VLLM.md, "What is not supported"), or let such a start fail with '
                '"on_unsupported": "fail" in kv_connector_extra_config',
            )
            continue
        sessions = engine.get("sessions", [])
        ranks = sum(1 for one in sessions if one.get("role") == "worker" and one.get("registered"))
        scheduler = any(one.get("role") == "scheduler" for one in sessions)
        text = f"{name}: space {engine.get('space')}, {ranks} of {engine.get('world')} ranks"
        if engine.get("complete") and scheduler:
            yield Finding(text)
        else:
            missing = "its ranks are not all registered" if scheduler else "its scheduler is not registered"
            fix = 'see the log of that process, lines with "kvagent:"'
            yield Finding(f"{text}: {missing}, so it finds nothing", fix)
        generation = str(pairs.get(PAIR, ""))
        if generation.startswith(NAMED):
            yield Finding(f"{name}: its weights are version {generation.removeprefix(NAMED)}")
        if generation.startswith(PRIVATE):
            why = (
                "its weights were changed in place, or can change unobserved (its log says how); weights_version "
                "names those that it starts with, and weights_fixed says that they never change"
            )
            if not pairs.get("weights", "unknown"):
                why = "its weight files are not in a local folder there; weights_version names them"
            if UNSHARED in pairs:
                why = HINTS[UNSHARED]
            yield Finding(f"{name}: shares with no other engine, since {why}")
    stored, saved, loaded = (status.get(name, 0) for name in ("blocks_stored", "blocks_saved", "blocks_loaded"))
    text = (
        f"{stored} blocks stored, {saved} saved and {loaded} loaded since the agent's start; "
        f"{100 * float(status.get('hit_rate', 0)):.0f} % of the tokens asked for were found"
    )
    if saved:
        yield Finding(text)
        return
    yield Finding(
        f"{text}: nothing was saved yet",
        "only full blocks of finished steps are saved, and by a kv_consumer only with consumer_saves: send a prompt "
        "longer than a block, then ask again",
    )


def sharing(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield which keys of the engines' identities differ."""
    served = [engine for engine in _engines(status) if not _identity(engine).get(UNCACHED)]
    spaces: dict[str, Mapping[str, Any]] = {}
    for engine in served:
        spaces.setdefault(str(engine.get("space")), engine)
    if len(spaces) == 1 and len(served) > 1:
        yield Finding(f"all {len(served)} engines share one space")
    for one, other in itertools.islice(itertools.combinations(spaces.values(), 2), MAX_PAIRS):
        yield _difference(one, other)


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> Finding:
    pair = f"engines {one.get('instance')} and {other.get('instance')} do not share"
    mine, its = _identity(one), _identity(other)
    if not mine or not its:
        return Finding(f"{pair}; this agent does not say why", "compare what docs/VLLM.md lists, or update the agent")
    keys = sorted(key for key in {*mine, *its} if mine.get(key) != its.get(key))
    if not keys:
        return Finding(f"{pair}: block sizes, windows or shards differ", "give both the same --block-size and sizes")
    if "model" in keys and "weights" in keys:
        return Finding(f"{pair}: they serve different models ({mine.get('model')}, {its.get('model')})")
    return Finding(
        f"{pair}: {'; '.join(f'{key}: {mine.get(key)!r} and {its.get(key)!r}' for key in keys)}",
        "; ".join(HINTS.get(key, f"give both the same options of vLLM's {key}; {_LOGS}") for key in keys),
    )


def _engines(status: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    listed = status.get("engine_list")
    return listed if isinstance(listed, list) else []


def _identity(engine: Mapping[str, Any]) -> dict[str, Any]:
    found = engine.get("identity")
    return found if isinstance(found, dict) else {}


def status_of(path: Path) -> dict[str, Any]:
    """Return the agent's /status, or raise OSError, http.client.HTTPException or ValueError."""
    connection = http.client.HTTPConnection("kvagent")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(TIMEOUT_S)
        connection.sock.connect(str(path))
        connection.request("GET", "/status")
        answer = connection.getresponse()
        body = answer.read(MAX_BYTES)
        if answer.status != http.client.OK:
            raise ValueError(f"/status is answered by {answer.status}")
    finally:
        connection.close()
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("/status is not a JSON object")  # noqa: TRY004  the agent's answer is wrong, not an argument
    return found


if __name__ == "__main__":
    sys.exit(main())
