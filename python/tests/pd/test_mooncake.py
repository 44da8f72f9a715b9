"""Prefill engines at one agent, decode engines at another, and nothing between the agents but a
store of Mooncake's: for KVAGENT_LONG=1. tests/vllm/test_transfers_mooncake.py has the short form.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests import mooncake_store
from tests.agent import eventually
from tests.pd.processes import START_S, Engine, mooncake_proxy, toy_proxy
from tests.pd.traffic import compare, nothing_left, prompts, tails

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.pd.conftest import Node

pytestmark = pytest.mark.skipif(os.environ.get("KVAGENT_LONG") != "1", reason="KVAGENT_LONG=1 runs it")


@pytest.fixture(scope="module")
def nodes(node: Node, second: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Two nodes whose agents have the store, and do not know each other."""
    folder, both = tmp_path_factory.mktemp("mooncake"), [node, second]
    with mooncake_store.running(folder) as url:
        for number, one in enumerate(both):
            one.restart_agent(*mooncake_store.flags(url, number, folder / f"state-{number}"))
        for one in both:
            connected = partial(mooncake_store.connected, one.agent)
            eventually(connected, "an agent whose helper has connected", START_S)
        yield both
        for one in both:
            one.restart_agent()


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


@pytest.mark.parametrize("kind", ["toy", "mooncake"])
def test_two_prefill_and_two_decode_engines(nodes: list[Node], kind: str) -> None:
    prefill, decode = engines(
        nodes, {"prefill-1": "kv_producer", "prefill-2": "kv_both"}, {"decode-2": "kv_consumer", "decode-3": "kv_both"}
    )
    check(nodes, kind, prefill, decode, prompts(140 + (kind == "toy"), 40))
