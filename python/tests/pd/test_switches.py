"""Switches of single requests through the API of `vllm serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.agent import eventually
from tests.pd.traffic import nothing_left, prompts
from tests.vllm.engine import BLOCK

if TYPE_CHECKING:
    from tests.pd.conftest import Node
    from tests.pd.processes import Engine

LENGTH = 12 * BLOCK  # two prompts fit into what saves may pin: what finds no room at its end is not saved


def counted(engine: Engine, name: str) -> int:
    """Return a counter of the connector, from /metrics."""
    lines = engine.get("/metrics").splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:kvagent_{name}_total{{")))


def test_vllms_api_takes_them_as_they_are() -> None:
    """Requests as vLLM's server parses them, without an engine."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.v1.request import Request

    messages = [{"role": "user", "content": "x"}]
    for params in (
        {"kvagent.save": False, "kvagent.hints": [{"action": "kv.pin", "seconds": 1.5}]},
        {"kvagent": {"load": False, "max_load_tokens": 3}},
        {"kvagent.hints": "no list", "do_remote_decode": True},
    ):
        asked = (
            CompletionRequest(model="tiny", prompt=[5, 6], kv_transfer_params=params),
            ChatCompletionRequest(model="tiny", messages=messages, kv_transfer_params=params),
        )
        for one in asked:
            sampling = one.to_sampling_params(4, {})
            request = Request(
                request_id="r", prompt_token_ids=[5, 6], sampling_params=sampling, pooling_params=None
            )  # fmt: skip
            assert request.kv_transfer_params == params


def test_switches_pass_through_vllms_api(node: Node) -> None:
    first, second = node.engines_of(
        {"switched-1": "kv_both", "switched-2": "kv_both"}, min_load_tokens=BLOCK, save_decode_cache=True,
    )  # fmt: skip
    assert first.log.read_text().count("save_decode_cache is save_decode here") == 1
    head = (prompts(70, 4)[3] * LENGTH)[:LENGTH]
    unloaded, limited = [9, *head], [8, *head]

    def stored() -> int:
        return int(node.agent.status()["blocks_stored"])

    before = stored()
    first.complete(head, kv_transfer_params={"kvagent.save": False})
    first.complete(head[1:], kv_transfer_params={"kvagent": {"save": False}})
    eventually(lambda: counted(first, "requests_unsaved") == 2, "two requests that are not to be saved")
    assert stored() == before
    expected = [first.complete(unloaded), first.complete(limited)]
    eventually(lambda: stored() >= before + 2 * (LENGTH // BLOCK), "two prompts that are saved")
    assert second.complete(unloaded, kv_transfer_params={"kvagent.load": False}) == expected[0]
    assert counted(second, "lookups") == 0
    switches = {"kvagent.max_load_tokens": 5 * BLOCK, "kvagent.save": "perhaps"}
    assert second.complete(limited, kv_transfer_params=switches) == expected[1]
    eventually(lambda: counted(second, "tokens_loaded") == 5 * BLOCK, "a load of five blocks")
    assert counted(second, "switches_ignored") == 1
    first.complete([7, *head], kv_transfer_params={"kvagent.hints": [{"action": "kv.pin", "seconds": 600}]})
    eventually(lambda: node.agent.status()["hints"]["pinned_blocks"] >= LENGTH // BLOCK, "blocks that are kept")
    first.complete([6, *head], kv_transfer_params={"kvagent.hints": [{"action": "kv.drop", "seconds": 0.1}]})
    # What finds no room among pinned blocks before its request ends is not saved at all.
    eventually(lambda: node.agent.status()["hints"]["blocks_dropped"] > 0, "blocks that are dropped")
    nothing_left(node.agent)
