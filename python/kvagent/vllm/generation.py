"""The weights generation of an engine: a pair of its identity that says which weights computed its blocks.

The pair ``weights`` digests what an engine loaded. Weights that were changed in place are others under the same digest,
so the generation changes with them, and with it the space: blocks of the old weights are not found any more, and what
the new ones compute is found by nobody else unless the user gives both engines the same name. The scheduler chooses,
keeps the choice for the engine's life, and tells the workers; no agent has a say in it.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvagent.identity import identity_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvagent.vllm.options import Options

PAIR = "generation"
LOADED = ""  # the weights are what the pair ``weights`` digests
NAMED = "named:"  # and a version: the user says that engines of this name have equal weights
PRIVATE = "private:"  # and 32 hex digits: shared with nobody
MAX_VERSION_BYTES = 128
ALLOWED = f"1 to {MAX_VERSION_BYTES} letters, digits and . _ - + = : / @"

_VERSION = re.compile(rf"[A-Za-z0-9._+=:/@-]{{1,{MAX_VERSION_BYTES}}}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # tells nodes apart

log = logging.getLogger("kvagent.vllm")


def is_version(text: str) -> bool:
    """Whether a text may name a version: see ALLOWED."""
    return _VERSION.fullmatch(text) is not None


def with_generation(identity: tuple[tuple[str, str], ...], generation: str) -> tuple[tuple[str, str], ...]:
    """The identity of a generation."""
    return identity_pairs(dict(identity) | {PAIR: generation})


def initial_generation(vllm_config: Any, version: str, reasons: list[str]) -> str:
    """The generation of an engine that starts. ``reasons`` say why its weights are not what the identity says of them.

    It is made of the configuration, which all processes of the engine have alike: the time at which it was made, and
    the engine's id. The id alone does not do: a user can set it, and it is then the next start's too.
    """
    if version:
        return NAMED + version
    if not reasons:
        return LOADED
    one = (
        str(getattr(vllm_config, "instance_id", "")),
        str(vllm_config.kv_transfer_config.engine_id),
        _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "",
    )
    return PRIVATE + hashlib.sha256("\n".join(one).encode()).hexdigest()[:32]


def unobserved_changes(vllm_config: Any) -> Iterator[str]:
    """The ways by which this engine's weights can change though the connector hears nothing of it.

    What goes through vLLM's engine core is heard (weight_calls), so neither the development endpoints of ``vllm serve``
    nor sleep mode are among them, nor code that a client has pickled; and where the model lies in the calling
    program's process, its writes are seen (live_weights).
    """
    parallel = vllm_config.parallel_config
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        yield "weight_transfer_config is set"
    if getattr(parallel, "worker_extension_cls", ""):
        yield f"worker_extension_cls is {parallel.worker_extension_cls}"
    worker = str(getattr(parallel, "worker_cls", "auto"))
    if worker != "auto" and not worker.startswith("vllm."):
        yield f"worker_cls is {worker}"
    if getattr(parallel, "enable_elastic_ep", False):
        yield "enable_elastic_ep is set, so that new ranks take their weights from others"
    executor = getattr(parallel, "distributed_executor_backend", None)
    if executor not in (None, "mp", "uni", "ray"):
        name = executor if isinstance(executor, str) else getattr(executor, "__qualname__", type(executor).__name__)
        yield f"distributed_executor_backend is {name}"


class VersionFile:
    """The file by which a user names the weights at run time. Each write of it speaks for one reset, the next one.

    A reset may come before the weights change (vLLM's pause), so what was said for an earlier one says nothing.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._seen = self._stamp()
        """What was there at the start is of an earlier engine."""

    def take(self) -> str:
        """The version that was written since the last call; empty if none was, or none that can be read."""
        stamp = self._stamp()
        if self._path is None or stamp is None or stamp == self._seen:
            return ""
        self._seen = stamp
        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_VERSION_BYTES + 2)
        except OSError as error:
            log.warning("weights_version_file: %s: %s; the new weights are private", self._path, error.strerror)
            return ""
        version, newline, rest = text.decode(errors="replace").partition("\n")
        if newline and not rest and is_version(version):
            return version
        log.warning(
            "weights_version_file: %s holds %.140r, allowed is one line of %s that ends with a newline; the new "
            "weights are private", self._path, text, ALLOWED,
        )  # fmt: skip
        return ""

    def _stamp(self) -> tuple[int, ...] | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Generations:
    """The scheduler's choice. ``serial`` counts the changes: a name may come back.

    Each method takes an event and returns whether the generation has changed.
    """

    def __init__(self, now: str, options: Options) -> None:
        self.now = now
        self.serial = 1
        self._fixed = options.weights_fixed
        self._file = VersionFile(options.weights_version_file)
        self._warned = False

    def after_reset(self) -> bool:
        """vLLM reset its cache and the connector's. New weights, unless the user says that they are the same."""
        if self._fixed:
            return False
        version = self._file.take()
        if version and NAMED + version == self.now:
            log.info("weights: version %s again, by weights_version_file: the reset is plain", version)
            return False
        return self._change(NAMED + version if version else _private(), "reset_prefix_cache with reset_connector")

    def after_call(self, call: str) -> bool:
        """A call that may change the weights is about to be made."""
        if self._fixed:
            if not self._warned:
                self._warned = True
                log.warning("weights: %s is called though weights_fixed is true: are they still the same?", call)
            return False
        return self._change(_private(), call)

    def after_name(self, version: str) -> bool:
        """vLLM was told the version of its weights: those that are in place now."""
        if not is_version(version):
            log.warning("weights: version %.140r, allowed is %s; it is passed over", version, ALLOWED)
            return False
        if NAMED + version == self.now:
            return False
        return self._change(NAMED + version, "the version that vLLM was told")

    def _change(self, generation: str, why: str) -> bool:
        self.now = generation
        self.serial += 1
        shared = "engines of that version" if generation.startswith(NAMED) else "nobody"
        log.info("weights: generation %s after %s: shared with %s", generation, why, shared)
        return True


def _private() -> str:
    return PRIVATE + secrets.token_hex(16)
