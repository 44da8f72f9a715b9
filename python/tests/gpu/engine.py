"""A simulated engine whose KV cache is a PyTorch tensor on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvagent.vllm.worker.memory import memory
from kvagent.vllm.worker.side import HostClock, make_clock
from tests.simulated import BLOCK_BYTES, SimulatedEngine

if TYPE_CHECKING:
    from kvagent.cuda import CudaClock
    from kvagent.messages import Region

DEVICE = "cuda:0"
CYCLES = 500_000_000  # of a kernel that keeps the stream busy for some tenths of a second


class GpuEngine(SimulatedEngine):
    """``late``: each fill follows a slow kernel, so that a copy that does not wait reads old
    bytes.
    """

    late = False

    def make_memory(self, size: int, *, peer: bool) -> HostClock | CudaClock:
        """Allocate the tensor after another one in its allocation."""
        self.before = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
        self.tensor = torch.zeros(size // BLOCK_BYTES, BLOCK_BYTES, dtype=torch.uint8, device=DEVICE)
        self.registered = memory({"layer": self.tensor}, [["layer"]], size // BLOCK_BYTES)
        return make_clock(self.registered.device)

    def regions(self) -> list[tuple[Region, int | None]]:
        """Return the regions as the connector would register them."""
        return list(self.registered.regions)

    def offset(self) -> int:
        """Return the tensor's offset in region 1."""
        return self.registered.held[0][0][0].offset

    def fill(self, request: Any, salt: int) -> None:
        """Launch kernels that fill a request's blocks, without waiting."""
        if self.late:
            torch.cuda._sleep(CYCLES)
        for i, block in enumerate(self.tables[request.request_id]):
            self.tensor[block.block_id] = self._content(salt, i)

    def holds(self, request: Any, salt: int, blocks: int) -> bool:
        """Return whether a request's first blocks hold what ``fill`` writes for that salt."""
        table = self.tables[request.request_id][:blocks]
        return all(bool((self.tensor[b.block_id] == self._content(salt, i)).all()) for i, b in enumerate(table))

    def close_memory(self) -> None:
        """Free the tensor."""
        self.registered.close()
        del self.tensor, self.before

    @staticmethod
    def _content(salt: int, i: int) -> Any:
        return torch.tensor([salt, i % 256, i // 256, 0] * (BLOCK_BYTES // 4), dtype=torch.uint8, device=DEVICE)
