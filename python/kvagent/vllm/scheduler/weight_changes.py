"""The weights of an engine whose model lies in the calling program's own process, where anything can write to them.

vLLM's engine core runs in the program's process with VLLM_ENABLE_V1_MULTIPROCESSING=0. A write to the model there
passes none of vLLM's calls, so it cannot be heard; it is seen, by a sample of every tensor that is taken when the
engine is made, when a request comes to it while it has none, and before it resets its prefix cache.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

SAMPLED = 64
"""Elements of each tensor, evenly spread: a change of fewer than one in a tensor's size / 64 may not be seen."""

log = logging.getLogger("kvagent.vllm")


class Unreachable(Exception):
    """The model's weights cannot be sampled."""


class LiveWeights:
    """The weights of one engine, as they were when they were sampled last."""

    def __init__(self, core: Any) -> None:
        """Takes the first sample of an engine core's model. Unreachable: its model is in no process of this one's."""
        self._executor = core.model_executor
        self._last = self._sample()

    def changed(self) -> bool:
        """Take a sample. Return whether it differs from the last one, or cannot be taken any more."""
        if getattr(self._executor, "is_sleeping", False):
            return False  # its memory may be unmapped, and nothing is computed with it
        before = self._last
        try:
            self._last = self._sample()
        except Unreachable as error:
            log.warning("the weights cannot be sampled any more, and count as changed: %s", error)
            return True
        return self._last != before

    def _sample(self) -> bytes:
        worker = getattr(self._executor, "driver_worker", None)
        if worker is None:
            raise Unreachable("the executor has no worker in this process")
        try:
            return sample(getattr(worker, "worker", worker).get_model())
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise Unreachable(str(error)) from error


def being_made(core: type) -> Any | None:
    """Return the object of a class that this thread is making: an engine core makes its scheduler's connector."""
    frame: FrameType | None = sys._getframe(1)  # no other way leads from the connector to the core
    while frame is not None:
        found = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(found, core):
            return found
        frame = frame.f_back
    return None


def sample(model: Any) -> bytes:
    """Return a digest of SAMPLED elements of every parameter and buffer of a torch module, and of their names."""
    import torch

    digest, pieces = hashlib.sha256(), []
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.is_meta or not tensor.numel():
            continue
        flat = tensor.detach().reshape(-1)
        part = flat[:: max(flat.numel() // SAMPLED, 1)]
        pieces.append((tensor.device, part.contiguous().view(torch.uint8)))
    for device in sorted({str(device) for device, _ in pieces}):
        together = torch.cat([part for on, part in pieces if str(on) == device])
        digest.update(together.cpu().numpy().tobytes())
    return digest.digest()
