"""The agent's hits in groups with windows, chunks and states, against those of vLLM's own managers,
over random sets of blocks.
"""

from __future__ import annotations

import random
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

from kvagent import messages as m
from kvagent.lookup import LookupClient, Request
from kvagent.registration import Registration
from kvagent.shm import SharedMemory
from kvagent.vllm import geometry as specs
from kvagent.wire import packed, section
from tests.agent import IDENTITY, PATIENCE_S, Words, chain, wait

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.agent import AgentProcess

BLOCK = 16
BYTES = 64
LONGEST = 12  # blocks of a prompt
PROMPTS = 40
_HEADS: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
KINDS: dict[str, tuple[Any, Any]] = {
    "a window": (managers.SlidingWindowManager, SlidingWindowSpec(sliding_window=40, **_HEADS)),
    "a window of one block": (managers.SlidingWindowManager, SlidingWindowSpec(sliding_window=BLOCK, **_HEADS)),
    "a chunk": (managers.ChunkedLocalAttentionManager, ChunkedLocalAttentionSpec(attention_chunk_size=64, **_HEADS)),
    "states": (
        managers.MambaManager,
        MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align"),
    ),
}  # fmt: skip


def of_vllm(kind: str, hashes: list[bytes], stored: Collection[bytes]) -> int:
    """Return the tokens that vLLM's manager finds if its cache holds these blocks."""
    manager, spec = KINDS[kind]
    pool = SimpleNamespace(
        null_block=None, hash_block_size=BLOCK, get_cached_block=lambda key, _: [key] if key in stored else None
    )
    _, tokens = manager.find_longest_cache_hit(
        block_hashes=hashes, max_length=len(hashes) * BLOCK, kv_cache_group_ids=[0], block_pool=pool,
        kv_cache_spec=spec, drop_eagle_block=False, alignment_tokens=BLOCK,
    )  # fmt: skip
    return int(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_is_that_of_vllm(agent: AgentProcess, kind: str) -> None:
    dice = random.Random(kind)
    blocks = 1 + LONGEST
    group = m.Group(BLOCK, blocks, specs.window(KINDS[kind][1]))
    common: dict[str, Any] = {
        "instance": "one", "identity": IDENTITY, "groups": (group,), "hash_tokens": BLOCK, "world": 1, "shards": 1,
    }  # fmt: skip
    cache, words = SharedMemory(blocks * BYTES), Words()
    with closing(cache), closing(words), closing(agent.connect()) as worker, closing(agent.connect()) as scheduler:
        registered = worker.register(
            Registration(
                **common, role=m.Role.WORKER, rank=0, sync=words.sync(0),
                regions=[(words.memory.region(0), words.memory.fd), (cache.region(1), cache.fd)],
                held={0: {0: [m.Segment(1, 0, BYTES, BYTES)]}},
            )
        )  # fmt: skip
        scheduler.register(Registration(**common, role=m.Role.SCHEDULER))
        words.record(0)
        words.fire(0)
        seen: set[int] = set()
        with closing(LookupClient(agent.folder / "lookup.sock", timeout_s=PATIENCE_S)) as client:
            for number in range(PROMPTS):
                hashes = chain(f"{kind} {number}", dice.randrange(1, LONGEST + 1))
                stored = [key for key in hashes if dice.random() < 0.7]
                if stored:
                    runs = [section(0, b"", [key], [1 + i]) for i, key in enumerate(stored)]
                    worker.save(packed(runs, len(runs)), epoch=worker.epoch, step=0, event=0, revoke=0)
                    assert not any(wait(worker, m.Done, []).statuses)
                answer = client.lookup(
                    Request(
                        space=registered.space, session=scheduler.limits.session, tokens=len(hashes) * BLOCK + 1,
                        hash_len=32, hashes=b"".join(hashes), deadline_us=20_000_000,
                    )
                )  # fmt: skip
                assert answer.tokens == of_vllm(kind, hashes, stored), (number, [key in stored for key in hashes])
                seen.add(answer.tokens)
        assert len(seen) > 3, "hits that do not differ show nothing"
