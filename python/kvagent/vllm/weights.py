"""Which weights an engine has, from vLLM's configuration: a digest of the files that vLLM reads.

The engine has loaded them earlier. So in a process that vLLM created for this engine, a file that
changed after the process started counts as unknown: nothing shows which version was loaded.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import multiprocessing
import os
import re
import time
from pathlib import Path
from typing import Any

from kvagent.vllm.resolved import harmless
from kvagent.weights import files
from kvagent.weights.samples import Unreadable

MARGIN_NS = 1_000_000_000  # tolerance between the clocks that stamp files and processes
DUMMY = "dummy"  # vLLM's load format with made-up weights, from a constant seed
_SAFETENSORS = ("*.safetensors",)
_CONSOLIDATED = ("consolidated*.safetensors",)
_READ = {
    DUMMY: (),
    "auto": ("*.safetensors", "*.bin", "*.pt"),
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": _SAFETENSORS,
    "fastsafetensors": _SAFETENSORS,
    "instanttensor": _SAFETENSORS,
    "mistral": _CONSOLIDATED,
    "pt": ("*.pt",),
}
"""The patterns that vLLM's DefaultModelLoader tries by load format; it reads the first one that
matches files.

npcache is absent: it reads copies that it made earlier. Other loaders may read anything.
"""
_PARTS = ("audio_model_id", "text_model_id")  # keys of a model's configuration that name further models
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")

log = logging.getLogger("vllm.kvagent")


def weights_digest(model: Any, load: Any = None) -> str | None:
    """Return a digest of the weights of vLLM's ModelConfig, read as its LoadConfig says.

    None if the weights cannot be determined; the log says why. A folder without weight files has a
    digest too: its engine makes them up, or has none.
    """
    try:
        return _digest(model, load)
    except (Unreadable, OSError) as error:
        log.warning("the engine's weights cannot be determined: %s", error)
        return None


def load_format(load: Any) -> str:
    """Return the name of the load format."""
    asked = getattr(load, "load_format", "auto")
    return str(getattr(asked, "value", asked)).lower()


def _digest(model: Any, load: Any) -> str:
    since = process_began_ns()
    named = load_format(load)
    if url := getattr(model, "model_weights", None):
        raise Unreadable(f"{url}: an object store; to share blocks, name the weights with the option weights_version")
    _check(load, named)
    places = _places(model, load, since)
    found = [files.files(place) for place in places]
    if not any(found):
        raise Unreadable(f"{model.model}: its files are not here")
    parts = [files.digest(some, [_reads(named, some)], since) for some in found]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _check(load: Any, named: str) -> None:
    """Raise Unreadable for a loader that may read anything else."""
    extra = getattr(load, "model_loader_extra_config", None) or {}
    if named not in _READ:
        raise Unreadable(f"load_format {named}: it may read other weights than those in the folder")
    allowed = {one.rpartition(".")[2] for one in harmless() if one.startswith("LoadConfig.model_loader_extra_config.")}
    if not (isinstance(extra, dict) and set(extra) <= allowed):
        raise Unreadable(
            f"model_loader_extra_config, allowed is {', '.join(sorted(allowed))}: other keys may change what is read"
        )
    if not _own_loader(named):
        raise Unreadable(f"load_format {named}: a plugin's loader may read other weights than those in the folder")


def _own_loader(named: str) -> bool:
    """Return whether vLLM's own class reads this format; a plugin may have replaced it."""
    try:
        from vllm.model_executor import model_loader
    except ImportError:
        return True
    kind = model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(named)
    return kind is not None and kind.__module__.startswith("vllm.model_executor.model_loader.")


def _reads(named: str, found: dict[str, files.Found]) -> str:
    """Return the pattern of the files that vLLM reads as weights; it depends on the load format."""
    names = [name for name in found if "/" not in name]
    patterns = _READ[named]
    if named == "auto" and fnmatch.filter(names, _CONSOLIDATED[0]):
        patterns = _CONSOLIDATED
    return next((pattern for pattern in patterns if fnmatch.filter(names, pattern)), "")


def _places(model: Any, load: Any, since: int | None) -> list[Path]:
    """Return the folders to digest: the model's, its configuration's if separate, and those of
    partial models.
    """
    revision = getattr(model, "revision", None)
    asked = [(str(model.model), revision)]
    if other := getattr(model, "hf_config_path", None):
        asked.append((str(other), revision))
    config = getattr(model, "hf_config", None)
    asked += [(part, None) for name in _PARTS if isinstance(part := getattr(config, name, None), str)]
    places: list[Path] = []
    for name, version in asked:
        found = [Path(name)] if Path(name).exists() else _fetched(name, version, load, since)
        if not found:
            raise Unreadable(f"{name}: its files are not here")
        places += found
    return places


def _fetched(name: str, revision: str | None, load: Any, since: int | None) -> list[Path]:
    """Return the local folders of a model from the hub: its cache and vLLM's download folder."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise Unreadable(f"{name}: of another hub (VLLM_USE_MODELSCOPE)")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return []
    places: list[Path] = []
    for cache in dict.fromkeys((None, getattr(load, "download_dir", None))):
        try:
            place = Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
        except (OSError, ValueError):
            continue
        _check_reference(place, revision or "main", since)
        places.append(place)
    return places


def _check_reference(snapshot: Path, revision: str, since: int | None) -> None:
    """Raise Unreadable if the revision's name moved to another commit since ``since``."""
    if since is None or _COMMIT.match(revision):
        return
    reference = snapshot.parent.parent / "refs" / revision
    others = any(other != snapshot for other in snapshot.parent.iterdir())
    if others and reference.exists() and reference.stat().st_ctime_ns >= since:
        raise Unreadable(f"{reference}: it was moved since this process started")


def process_began_ns() -> int | None:
    """Return when this process started, if vLLM created it for its engine, else None.

    vLLM loaded nothing before that time.
    """
    if multiprocessing.parent_process() is None:
        return None  # the user's own process, which may have written the weights earlier
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])  # starttime, proc_pid_stat(5)
    except (OSError, ValueError, IndexError):
        return None
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns - MARGIN_NS
