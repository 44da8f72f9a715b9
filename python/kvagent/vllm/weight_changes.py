"""The weights generation of an engine: the pair of its identity that says which weights computed
its blocks, and the changes at run time that end it.

docs/vllm/weights.md says what changes it. The scheduler chooses the generation and tells the
workers. vLLM tells its connectors of no change of the weights, only of a reset that the caller must
request. But all calls that change them pass the engine core, in the scheduler's process, and none
while a step is planned.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvagent.registration import identity_pairs
from kvagent.vllm import internals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvagent.vllm.options import Options


PAIR = "generation"
UNSHARED = "private"
"""The key of the identity whose value is the private generation of such an engine."""
LOADED = ""  # the weights are those that the pair ``weights`` digests
NAMED = "named:"  # then a version: the user asserts that engines of this name have equal weights
PRIVATE = "private:"  # then 32 hex digits: not shared with any other engine
MAX_VERSION_BYTES = 128
ALLOWED = f"1 to {MAX_VERSION_BYTES} letters, digits and . _ - + = : / @"

_VERSION = re.compile(rf"[A-Za-z0-9._+=:/@-]{{1,{MAX_VERSION_BYTES}}}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # distinguishes nodes

log = logging.getLogger("vllm.kvagent")


def is_version(text: str) -> bool:
    """Return whether a text is a valid version: see ALLOWED."""
    return _VERSION.fullmatch(text) is not None


def with_generation(identity: tuple[tuple[str, str], ...], generation: str) -> tuple[tuple[str, str], ...]:
    """Return the identity with this generation, or with the private one of an engine of which not
    all that counts is known.
    """
    pairs = dict(identity)
    own = "" if generation.startswith(PRIVATE) else pairs.get(UNSHARED, "")
    return identity_pairs(pairs | {PAIR: own or generation})


def initial_generation(vllm_config: Any, version: str, reasons: list[str]) -> str:
    """Return the generation of an engine that starts. ``reasons``: why its weights may differ from
    what the identity says.
    """
    if version:
        return NAMED + version
    return of_engine(vllm_config) if reasons else LOADED


def of_engine(vllm_config: Any) -> str:
    """Return a private generation that is equal in all processes of the engine. The next start may
    have the same engine ID, if the user sets it, but not the same instance ID.
    """
    node = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    one = f"{vllm_config.instance_id}\n{vllm_config.kv_transfer_config.engine_id}\n{node}"
    return PRIVATE + hashlib.sha256(one.encode()).hexdigest()[:32]


def unobserved_changes(vllm_config: Any) -> Iterator[str]:
    """Yield the ways in which this engine's weights can change unobserved: not by a call through
    vLLM's engine core (observe), as the development endpoints of ``vllm serve``, sleep mode and
    pickled client code make them.
    """
    parallel = vllm_config.parallel_config
    if vllm_config.weight_transfer_config is not None:
        yield "weight_transfer_config is set"
    if parallel.worker_extension_cls:
        yield f"worker_extension_cls is {parallel.worker_extension_cls}"
    worker = str(parallel.worker_cls)
    if worker != "auto" and not worker.startswith("vllm."):
        yield f"worker_cls is {worker}"
    if parallel.enable_elastic_ep:
        yield "enable_elastic_ep is set, so that new ranks take their weights from others"
    executor = parallel.distributed_executor_backend
    if executor not in (None, "mp", "uni", "ray"):
        name = executor if isinstance(executor, str) else getattr(executor, "__qualname__", type(executor).__name__)
        yield f"distributed_executor_backend is {name}"


class Generations:
    """The scheduler's current generation. Each method handles an event and returns whether the
    generation has changed. ``serial`` counts the changes, since a name may come back.
    """

    def __init__(self, now: str, options: Options, *, unobserved: bool = False, in_process: bool = False) -> None:
        """``unobserved``: the weights can change unobserved. ``in_process``: the engine core is in
        the calling program's process.
        """
        self.now = now
        self.serial = 1
        self._fixed = options.weights_fixed
        self._unobserved = unobserved
        self._in_process = in_process
        self._warned = False
        if in_process and self.counts_resets:
            log.info(
                "weights: the model is in the calling program's process: each reset of the prefix cache counts as new "
                "weights, which are shared with no other engine, unless weights_version or weights_fixed is set"
            )

    @property
    def counts_resets(self) -> bool:
        """Whether a reset of vLLM's own cache may follow a change of the weights that no call told
        of.
        """
        named = self.now.startswith(NAMED)
        return not self._fixed and (self._unobserved or (self._in_process and not named))

    def after_reset(self) -> bool:
        """Handle a reset of vLLM's cache and the connector's: new weights unless they are fixed."""
        return not self._fixed and self._change(_private(), "reset_prefix_cache with reset_connector")

    def after_call(self, call: str) -> bool:
        """Handle a call that is about to be made and may change the weights."""
        if self._fixed and not self._warned:
            self._warned = True
            log.warning("weights: %s is called though weights_fixed is true: are they still the same?", call)
        return not self._fixed and self._change(_private(), call)

    def after_name(self, version: str) -> bool:
        """Handle vLLM's call that names the version of the current weights."""
        if not is_version(version):
            log.warning("weights: version %.140r, allowed is %s; it is ignored", version, ALLOWED)
            return False
        return NAMED + version != self.now and self._change(NAMED + version, "the version given to vLLM")

    def _change(self, generation: str, why: str) -> bool:
        self.now = generation
        self.serial += 1
        shared = "engines of that version" if generation.startswith(NAMED) else "no other engine"
        log.info("weights: generation %s after %s: shared with %s", generation, why, shared)
        return True


def _private() -> str:
    return PRIVATE + secrets.token_hex(16)


def watch(options: Any) -> tuple[list[str], bool]:
    """Start observing changes of the weights of the engine that is being made in this process,
    unless they are fixed.

    Return the reasons why some may go unobserved, and whether the engine core is in the calling
    program's process.
    """
    if options.weights_fixed:
        return [], False
    from vllm.v1.engine import core  # this module exists only in the process of the scheduler

    engine = internals.constructing(lambda one: isinstance(one, core.EngineCore))
    in_process = engine is not None and not isinstance(engine, core.EngineCoreProc)
    if reason := internals.missing(internals.WEIGHTS):
        return [reason], in_process
    observe(core.EngineCore)
    return [], in_process


HARMLESS = (
    "checkpoint_prepare", "checkpoint_restore", "compute_weight_checksums", "get_model_inspection",
    "init_weight_transfer_engine",
    "save_sharded_state", "save_tensorized_model", "shutdown_weight_transfer_engine",
)  # fmt: skip
"""Methods of vLLM's workers that do not change the weights.

Any other method, and the caller's own code, may: an extension's ``update_weights_from_ipc`` looks
like its ``device_id``.
"""


def observe(core: Any) -> None:
    """Patch vLLM's engine core, once, so that it notifies its connectors of such calls."""
    heard = {"collective_rpc": _called, "set_weight_version": _named, "reset_prefix_cache": _resetting}
    for name, notify in heard.items():
        if hasattr(core, name):
            internals.replace(core, name, partial(_before, notify))


def _before(notify: Callable[[Any, Any], None], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the engine core with a notification of each connector before it."""

    def observed(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        for connector in internals.connectors(self):
            if hasattr(connector, "before_weights_call"):  # one of this package
                notify(connector, args[0] if args else next(iter(kwargs.values()), None))
        return method(self, *args, **kwargs)

    return observed


def _called(connector: Any, method: Any) -> None:
    is_code = not isinstance(method, str)  # the caller's own code, whatever its name
    name = str(getattr(method, "__qualname__", "code of the caller's")) if is_code else method
    if is_code or name not in HARMLESS:
        connector.before_weights_call(name)


def _named(connector: Any, version: Any) -> None:
    connector.weights_named(str(version))


def _resetting(connector: Any, running: Any) -> None:  # noqa: ARG001
    if hasattr(connector, "before_reset"):  # a tier's: KVAgentConnector is told by vLLM's block pool
        connector.before_reset()
