"""A real engine with LoRA adapters: each answers as without the connector, cold and warm.

The engine keeps one adapter loaded, so that it loads them again whenever another was used.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm.guests.adapters import SETTLED_NS
from tests.agent import eventually
from tests.vllm import engine as real
from tests.vllm.engine import HIDDEN, LAYERS, PROMPTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine
RANK = 8
SOME = PROMPTS[:3]
FEW = 12  # blocks, of which these need 13


def write_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter with random weights, by replacing its files as they are."""
    import torch
    from safetensors.torch import save_file

    generator, prefix = torch.Generator().manual_seed(seed), "base_model.model.model.decoder.layers"
    tensors = {
        f"{prefix}.{i}.self_attn.{name}.lora_{side}.weight": torch.randn(*shape, generator=generator) * 0.3
        for i in range(LAYERS)
        for name in ("q_proj", "k_proj", "v_proj")
        for side, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK)))
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, str(folder / "new"))
    (folder / "new").rename(folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 16, "bias": "none", "base_model_name_or_path": "opt",
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    changed = max(one.stat().st_ctime_ns for one in folder.iterdir())
    eventually(lambda: time.time_ns() > changed + 2 * SETTLED_NS, "settled files")
    return folder


@contextlib.contextmanager
def engine(opt: Path, socket_dir: Path | None, **others: Any) -> Iterator[Any]:
    more = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1} | others
    llm = real.make_engine(opt, None if socket_dir is None else str(socket_dir), **more)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def ask(llm: Any, lora: Any) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in SOME]
    return [list(one.outputs[0].token_ids) for one in llm.generate(asked, params, use_tqdm=False, lora_request=lora)]


def test_adapters(opt: Path, node: AgentProcess, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    contents = {name: write_adapter(tmp_path / name, seed) for seed, name in enumerate(("a", "b", "c", "d"))}
    with engine(opt, None) as llm:
        right = {name: ask(llm, LoRARequest(name, i + 1, str(path))) for i, (name, path) in enumerate(contents.items())}
        right["none"] = ask(llm, None)
    assert len({str(one) for one in right.values()}) == len(right), "outputs do not depend on the adapter"

    used = write_adapter(tmp_path / "used", 0)
    one, two = LoRARequest("one", 1, str(used)), LoRARequest("two", 2, str(contents["b"]))
    same = {"max_model_len": 256}
    with engine(opt, node.folder, **same) as llm:
        side, _ = real.sides(llm)

        def loaded(lora: Any, name: str) -> int:
            before = side.counts.tokens_loaded
            assert ask(llm, lora) == right[name], f"{name} is wrong"
            real.settle(llm)
            assert llm.reset_prefix_cache()
            return side.counts.tokens_loaded - before

        cold = [loaded(lora, name) for lora, name in ((one, "a"), (two, "b"), (None, "none"))]
        warm = [loaded(lora, name) for lora, name in ((one, "a"), (two, "b"), (None, "none"), (one, "a"))]
        assert cold == [0, 0, 0]
        assert all(warm), warm
        write_adapter(used, 2)  # the content of "c", under the name and number of "a"
        assert loaded(LoRARequest("one", 1, str(used), load_inplace=True), "c") == 0
        replaced = [loaded(one, "c"), loaded(one, "c")]
        loaded(two, "b")  # so that vLLM drops the other
        write_adapter(used, 3)  # new, so that nothing which is stored is of this content
        dropped = [loaded(one, "d") for _ in range(3)]  # the first began as another's, so none of it is saved
        print(f"cold {cold}, warm {warm}, replaced {replaced}, dropped {dropped} tokens; {side.counts}")
        assert replaced[0] == 0 < replaced[1]
        assert dropped[0] == 0 < dropped[2]

    with engine(
        opt, node.folder, num_gpu_blocks_override=FEW, **same
    ) as llm:  # another engine, other names and numbers
        side, _ = real.sides(llm)
        preempted = real.preemptions(llm)
        for number, name in enumerate(contents, 7):
            lora = LoRARequest(f"other {name}", number, str(contents[name]))
            assert ask(llm, lora) == right[name]
            llm.reset_prefix_cache()
            before = side.counts.tokens_loaded
            assert ask(llm, lora) == right[name]
            llm.reset_prefix_cache()
            assert side.counts.tokens_loaded > before
        saved = side.counts
        assert saved.saves_stored == 0, "equal adapters do not share"
        print(f"second engine: {len(preempted)} preemptions; {side.counts}")
        assert preempted
        node.kill()
        try:
            assert ask(llm, LoRARequest("other a", 7, str(contents["a"]))) == right["a"]
            assert ask(llm, None) == right["none"]
        finally:
            node.start()
