"""The weights of an engine whose model lies in the calling program's own process, where anything can write to them.

vLLM's engine core runs in the program's process with VLLM_ENABLE_V1_MULTIPROCESSING=0. A write to the model there
passes none of vLLM's calls, so it cannot be heard; it is seen, by a sample of every tensor that is taken when the
engine is made, when a request comes to it while it has none, and before it resets its prefix cache.

Hears of vLLM's calls that change weights, or may: all go through the engine core, in the scheduler's process.

vLLM tells its connectors of none of them, only of a reset that its caller has to ask for. The core runs nothing else
while it serves such a call, so a step is planned wholly before it or wholly after it. Requests and resets are heard of
as well: they are when live_weights looks.
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


def under_construction(core: type) -> Any | None:
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
"""Methods of vLLM's workers that leave the weights as they are. Of any other, and of code of the caller's, it is not
known: an extension's ``update_weights_from_ipc`` is called like its ``device_id``."""
_MARK = "_kvagent_listens"


def observe(core: Any) -> bool:
    """Has the class of vLLM's engine core tell its connectors of such calls. A second time changes nothing.

    False: this vLLM has no ``collective_rpc`` there, so that its calls are not heard.
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
    """The method, and before it what is told: vLLM reads its signature."""

    @functools.wraps(method)
    def observed(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        notify(self, args[0] if args else next(iter(kwargs.values()), None))
        return method(self, *args, **kwargs)

    setattr(observed, _MARK, True)
    return observed


def _called(core: Any, method: Any) -> None:
    is_code = not isinstance(method, str)  # code of the caller's, whatever its name
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
    """Those of this package, also among others. None while the core is being made."""
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    for one in getattr(connector, "_connectors", [connector]):
        if hasattr(one, "before_weights_call"):
            yield one
