"""Findings on this Python's packages, vLLM's entry point, and settings that keep engines apart."""

from __future__ import annotations

import importlib.metadata
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvagent.doctor import Finding
from kvagent.vllm import internals
from kvagent.vllm.geometry import TESTED, tested

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def packages(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield the versions, and whether vLLM can find the connector by its name."""
    own = _version("kvagent")
    if own is None:
        yield Finding(
            "package kvagent is imported from a folder, not installed: vLLM does not find the connector by its name",
            'pip install it, or add "kv_connector_module_path": "kvagent.vllm" to --kv-transfer-config, with which '
            "KVAgentTier keeps its chunks private to the engine",
        )
    else:
        yield Finding(f"package kvagent {own}")
    vllm = _version("vllm")
    if vllm is None:
        yield Finding("vLLM is not installed in this Python: run this command with the engine's own")
        return
    if tested(vllm):
        yield Finding(f"vLLM {vllm}")
    else:
        yield Finding(f"vLLM {vllm}: the connector is tested with {TESTED}", f"install vLLM {TESTED}")
    for feature in internals.USED if find_spec("vllm") is not None else ():
        if reason := internals.missing(feature):
            yield Finding(f"{feature} is off: {reason}", f"install vLLM {TESTED}")
    allowed = environment.get("VLLM_PLUGINS")
    if own is not None and allowed is not None and "kvagent" not in allowed.split(","):
        yield Finding(
            f"VLLM_PLUGINS={allowed!r} leaves the connector's entry point out",
            'add kvagent to it, or "kv_connector_module_path": "kvagent.vllm" to --kv-transfer-config, with which '
            "KVAgentTier keeps its chunks private to the engine",
        )


def seed(environment: Mapping[str, str] = os.environ) -> Finding:
    """Return the finding on the seed of block hashes."""
    value = environment.get("PYTHONHASHSEED")
    if value is None:
        return Finding(
            "PYTHONHASHSEED is not set: engines share with the hash algorithms sha256 and sha256_cbor, not with xxhash"
        )
    return Finding(f"PYTHONHASHSEED={value}: only engines with the same one share")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
