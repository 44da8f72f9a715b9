"""A prefill engine at one agent, a decode engine at another: the agents send each other blocks."""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.agent import eventually
from tests.pd.conftest import Node
from tests.pd.processes import Engine, Nursery, Proxy, free_port, mooncake_proxy, push_proxy, toy_proxy
from tests.pd.traffic import SALT, compare, nothing_left, prompts, tails
from tests.vllm.engine import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REQUESTS = 10  # whose times are printed
LENGTH = 56 * BLOCK + 5  # of their prompts


class Two:
    """Two nodes, and the address of the first one's agent."""

    def __init__(self, first: Node, second: Node, peer: str) -> None:
        self.first, self.second, self.peer = first, second, peer


@pytest.fixture(scope="module")
def nodes(node: Node, tiny: Path, nursery: Nursery) -> Iterator[Two]:
    """The first node's agent restarts with a listener; a second node has one too."""
    with tempfile.TemporaryDirectory(prefix="kvagent-pd-") as folder:
        key = Path(folder) / "key"
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
        peers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        # The agents are not taken for dead, however late they are.
        common = ["--peer-key-file", str(key), "--peer-timeout", "1m"]
        flags = [["--peer-listen", peer, *common] for peer in peers]
        node.restart_agent(*flags[0])
        second = Node(Path(folder), tiny, nursery, *flags[1])
        yield Two(node, second, peers[0])
        second.close()
        node.restart_agent()


@pytest.fixture(scope="module")
def engines(nodes: Two) -> tuple[Engine, Engine]:
    prefill = nodes.first.engine("prefill-1", "kv_producer")
    decode = nodes.second.engine("decode-2", "kv_consumer")
    nodes.first.joined("prefill-1")
    return prefill, decode


PROXIES: dict[str, Callable[[Two, Engine, Engine], Proxy]] = {
    "toy": lambda nodes, prefill, decode: toy_proxy(nodes.second.folder, [prefill], [decode]),
    "push": lambda nodes, prefill, decode: push_proxy(
        nodes.second.folder, prefill, "prefill-1", [decode], nodes.peer
    ),
    "mooncake": lambda nodes, prefill, decode: mooncake_proxy(
        nodes.second.folder, [(prefill, nodes.first.http_port)], [decode]
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PROXIES)
def test_the_decode_engine_computes_only_tails(nodes: Two, engines: tuple[Engine, Engine], kind: str) -> None:
    prefill, decode = engines
    some = prompts(100 + list(PROXIES).index(kind), 12)
    proxy = PROXIES[kind](nodes, prefill, decode)
    try:
        assert compare(proxy, [decode], some, 4) == tails(some)
    finally:
        proxy.kill()
    nothing_left(nodes.first.agent, nodes.second.agent)
    fetched = nodes.second.agent.status()["peers"]
    assert fetched["blocks_fetched"] > 0
    assert not any(count for reason, count in fetched["blocks_failed"].items() if reason != "had")


def test_what_the_decode_engine_has_is_not_fetched(nodes: Two, engines: tuple[Engine, Engine]) -> None:
    """As of a conversation that goes on."""
    prefill, decode = engines
    before, after = prompts(110, 4)[2:]
    decode.complete(before, 1)
    fetched = nodes.second.agent.status()["peers"]["blocks_fetched"]
    proxy = PROXIES["toy"](nodes, prefill, decode)
    try:
        proxy.complete(before + after)
    finally:
        proxy.kill()
    fetched = nodes.second.agent.status()["peers"]["blocks_fetched"] - fetched
    assert fetched == len(before + after) // BLOCK - len(before) // BLOCK
    nothing_left(nodes.first.agent, nodes.second.agent)


@pytest.mark.parametrize("kind", PROXIES)
def test_the_first_token_follows_the_last_block(nodes: Two, engines: tuple[Engine, Engine], kind: str) -> None:
    """Prints the times, for docs/measurements/2026-11-23-prefill-decode.md."""
    prefill, decode = engines
    dice = random.Random(120 + list(PROXIES).index(kind))
    some = [[dice.randrange(10, 500) for _ in range(LENGTH)] for _ in range(1 + REQUESTS)]  # the first warms up
    proxy = PROXIES[kind](nodes, prefill, decode)
    times = []
    try:
        for prompt in some:
            before = decode.computed()
            begin = time.monotonic()
            alone = decode.complete(prompt, 1, cache_salt=SALT)
            took = time.monotonic() - begin
            assert decode.computed() - before == LENGTH
            said, whole, after = handed_over(nodes.first, proxy, prompt)
            assert said == alone
            assert decode.computed() - before == LENGTH + LENGTH % BLOCK
            times.append((took, whole, after))
    finally:
        proxy.kill()
    alone_ms, whole_ms, after_ms = (1000 * statistics.median(one) for one in zip(*times[1:], strict=True))
    print(
        f"{kind}: first token after {whole_ms:.0f} ms, {after_ms:.0f} ms after the last block; "
        f"of one engine alone after {alone_ms:.0f} ms (medians of {len(times) - 1})"
    )
    nothing_left(nodes.first.agent, nodes.second.agent)


def handed_over(first: Node, proxy: Proxy, prompt: list[int]) -> tuple[list[int], float, float]:
    """Return a proxy's first token, and the seconds to it from the request and from the prefill
    engine's last block: when its agent has stored it.
    """

    def completed() -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{first.http_port}/status", timeout=60) as answer:
            return int(json.load(answer)["transfers"]["completed"])

    def asked() -> tuple[list[int], float]:
        return proxy.complete(prompt, 1), time.monotonic()

    before = completed()
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asked)
        eventually(lambda: completed() > before, "the last block of the prefill engine")
        stored = time.monotonic()
        said, end = answer.result()
    return said, end - begin, end - stored
