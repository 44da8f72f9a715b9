"""An engine with vLLM's own offloading: the real scheduler, OffloadingConnector and tiering
manager, and a worker that plays the GPU's copies between KV cache and offload region.

A copy runs when the dice say so, after all kernels that were launched before it and perhaps long
after later ones, as a GPU's copy stream may.
"""

from __future__ import annotations

import copy
import pickle
import random
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any
from unittest import mock

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from kvagent.vllm import register
from tests.vllm.setting import BLOCK, HEAD, HEADS, LAYERS
from tests.vllm.world import World, _Launch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

BLOCK_BYTES = LAYERS * 2 * HEADS * HEAD * BLOCK * 4  # of one rank
IDLE_S = 0.0005  # that a step without tokens takes
UNDEFINED = 0x5A  # what a row holds from a copy's begin to its end
SLOWLY, AT_ONCE = 0.4, 1.0  # how likely a copy runs in a step


class PlayedWorker(OffloadingWorker):
    """Stands for vLLM's worker, which needs a GPU. Copies of one direction run in turn."""

    def __init__(self, dice: random.Random, pace: float, **given: Any) -> None:
        caches, region = given["kv_caches"], given["mmap_region"]
        self._factor = next(given[name] for name in ("blocks_per_chunk", "block_size_factor") if name in given)
        self._dice, self.pace, self._region = dice, pace, region
        pages = [one.page_size_bytes for one in caches.tensors]
        self._gpu = [one.tensor.view(dtype=one.tensor.dtype) for one in caches.tensors]
        rows = [region.create_next_worker_view(page * self._factor) for page in pages]
        self._rows = [row.unflatten(1, (self._factor, page)) for row, page in zip(rows, pages, strict=True)]
        self._refs = caches.group_data_refs
        self._queues: dict[str, deque[tuple[int, Any, Any]]] = {"store": deque(), "load": deque(), "sync": deque()}
        self._finished: list[int] = []
        self.copied = {"store": 0, "load": 0, "sync": 0}
        """Blocks."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for gpu, row, _, at in self._places(src_spec, dst_spec):
            assert gpu is not None
            row[at] = UNDEFINED
        self._queues["store"].append((job_id, src_spec, dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        self._queues["sync" if expedited else "load"].append((job_id, dst_spec, src_spec))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return [TransferResult(job_id=job, success=True) for job in finished]

    def wait(self, job_ids: set[int]) -> None:
        for kind, queue in self._queues.items():
            while any(job in job_ids for job, _, _ in queue):
                self._run(kind)

    def progress(self) -> None:
        """Let some of the copies run."""
        for kind, queue in self._queues.items():
            while queue and self._dice.random() < self.pace:
                self._run(kind)

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()

    def _run(self, kind: str) -> None:
        job, gpu_spec, rows_spec = self._queues[kind].popleft()
        for gpu, row, blocks, at in self._places(gpu_spec, rows_spec):
            if kind == "store":
                row[at] = gpu[blocks]
            else:
                gpu[blocks] = row[at]
            self.copied[kind] += len(blocks)
        self._finished.append(job)

    def _places(self, gpu_spec: Any, rows_spec: Any) -> Iterator[tuple[Any, Any, list[int], tuple[Any, ...]]]:
        """Yield what a job copies: the KV cache, the rows, its blocks, and the place of each in the
        rows.
        """
        blocks, rows = list(gpu_spec.block_ids), list(rows_spec.block_ids)
        for refs, count, index in zip(self._refs, gpu_spec.group_sizes, gpu_spec.block_indices, strict=True):
            if not count:
                continue
            skip = index % self._factor
            mine, blocks = blocks[:count], blocks[count:]
            taken = -(-(count + skip) // self._factor)
            slots = [(row, sub) for row in rows[:taken] for sub in range(self._factor)][skip : skip + count]
            rows = rows[taken:]
            for ref in refs:
                place = ([int(row) for row, _ in slots], [sub for _, sub in slots])
                yield self._gpu[ref.tensor_idx], self._rows[ref.tensor_idx], [int(b) for b in mine], place
        assert not blocks + rows, "the job names blocks that no group has"


class Heard:
    """Listens to what the tiering manager and a secondary tier tell each other, and holds the tier
    to its contract.
    """

    def __init__(self, tier: Any) -> None:
        self.stored = self.loaded = self.failed = 0
        """Chunks whose store or load succeeded; loads of chunks that failed."""
        self.open: dict[int, Any] = {}
        """Jobs, by number."""
        self._finished = tier.get_finished_jobs
        self._drain = tier.drain_jobs
        for name in ("submit_load", "submit_store"):
            setattr(tier, name, self._submitted(getattr(tier, name)))
        tier.get_finished_jobs = self._report
        tier.drain_jobs = self._drained
        self._kept: list[Any] = []

    def _submitted(self, submit: Any) -> Any:
        def hear(job: Any) -> None:
            self.open[job.job_id] = job
            submit(job)

        return hear

    def _report(self) -> list[Any]:
        reported, self._kept = [*self._kept, *self._finished()], []
        for one in reported:
            job = self.open.pop(one.job_id)
            if job.is_promotion:
                came = job.keys if one.success else one.successful_keys or ()
                assert set(came) <= set(job.keys)
                self.loaded += len(came)
                self.failed += len(job.keys) - len(came)
            elif one.success:
                self.stored += len(job.keys)
        return reported

    def _drained(self) -> None:
        self._drain()
        self._kept = list(self._finished())
        assert {one.job_id for one in self._kept} == set(self.open), "a job is open after the tier was drained"


class TieredWorld(World):
    """An engine with vLLM's own offloading. ``rows``: chunks of the offload region. ``chunk``:
    blocks of each.
    """

    def __init__(
        self, model: Path, tiers: list[dict[str, Any]], *, rows: int = 24, chunk: int = 1, seed: int = 0,
        pace: float = SLOWLY, name: str = "", **options: Any,
    ) -> None:  # fmt: skip
        register()
        self._dice, self._pace = random.Random(seed), pace
        self.windowed = bool(options.get("window"))
        self.played: list[PlayedWorker] = []
        self.resets = 0
        self.computed = Counter[str]()
        """Tokens, by request."""
        ranks = options.get("ranks", 1)
        extra = {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": rows * chunk * ranks * BLOCK_BYTES,
            "block_size": BLOCK * chunk, "secondary_tiers": tiers, "offload_prompt_only": False,
        }  # fmt: skip
        transfer = {
            "kv_connector": "OffloadingConnector", "kv_connector_module_path": None,
            "kv_connector_extra_config": extra,
        } | ({"engine_id": name} if name else {})  # fmt: skip
        super().__init__(model, "", transfer=transfer, layout="LBHNC", **options)
        self.heard = Heard(self.tier)

    @property
    def offloading(self) -> Any:
        """The scheduler's side of vLLM's connector."""
        return self.scheduler.connector.connector_scheduler

    @property
    def manager(self) -> Any:
        return self.offloading.manager

    @property
    def tier(self) -> Any:
        """The first secondary tier."""
        return self.manager.secondary_tiers[0]

    @property
    def idle(self) -> bool:
        """Return whether there is nothing to wait for."""
        return not self.scheduler.has_requests() and not self._flight and not self.manager.has_pending_work()

    @property
    def loaded(self) -> int:
        """Blocks that came from the offload region."""
        return sum(one.copied["load"] + one.copied["sync"] for one in self.played)

    def launch(self) -> None:
        output = self.scheduler.schedule()
        self.steps += 1
        self.preempted += len(output.preempted_req_ids or ())
        work = self._work(output)
        self.computed.update(output.num_scheduled_tokens)
        launch = _Launch(output, work, [], [])
        self._launched = launch
        for rank in range(self.ranks):
            sent = pickle.loads(pickle.dumps(output))  # noqa: S301
            launch.connector_outputs.append(pickle.loads(pickle.dumps(self._drive(rank, sent))))  # noqa: S301
        self._execute(launch)
        self._flight.append(launch)
        for worker in self.played:
            worker.progress()
        if not output.total_num_scheduled_tokens:
            time.sleep(IDLE_S)

    def reset(self) -> bool:
        """Forget the KV cache and the offload region. Return whether that was possible.

        vLLM preempts running requests, but not one that waits for its load.
        """
        self.settle()
        table = self.scheduler.kv_cache_manager.get_block_ids
        waiting = [name for name, one in self.scheduler.requests.items() if one.status != RequestStatus.RUNNING]
        if any(any(table(name)) for name in waiting):
            return False
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.resets += 1
        return True

    def forget(self) -> bool:
        """Forget the KV cache and the offload region, with nothing left to do."""
        self.rest()
        assert self.reset()
        self.rest()
        return True

    def rest(self, limit: int = 20_000) -> None:
        """Step until nothing is left to do, in the tiers neither."""
        for _ in range(limit):
            if self.idle:
                return
            self.step()
            if not self.scheduler.requests:
                self.settle()
        raise AssertionError(f"still at work after {limit} steps: {list(self.scheduler.requests)}, {self.left()}")

    def left(self) -> dict[str, Any]:
        """Return what is not given back."""
        primary, side = self.manager.primary_tier, self.offloading
        policy = primary._policy
        held = {
            "jobs": self.manager._jobs, "requests": self.manager._req_state, "side's jobs": side._jobs,
            "side's requests": side._req_status, "promotions": self.manager._pending_load_submissions,
            "rows": [key for key in _keys(policy) if policy.get(key).ref_cnt != 0],
            "tier": [tier for tier in self.manager.secondary_tiers if tier.has_pending_work()],
            "blocks": self.blocks - 1 - self.free_blocks(),
        }  # fmt: skip
        return {name: one for name, one in held.items() if one}

    def prompt(self, name: str, prompt: list[int]) -> int:
        """Serve a request for one token, alone. Return how many of its prompt's tokens came from a
        cache.
        """
        self.add(name, prompt, 1)
        self.rest()
        assert len(self.outputs[name]) == 1, f"{name} did not finish"
        return len(prompt) - self.computed[name]

    def _make_worker(self, rank: int) -> None:
        config = copy.deepcopy(self.config)
        config.parallel_config.rank = rank
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.kv)
        kv_transfer_state._KV_CONNECTOR_AGENT = worker
        spec = worker.connector_worker.spec
        spec.get_worker = spec.create_worker  # else it refuses: no GPU

        def play(**given: Any) -> PlayedWorker:
            self.played.append(PlayedWorker(self._dice, self._pace, **given))
            return self.played[-1]

        # Without a GPU vLLM 0.31 cannot say which one is the worker's.
        with (
            mock.patch("vllm.v1.kv_offload.tiering.spec.CPUOffloadingWorker", play),
            mock.patch("torch.accelerator.current_device_index", return_value=rank),
        ):
            if self.v2:
                self.drivers.append(ActiveKVConnector(config, self.gpu.caches[rank]))
            else:
                worker.register_kv_caches(self.gpu.caches[rank])
                self.drivers.append(None)
        self.workers.append(worker)

    def _forward(self, rank: int) -> None:
        """Run the kernels, once all ranks have done what comes before."""
        if rank == self.ranks - 1:
            self._execute(self._launched)


def _keys(policy: Any) -> Iterable[Any]:
    """Return the keys of all rows in use; the policies differ in where they hold them."""
    found: set[Any] = set()
    for one in vars(policy).values():
        if hasattr(one, "keys"):
            found.update(key for key in one if isinstance(key, bytes))
    return [key for key in found if policy.get(key) is not None]


def clean(*worlds: TieredWorld) -> None:
    """Check that no byte was wrong and nothing is left over."""
    for world in worlds:
        assert not world.gpu.bad, world.gpu.bad[:5]
        assert not world.left(), world.left()
