"""vLLM's toy proxy with a prefill engine and a decode engine on one node, at default options."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.pd.processes import toy_proxy
from tests.vllm.engine import BLOCK

if TYPE_CHECKING:
    from tests.pd.conftest import Node

REFERENCE = "reference"  # a salt: such requests share nothing with others


def prompts(seed: int, count: int, longest: int = 900) -> list[list[int]]:
    """Return prompts of random lengths."""
    dice = random.Random(seed)
    return [[dice.randrange(10, 500) for _ in range(dice.randrange(1, longest))] for _ in range(count)]


def tails(some: list[list[int]]) -> int:
    """Return how many tokens come after the last whole block of each prompt, at least one."""
    return sum(len(prompt) % BLOCK or 1 for prompt in some)


def test_the_decode_engine_computes_only_tails(node: Node) -> None:
    prefill, decode = node.engines_of({"prefill-1": "kv_producer", "decode-1": "kv_consumer"})
    proxy = toy_proxy(node.folder, [prefill], [decode])
    some = prompts(1, 20)
    expected = decode.complete_all(some, 4, cache_salt=REFERENCE)
    before = decode.computed()
    assert proxy.complete_all(some, 4) == expected
    computed = decode.computed() - before
    print(f"D computed {computed} of {sum(map(len, some))} prompt tokens; the tails have {tails(some)}")
    assert computed == tails(some)
    proxy.kill()
