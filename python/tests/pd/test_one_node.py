"""A prefill engine and a decode engine at one agent, behind vLLM's proxies, at default options, but
for how long an answer of the agent is waited for.

The number of tokens that the decode engine computes is read from its metrics: the usage that it
reports has the prefill engine's figure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.pd.processes import UPSTREAM, Engine, Proxy, mooncake_proxy, push_proxy, toy_proxy
from tests.pd.traffic import SALT, compare, nothing_left, prompts, stopping, tails
from tests.vllm.engine import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.pd.conftest import Node

LONGEST = 2000  # tokens; an engine has room for 8,192


@pytest.fixture(scope="module")
def engines(node: Node) -> list[Engine]:
    return node.engines_of({"prefill-1": "kv_producer", "decode-1": "kv_consumer"})


PROXIES: dict[str, Callable[[Node, Engine, Engine], Proxy]] = {
    "toy": lambda node, prefill, decode: toy_proxy(node.folder, [prefill], [decode]),
    "push": lambda node, prefill, decode: push_proxy(node.folder, prefill, "prefill-1", [decode]),
    "mooncake": lambda node, prefill, decode: mooncake_proxy(node.folder, [(prefill, node.http_port)], [decode]),
}


@contextmanager
def behind(kind: str, node: Node, prefill: Engine, decode: Engine) -> Iterator[Proxy]:
    proxy = PROXIES[kind](node, prefill, decode)
    try:
        yield proxy
    finally:
        proxy.kill()


@pytest.mark.parametrize("kind", PROXIES)
def test_the_decode_engine_computes_only_tails(node: Node, engines: list[Engine], kind: str) -> None:
    prefill, decode = engines
    some = prompts(list(PROXIES).index(kind), 20)
    with behind(kind, node, prefill, decode) as proxy:
        assert compare(proxy, [decode], some, 4) == tails(some)
    nothing_left(node.agent)


@pytest.mark.parametrize("kind", ["toy", "push"])
def test_so_it_does_with_an_agent_that_stands_still_half_of_the_time(
    node: Node, engines: list[Engine], kind: str
) -> None:
    prefill, decode = engines
    some = prompts(10 + list(PROXIES).index(kind), 12)
    with behind(kind, node, prefill, decode) as proxy, stopping(node.agent):
        assert compare(proxy, [decode], some, 4) == tails(some)
    nothing_left(node.agent)


def test_more_prompts_than_the_engines_have_blocks_for(node: Node, engines: list[Engine]) -> None:
    prefill, decode = engines
    some = [prompt * (LONGEST // 500) for prompt in prompts(20, 16, 500)]
    with behind("toy", node, prefill, decode) as proxy:
        assert compare(proxy, [decode], some, 16) == tails(some)
    nothing_left(node.agent)


def test_hits_in_the_decode_engine(node: Node, engines: list[Engine]) -> None:
    """It has all of a prompt, or a part of it, or all but what follows."""
    prefill, decode = engines
    whole, part = prompts(30, 4)[2:]
    decode.complete(whole)
    decode.complete(part[: len(part) // 2])
    some = [whole, part, whole + part]
    expected = prefill.complete_all(some, 1, cache_salt=SALT)
    before = decode.computed()
    with behind("toy", node, prefill, decode) as proxy:
        assert proxy.complete_all(some, 1) == expected
    computed = decode.computed() - before
    assert computed <= tails(some) + BLOCK, f"more than a whole prompt's last block again: {decode.counts()}"
    nothing_left(node.agent)


def test_upstreams_edge_cases(node: Node, engines: list[Engine]) -> None:
    prefill, decode = engines
    with behind("toy", node, prefill, decode) as proxy:
        ports = {"PREFILL_PORT": prefill.port, "DECODE_PORT": decode.port, "PROXY_PORT": proxy.port}
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null",
             str(UPSTREAM / "test_edge_cases.py")],
            env=os.environ | {name: str(port) for name, port in ports.items()}, cwd=UPSTREAM, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert "1 passed" in run.stdout
    nothing_left(node.agent)
