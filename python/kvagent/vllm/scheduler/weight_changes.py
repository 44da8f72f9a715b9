"""Changes of the weights at run time: calls through vLLM's engine core, and writes to a model in
this process.

vLLM tells its connectors of no such call, only of a reset that the caller must request. All calls
that change weights pass the engine core, in the scheduler's process, which runs nothing else
meanwhile: a step is planned wholly before or wholly after such a call.

With VLLM_ENABLE_V1_MULTIPROCESSING=0 the engine core runs in the calling program's own process,
where a write to the model passes none of vLLM's calls. It is detected by sampling every tensor:
when the engine is made, when a request arrives at an idle engine, and before the prefix cache is
reset.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SAMPLED = 64
"""Evenly spaced elements of each tensor; a change of fewer than one in size / 64 may be missed."""

log = logging.getLogger("kvagent.vllm")


class Unreachable(Exception):
    """The model's weights cannot be sampled."""


class LiveWeights:
    """The last sample of one engine's weights."""

    def __init__(self, core: Any) -> None:
        """Take the first sample of an engine core's model.

        Unreachable: the model is in another process.
        """
        self._executor = core.model_executor
        self._last = self._sample()

    def changed(self) -> bool:
        """Take a sample.

        Return whether it differs from the last one, or cannot be taken any more.
        """
        if getattr(self._executor, "is_sleeping", False):
            return False  # its memory may be unmapped, and it computes nothing
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


def under_construction(core: type) -> Any | None:
    """Return the object of a class whose ``__init__`` this thread is running, or None.

    An engine core creates its scheduler's connector in its own ``__init__``.
    """
    frame: FrameType | None = sys._getframe(1)  # the connector has no other reference to the core
    while frame is not None:
        found = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(found, core):
            return found
        frame = frame.f_back
    return None


def sample(model: Any) -> bytes:
    """Return a digest of SAMPLED elements of every parameter and buffer of a torch module, and of
    their names.
    """
    import torch

    digest, samples = hashlib.sha256(), []
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.is_meta or not tensor.numel():
            continue
        flat = tensor.detach().reshape(-1)
        part = flat[:: max(flat.numel() // SAMPLED, 1)]
        samples.append((tensor.device, part.contiguous().view(torch.uint8)))
    for device in sorted({str(device) for device, _ in samples}):
        together = torch.cat([part for on, part in samples if str(on) == device])
        digest.update(together.cpu().numpy().tobytes())
    return digest.digest()


HARMLESS = (
    "checkpoint_prepare", "checkpoint_restore", "compute_weight_checksums", "get_model_inspection",
    "init_weight_transfer_engine",
    "save_sharded_state", "save_tensorized_model", "shutdown_weight_transfer_engine",
)  # fmt: skip
"""Methods of vLLM's workers that do not change the weights.

Any other method, and the caller's own code, may: an extension's ``update_weights_from_ipc`` looks
like its ``device_id``.
"""
_MARK = "_kvagent_listens"


def observe(core: Any) -> bool:
    """Patch vLLM's engine core so that it notifies its connectors of such calls.

    Repeated calls do nothing.

    Return False if this vLLM has no ``collective_rpc`` there, so that its calls cannot be observed.
    """
    if not hasattr(core, "collective_rpc"):
        return False
    if not hasattr(core.collective_rpc, _MARK):
        core.collective_rpc = _before(core.collective_rpc, _called)
        if hasattr(core, "set_weight_version"):
            core.set_weight_version = _before(core.set_weight_version, _named)
        core.add_request = _before(core.add_request, _asked)
        core.reset_prefix_cache = _before(core.reset_prefix_cache, _resetting)
    return True


def _before(method: Callable[..., Any], notify: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """Return the method with a notification before it, under its own signature, which vLLM
    reads.
    """

    @functools.wraps(method)
    def observed(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        notify(self, args[0] if args else next(iter(kwargs.values()), None))
        return method(self, *args, **kwargs)

    setattr(observed, _MARK, True)
    return observed


def _called(core: Any, method: Any) -> None:
    is_code = not isinstance(method, str)  # the caller's own code, whatever its name
    name = str(getattr(method, "__qualname__", "code of the caller's")) if is_code else method
    if is_code or name not in HARMLESS:
        for connector in _connectors(core):
            connector.before_weights_call(name)


def _named(core: Any, version: Any) -> None:
    for connector in _connectors(core):
        connector.weights_named(str(version))


def _asked(core: Any, request: Any) -> None:  # noqa: ARG001
    for connector in _connectors(core):
        connector.before_request()


def _resetting(core: Any, running: Any) -> None:  # noqa: ARG001
    for connector in _connectors(core):
        connector.look_at_weights()


def _connectors(core: Any) -> Iterator[Any]:
    """Yield this package's connectors, also inside others; none while the core is being made."""
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    for one in getattr(connector, "_connectors", [connector]):
        if hasattr(one, "before_weights_call"):
            yield one
