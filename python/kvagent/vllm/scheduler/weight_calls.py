"""Hears of vLLM's calls that change weights, or may: all go through the engine core, in the scheduler's process.

vLLM tells its connectors of none of them, only of a reset that its caller has to ask for. The core runs nothing else
while it serves such a call, so a step is planned wholly before it or wholly after it. Requests and resets are heard of
as well: they are when live_weights looks.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HARMLESS = (
    "checkpoint_prepare", "checkpoint_restore", "compute_weight_checksums", "get_model_inspection",
    "init_weight_transfer_engine",
    "save_sharded_state", "save_tensorized_model", "shutdown_weight_transfer_engine",
)  # fmt: skip
"""Methods of vLLM's workers that leave the weights as they are. Of any other, and of code of the caller's, it is not
known: an extension's ``update_weights_from_ipc`` is called like its ``device_id``."""
_MARK = "_kvagent_listens"


def listen(core: Any) -> bool:
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


def _before(method: Callable[..., Any], tell: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """The method, and before it what is told: vLLM reads its signature."""

    @functools.wraps(method)
    def told(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        tell(self, args[0] if args else next(iter(kwargs.values()), None))
        return method(self, *args, **kwargs)

    setattr(told, _MARK, True)
    return told


def _called(core: Any, method: Any) -> None:
    theirs = not isinstance(method, str)  # code of the caller's, whatever its name
    name = str(getattr(method, "__qualname__", "code of the caller's")) if theirs else method
    if theirs or name not in HARMLESS:
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
