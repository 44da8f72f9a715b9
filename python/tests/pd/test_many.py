"""Several prefill and decode engines, a shared tier, and kills of every process: for
KVAGENT_LONG=1.
"""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import mooncake_store
from tests.agent import eventually
from tests.pd.conftest import Node
from tests.pd.processes import Nursery, Proxy, free_port, mooncake_proxy, toy_proxy
from tests.pd.traffic import SALT, SEED, compare, nothing_left, prompts, tails

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent import AgentProcess

pytestmark = pytest.mark.skipif(os.environ.get("KVAGENT_LONG") != "1", reason="KVAGENT_LONG=1 runs it")
KILLS = int(os.environ.get("KVAGENT_KILLS", "12"))
TTL_S = 3.0
SLACK_S = 30.0  # for what the machine does besides


@pytest.mark.parametrize("kind", ["toy", "mooncake"])
def test_two_prefill_and_two_decode_engines(node: Node, kind: str) -> None:
    one, two, three, four = node.engines_of(
        {"prefill-1": "kv_producer", "prefill-2": "kv_both", "decode-1": "kv_consumer", "decode-2": "kv_both"}
    )
    if kind == "toy":
        proxy = toy_proxy(node.folder, [one, two], [three, four])
    else:
        proxy = mooncake_proxy(node.folder, [(one, node.http_port), (two, node.http_port)], [three, four])
    some = prompts(200 + (kind == "toy"), 40)
    try:
        assert compare(proxy, [three, four], some, 8) == tails(some)
    finally:
        proxy.kill()
    nothing_left(node.agent)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """A Redis server's address."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(tmp_path)]
    with (tmp_path / "redis.log").open("ab") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    yield f"redis://127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.mark.parametrize("kind", ["toy", "mooncake"])
def test_two_nodes_that_share_a_redis(tiny: Path, nursery: Nursery, redis: str, kind: str) -> None:
    """Nothing else joins the agents."""
    with (
        tempfile.TemporaryDirectory(prefix="kvagent-pd-") as one,
        tempfile.TemporaryDirectory(prefix="kvagent-pd-") as two,
        ExitStack() as ends,
    ):
        nodes = [
            Node(Path(folder), tiny, nursery, "--tier", redis, "--tier-state", f"{folder}/state")
            for folder in (one, two)
        ]  # fmt: skip
        for node in nodes:
            ends.callback(node.close)
        prefill, decode = nodes[0].engine("prefill-r", "kv_producer"), nodes[1].engine("decode-r", "kv_consumer")
        if kind == "toy":
            proxy = toy_proxy(nodes[0].folder, [prefill], [decode])
        else:
            proxy = mooncake_proxy(nodes[0].folder, [(prefill, nodes[0].http_port)], [decode])
        ends.callback(proxy.kill)
        some = prompts(220 + (kind == "toy"), 20)
        assert compare(proxy, [decode], some, 4) == tails(some)
        nothing_left(*(node.agent for node in nodes), patience_s=60)


@pytest.mark.parametrize("kind", ["toy", "mooncake"])
def test_two_nodes_that_read_each_others_memory(node: Node, second: Node, tmp_path: Path, kind: str) -> None:
    """By Mooncake's transfer engine, over its TCP."""
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    engine = f"tcp?host=127.0.0.1&python={mooncake_store.interpreter()}"
    both = [node, second]
    for one in both:
        one.restart_agent("--peer-listen", "127.0.0.1:0", "--peer-key-file", str(key), "--peer-rdma", engine)
    for one in both:
        eventually(partial(reads_others, one.agent), "one-sided reads", 60.0)
    prefill, decode = node.engine("prefill-1", "kv_producer"), second.engine("decode-2", "kv_consumer")
    node.joined("prefill-1")
    second.joined("decode-2")
    if kind == "toy":
        proxy = toy_proxy(node.folder, [prefill], [decode])
    else:
        proxy = mooncake_proxy(node.folder, [(prefill, node.http_port)], [decode])
    some = prompts(230 + (kind == "toy"), 20)
    try:
        assert compare(proxy, [decode], some, 4) == tails(some)
    finally:
        proxy.kill()
    nothing_left(*(one.agent for one in both))
    reads = second.agent.status()["peers"]["reads"]
    assert reads["blocks"] > 0, reads
    assert reads["failed"] == 0, reads
    assert node.agent.status()["peers"]["reads"]["pinned_bytes"] == 0
    for one in both:
        one.restart_agent()


def reads_others(agent: AgentProcess) -> bool:
    return bool(agent.status()["peers"]["reads"]["state"] == "up")


class Cluster:
    """Two engines, an agent and a proxy, each of which is killed and started again."""

    def __init__(self, node: Node, kind: str) -> None:
        self.node, self._kind = node, kind
        self.engines = node.engines_of(
            {"prefill-k": "kv_producer", "decode-k": "kv_consumer"}, transfer_ttl_ms=int(TTL_S * 1000),
            remote_wait_ms=5000,
        )  # fmt: skip
        self.proxy = self._proxy()

    def _proxy(self) -> Proxy:
        if self._kind == "toy":
            return toy_proxy(self.node.folder, self.engines[:1], self.engines[1:])
        return mooncake_proxy(self.node.folder, [(self.engines[0], self.node.http_port)], self.engines[1:])

    def kill(self, victim: str) -> None:
        if victim == "agent":
            self.node.agent.kill()
        elif victim == "proxy":
            self.proxy.kill()
        else:
            self.engines[victim == "decode"].kill()

    def restore(self, victim: str) -> None:
        if victim == "agent":
            self.node.agent.start()
            self.node.joined("prefill-k", "decode-k")
        elif victim == "proxy":
            self.proxy = self._proxy()
        else:
            i = int(victim == "decode")
            self.engines[i] = self.node.again(self.engines[i])


@pytest.fixture(params=["toy", "mooncake"])
def cluster(request: pytest.FixtureRequest, tiny: Path, nursery: Nursery) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="kvagent-pd-") as folder:
        node = Node(Path(folder), tiny, nursery)
        try:
            made = Cluster(node, request.param)
            yield made
            made.proxy.kill()
        finally:
            node.close()


def ask(proxy: Proxy, prompt: list[int], timeout_s: float) -> list[int] | None:
    """Return a proxy's answer; None if a process on the way was killed, or this client left."""
    try:
        return proxy.complete(prompt, timeout_s=timeout_s)
    except (OSError, HTTPException, ValueError, KeyError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        return None


def test_kills_at_random_points(cluster: Cluster) -> None:
    """Requests that are answered are answered right; no engine ends by itself, and nothing is left
    over once the transfers' time has passed.
    """
    dice = random.Random(SEED)
    some = prompts(300, 16)
    expected = cluster.engines[0].complete_all(some, 4, cache_salt=SALT)
    answered = 0
    for number in range(KILLS):
        victim = ("prefill", "decode", "agent", "proxy", "client")[number % 5]
        chosen = [dice.randrange(len(some)) for _ in range(8)]
        fresh = [[dice.randrange(10, 500), *some[i]] for i in chosen[:4]]  # of which no cache has anything
        patience = [dice.uniform(0.02, 1.0) if victim == "client" else 120.0 for _ in chosen]
        with ThreadPoolExecutor(8 + len(fresh)) as pool:
            proxy = cluster.proxy
            others = [pool.submit(ask, proxy, prompt, 120.0) for prompt in fresh]
            asked = [pool.submit(ask, proxy, some[i], s) for i, s in zip(chosen, patience, strict=True)]
            if victim != "client":
                time.sleep(dice.uniform(0.0, 1.5))
                cluster.kill(victim)
                if victim == "agent":
                    time.sleep(dice.uniform(0.0, 1.0))
                    cluster.restore(victim)
            for i, one in zip(chosen, asked, strict=True):
                said = one.result()
                assert said in (None, expected[i]), f"{victim}: prompt {i}"
                answered += said is not None
            for one in others:
                one.result()
        print(f"{number}: {victim}; {answered} answered so far")
        for engine in cluster.engines:
            killed = engine is cluster.engines[victim == "decode"] and victim in ("prefill", "decode")
            assert killed or engine.running(), engine.log.read_text()[-4000:]
        nothing_left(cluster.node.agent, patience_s=TTL_S + SLACK_S)
        if victim not in ("client", "agent"):
            cluster.restore(victim)
    assert answered > KILLS
    assert cluster.proxy.complete_all(some, 4) == expected
    nothing_left(cluster.node.agent, patience_s=TTL_S + SLACK_S)
