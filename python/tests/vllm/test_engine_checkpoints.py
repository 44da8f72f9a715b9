"""Real engines of two checkpoints at the same path, one after the other, that differ in the middle
of a file.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest

from kvagent import files as samples
from tests.vllm import engine as real
from tests.vllm.engine import PROMPTS, WHOLE_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.agent import AgentProcess

pytestmark = pytest.mark.engine
WIDE = 8192  # so that the MLP's tensors are beyond the first and the last MiB of the file
TUNED = "model.decoder.layers.0.fc2.weight"


@contextlib.contextmanager
def engine(model: Path, socket_dir: str | None) -> Iterator[Any]:
    llm = real.make_engine(model, socket_dir)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def tune(base: Path, folder: Path) -> Path:
    """Fine-tune an MLP: another checkpoint of the same size, shapes and times, with the same head
    and tail.
    """
    from safetensors.torch import load_file, save_file

    real.write_model(folder, WIDE)
    tensors = load_file(str(base / "model.safetensors"))
    tensors[TUNED] = -tensors[TUNED]
    save_file(tensors, str(folder / "model.safetensors"))
    same_times(folder / "model.safetensors", base / "model.safetensors")
    one, other = ((place / "model.safetensors").read_bytes() for place in (base, folder))
    edge = 1 << 20
    assert (len(one), one[:edge], one[-edge:]) == (len(other), other[:edge], other[-edge:])
    assert one != other
    return folder


def same_times(path: Path, like: Path) -> None:
    times = like.stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def pairs(llm: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the identities of both roles."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector
    return dict(scheduler._identity), dict(get_kv_transfer_group()._identity)


def test_checkpoints_at_one_path_that_differ_in_the_middle(
    opt: Path, node: AgentProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is changed; then the file is overwritten in place, with its old time: equal weights
    share again.
    """
    monkeypatch.setattr(samples, "WHOLE_BYTES", 0)  # as if they were large
    base = real.write_model(tmp_path / "base", WIDE)
    tuned = tune(base, tmp_path / "tuned")
    with engine(tuned, None) as llm:
        reference = real.generate(llm, PROMPTS)
    link = tmp_path / "model"
    link.symlink_to(base)
    with engine(link, str(node.folder)) as llm:
        said = real.generate(llm, PROMPTS)
        real.settle(llm)
        scheduler, worker = pairs(llm)
        assert scheduler == worker
        assert scheduler["resolved"].startswith("CPU_ATTN "), "the attention backend that is used is not said"
        assert scheduler["device"].startswith("cpu ")
    assert node.status()["blocks_stored"] * 2 >= WHOLE_BLOCKS
    assert said != reference, "checkpoints that say the same show nothing"
    link.unlink()
    link.symlink_to(tuned)
    with engine(link, str(node.folder)) as llm:
        assert real.generate(llm, PROMPTS) == reference, "an engine was given what other weights had computed"
        real.settle(llm)
        assert real.sides(llm)[0].counts.tokens_loaded == 0
        llm.reset_prefix_cache()
        assert real.generate(llm, PROMPTS) == reference
        assert real.sides(llm)[0].counts.tokens_loaded > 0, "an engine does not find its own blocks"
    target = link / "model.safetensors"
    with target.open("r+b") as file:
        file.write((base / "model.safetensors").read_bytes())
    same_times(target, base / "model.safetensors")
    with engine(link, str(node.folder)) as llm:
        assert real.generate(llm, PROMPTS) == said, "an engine was given what other weights had computed"
        loaded = real.sides(llm)[0].counts.tokens_loaded // real.BLOCK
        assert loaded * 2 >= WHOLE_BLOCKS, "equal weights do not share"
        print(f"equal weights after a rewrite: {loaded} of {WHOLE_BLOCKS} whole blocks of prompts loaded")
