"""The cost of the connector in each step of an engine: ``python -m tests.vllm.bench``.

Measures vLLM's real scheduler and worker driver, with this connector and without any, step by step
in turn. Without a connector the worker's driver is vLLM's no-op. With one it has its own cost in
every step, so a third driver, with a connector that does nothing, runs in turn with them. No model
runs: the tokens of a step are given. Needs vllm, and an agent.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, KVConnector
from vllm.v1.worker.utils import allocate_kv_cache

from kvagent import socketdir

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 160
WARM_UP = 24
BLOCK_TOKENS = 16
PROMPT_TOKENS = 64
REQUEST_BLOCKS = (PROMPT_TOKENS + STEPS + WARM_UP) // BLOCK_TOKENS + 3
MODEL = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "max_position_embeddings": 32768, "num_hidden_layers": 1,
    "num_attention_heads": 2, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "vocab_size": 512,
}  # fmt: skip


class Noop(KVConnectorBase_V1):
    """A connector that does nothing."""

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    register_kv_caches = start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _nothing
    update_state_after_alloc = _nothing

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()


class Times:
    """Seconds of one part of each step, of this thread's own CPU time."""

    def __init__(self) -> None:
        self.own: list[float] = []
        self._begin = self._sum = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._begin = time.thread_time()

    def end(self) -> None:
        """Stop the clock; a step may have several intervals."""
        self._sum += time.thread_time() - self._begin

    def step(self) -> None:
        """Finish the step."""
        self.own.append(self._sum)
        self._sum = 0.0

    def skip(self) -> None:
        """Drop the measurements of the warm-up."""
        self.own.clear()


def half(seconds: list[float]) -> float:
    """Return the median in microseconds."""
    return statistics.median(seconds) * 1e6


def mean(seconds: list[float]) -> float:
    """Return the mean in microseconds."""
    return statistics.fmean(seconds) * 1e6


class Engine:
    """A scheduler, and the part of a worker's driver that handles connectors."""

    def __init__(self, model: str, running: int, socket_dir: str | None) -> None:
        self.config = _config(model, running, socket_dir)
        self.kv = _kv_cache_config(self.config, running * REQUEST_BLOCKS + 1024)
        self.worker: Any = None
        self.driver: Any = KVConnector()
        self.bare: Any = None
        """The driver of a connector that does nothing."""
        if socket_dir is not None:
            caches = allocate_kv_cache(self.kv, torch.device("cpu"), KVCacheLayout.LBNHC)
            config = copy.deepcopy(self.config)
            kv_transfer_state._KV_CONNECTOR_AGENT = Noop(config, KVConnectorRole.WORKER, self.kv)
            self.bare = ActiveKVConnector(config, caches)
            self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.kv)
            kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
            self.driver = ActiveKVConnector(config, caches)
        self.scheduler = Scheduler(
            vllm_config=self.config, kv_cache_config=self.kv, block_size=BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS,
            structured_output_manager=StructuredOutputManager(self.config), log_stats=False,
        )  # fmt: skip
        self.scheduler.use_v2_model_runner = True
        self.connector = self.scheduler.connector
        self.scheduling, self.updating, self.driving, self.idling = Times(), Times(), Times(), Times()
        self.inside = Times()
        """The connector's own part of scheduling and updating."""
        if self.connector is not None:
            for name in ("build_connector_meta", "update_connector_output", "get_kv_connector_stats"):
                setattr(self.connector, name, _timed(getattr(self.connector, name), self.inside))

    def add(self, count: int) -> None:
        """Add requests of different lengths, so that they do not all fill a block in the same
        step.
        """
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        for i in range(count):
            params = SamplingParams(max_tokens=STEPS + WARM_UP + 8, ignore_eos=True)
            params.update_from_generation_config({}, 1)
            tokens = [(i * 31 + j * 7) % 480 + 5 for j in range(PROMPT_TOKENS + i % BLOCK_TOKENS)]
            self.scheduler.add_request(
                Request(
                    request_id=f"{i}", prompt_token_ids=tokens, sampling_params=params, pooling_params=None,
                    block_hasher=hasher,
                )
            )  # fmt: skip

    def step(self) -> None:
        """Run one step."""
        self.scheduling.begin()
        output = self.scheduler.schedule()
        self.scheduling.end()
        sent = pickle.loads(pickle.dumps(output))  # noqa: S301
        reported = _drive(self.driver, sent, self.driving)
        names = list(output.num_scheduled_tokens)
        sampled = [[] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names]
        out = ModelRunnerOutput(
            req_ids=names, req_id_to_index={n: i for i, n in enumerate(names)}, sampled_token_ids=sampled,
            kv_connector_output=pickle.loads(pickle.dumps(reported)),  # noqa: S301
        )  # fmt: skip
        self.updating.begin()
        self.scheduler.update_from_output(output, out)
        self.updating.end()
        if self.bare is not None:  # so that both find equally cold caches
            output.kv_connector_metadata = KVConnectorMetadata()
            _drive(self.bare, pickle.loads(pickle.dumps(output)), self.idling)  # noqa: S301
        for times in self._times():
            times.step()

    def skip(self) -> None:
        """Drop the measurements so far."""
        for times in self._times():
            times.skip()

    def close(self) -> None:
        """Leave the agent."""
        if self.worker is not None:
            self.worker.shutdown()
            self.connector.shutdown()
            kv_transfer_state._KV_CONNECTOR_AGENT = None

    def _times(self) -> Sequence[Times]:
        return self.scheduling, self.updating, self.driving, self.inside, self.idling


def _drive(driver: Any, output: Any, times: Times) -> Any:
    """Run a model runner's connector calls of a step."""
    times.begin()
    driver.pre_forward(output)
    driver.finish_forward()
    reported = driver.post_forward(output.finished_req_ids)
    times.end()
    return reported


def main() -> None:
    """Print a table with a row for each number of running requests."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.bench")
    parser.add_argument("--socket-dir", default=socketdir.default(), help="the agent's (default %(default)s)")
    parser.add_argument(
        "--running", type=int, nargs="+", default=[1, 64, 256], help="running requests (default %(default)s)"
    )
    given = parser.parse_args()
    row = "{:>9} {:>12} {:>11} {:>9} {:>14} {:>9} {:>14} {:>6} {:>12} {:>12} {:>6} {:>14} {:>6}\n"
    out = sys.stdout.write
    out("us of a step: p50 of the thread's own time, and means of what kvagent adds\n")
    out(row.format(
        "running", "blocks/step", "schedule()", "+ update", "with kvagent", "+ update", "of which it", "mean",
        "5% of sched.", "worker adds", "mean", "of which vLLM", "mean",
    ))  # fmt: skip
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        for count in given.running:
            out(row.format(count, *_compare(model, given.socket_dir, count)))


def _compare(model: str, socket_dir: str, running: int) -> list[str]:
    engines = without, connected = Engine(model, running, None), Engine(model, running, socket_dir)
    side = connected.connector._scheduler
    try:
        for engine in engines:
            engine.add(running)
        planned = 0
        for number in range(STEPS + WARM_UP):
            if number == WARM_UP:
                without.skip()
                connected.skip()
                planned = side.counts.saves_planned
            for engine in engines:
                engine.step()
        blocks = (side.counts.saves_planned - planned) / STEPS
    finally:
        connected.close()
    shown = without.scheduling, without.updating, connected.scheduling, connected.updating, connected.inside
    halves = [half(one.own) for one in shown]
    adds = [
        of(one.own) - of(without.driving.own) for one in (connected.driving, connected.idling) for of in (half, mean)
    ]
    figures = [*halves, mean(connected.inside.own), halves[0] / 20, *adds]
    return [f"{blocks:.1f}", *(f"{one:.0f}" for one in figures)]


def _timed(call: Any, times: Times) -> Any:
    def timed(*args: Any) -> Any:
        times.begin()
        try:
            return call(*args)
        finally:
            times.end()

    return timed


def _config(model: str, running: int, socket_dir: str | None) -> VllmConfig:
    transfer = None
    if socket_dir is not None:
        transfer = KVTransferConfig(
            kv_connector="KVAgentConnector", kv_connector_module_path="kvagent.vllm", kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"socket_dir": socket_dir, "tenant": f"bench {time.monotonic_ns()}"},
        )  # fmt: skip
    cache = CacheConfig(block_size=BLOCK_TOKENS, cache_dtype="auto", enable_prefix_caching=True)
    cache.kv_cache_layout = "LBNHC"
    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=4096),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max(running, 16), max_num_batched_tokens=32768, max_model_len=4096,
            enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False,
        ),
        cache_config=cache, device_config=DeviceConfig("cpu"), kv_transfer_config=transfer,
    )  # fmt: skip
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.num_gpu_blocks = running * REQUEST_BLOCKS + 1024
    return config


def _kv_cache_config(config: VllmConfig, blocks: int) -> Any:
    full = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = planning.get_kv_cache_groups(config, {"model.layers.0.attn": full})
    kv = planning.get_kv_cache_config_from_groups(config, groups, blocks * full.page_size_bytes)
    kv.kv_cache_layout = "LBNHC"
    return kv


if __name__ == "__main__":
    main()
