"""Prefill engines at one agent, decode engines at another, and nothing between the agents but a
store of Mooncake's.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.agent import eventually
from tests.pd.processes import START_S, Engine, free_port, mooncake_proxy, toy_proxy
from tests.pd.traffic import compare, nothing_left, prompts, tails

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent import AgentProcess
    from tests.pd.conftest import Node

PROGRAM = "mooncake_master"
LONG = pytest.mark.skipif(os.environ.get("KVAGENT_LONG") != "1", reason="KVAGENT_LONG=1 runs it")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a store that has no memory but what its users give."""
    program = shutil.which(PROGRAM)
    assert program is not None, f"{PROGRAM} is not in PATH: scripts/env mooncake brings it"
    python = Path(program).resolve().parent / "python"
    port = free_port()
    command = [program, "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"]
    command += [f"--metrics_port={free_port()}", "--rpc_thread_num=2"]
    with (tmp_path_factory.mktemp("mooncake") / "master.log").open("ab") as log:
        master = subprocess.Popen(command, stdout=log, stderr=log)

    def listens() -> bool:
        assert master.poll() is None, "the master ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return False
        return True

    try:
        eventually(listens, "a master that listens", START_S)
        yield f"mooncake://127.0.0.1:{port}?python={python}"
    finally:
        master.kill()
        master.wait()


@pytest.fixture(scope="module")
def nodes(node: Node, second: Node, store: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Two nodes whose agents have the store, and do not know each other."""
    both = [node, second]
    for one, memory in zip(both, ("&segment=64MiB", ""), strict=True):
        one.restart_agent("--tier", store + memory, "--tier-state", str(tmp_path_factory.mktemp("state")))
    for one in both:
        eventually(partial(connected, one.agent), "an agent whose helper has connected", START_S)
    yield both
    for one in both:
        one.restart_agent()


def connected(agent: AgentProcess) -> bool:
    (tier,) = agent.status()["tiers"]["list"]
    return bool(tier["store"] == "ok")


def engines(nodes: list[Node], prefill: dict[str, str], decode: dict[str, str]) -> tuple[list[Engine], list[Engine]]:
    """Return engines of the two nodes, which are at their agents."""
    both = nodes[0].engines_of(prefill), nodes[1].engines_of(decode)
    nodes[0].joined(*prefill)
    nodes[1].joined(*decode)
    return both


def check(nodes: list[Node], kind: str, prefill: list[Engine], decode: list[Engine], some: list[list[int]]) -> None:
    """Check that the decode engines answer as one engine does, and compute only tails."""
    if kind == "toy":
        proxy = toy_proxy(nodes[0].folder, prefill, decode)
    else:
        proxy = mooncake_proxy(nodes[0].folder, [(one, nodes[0].http_port) for one in prefill], decode)
    try:
        computed = compare(proxy, decode, some, 4 * len(decode))
    finally:
        proxy.kill()
    tiers = [one.agent.status()["tiers"] for one in nodes]
    assert computed == tails(some), tiers
    assert tiers[1]["fulfilled"] > 0, "nothing was fetched from the store"
    nothing_left(*(one.agent for one in nodes), patience_s=60)


@pytest.mark.parametrize("kind", ["toy", "mooncake"])
def test_the_decode_engine_computes_only_tails(nodes: list[Node], kind: str) -> None:
    prefill, decode = engines(nodes, {"prefill-1": "kv_producer"}, {"decode-2": "kv_consumer"})
    check(nodes, kind, prefill, decode, prompts(130 + (kind == "toy"), 12))


@LONG
@pytest.mark.parametrize("kind", ["toy", "mooncake"])
def test_two_prefill_and_two_decode_engines(nodes: list[Node], kind: str) -> None:
    prefill, decode = engines(
        nodes, {"prefill-1": "kv_producer", "prefill-2": "kv_both"}, {"decode-2": "kv_consumer", "decode-3": "kv_both"}
    )
    check(nodes, kind, prefill, decode, prompts(140 + (kind == "toy"), 40))
