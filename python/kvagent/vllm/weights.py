"""Which weights an engine has, from vLLM's configuration: a digest of the files, or of the objects, that vLLM reads.

The engine loaded them a while ago. So in a process that vLLM made for this engine, a file that was changed after the
process began counts as one of which nobody knows what was loaded of it.
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

from kvagent.weights import files, objects
from kvagent.weights.samples import Unreadable

MARGIN_NS = 1_000_000_000  # between the clocks that stamp files and processes
DUMMY = "dummy"  # vLLM's load format that makes weights up, from a seed that never changes
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
"""What vLLM's DefaultModelLoader reads by load format: the first pattern of which there are files.

Not npcache, which reads the copies that it once made. Any other loader reads what it likes.
"""
_HARMLESS = {"enable_multithread_load", "num_threads", "enable_weights_track"}
"""Of model_loader_extra_config: how files are read, not which."""
_STREAMED = "runai_streamer"  # what reads an object store's files as they are
_PARTS = ("audio_model_id", "text_model_id")  # of a model's configuration: parts of it that are models of their own
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")

log = logging.getLogger("kvagent.vllm")


def weights_digest(model: Any, load: Any = None) -> str | None:
    """A digest of the weights of vLLM's ModelConfig, read as its LoadConfig says. None: nothing says which they are.

    The log says why then. A folder without weights is one whose engine makes them up, or none at all.
    """
    try:
        return _digest(model, load)
    except (Unreadable, OSError) as error:
        log.warning("which weights the engine has cannot be told: %s", error)
        return None


def load_format(load: Any) -> str:
    """The load format's name."""
    asked = getattr(load, "load_format", "auto")
    return str(getattr(asked, "value", asked)).lower()


def _digest(model: Any, load: Any) -> str:
    since = process_began_ns()
    named = load_format(load)
    url = str(getattr(model, "model_weights", None) or "")
    if url:
        _check(load, named == _STREAMED, named)
        here = files.digest(files.files(Path(str(model.model))), [], None)  # its configuration, fetched just now
        return _joined([here, objects.digest(url, since)])
    _check(load, named in _READ, named)
    places = _places(model, load, since)
    found = [files.files(place) for place in places]
    if not any(found):
        raise Unreadable(f"{model.model}: its files are not here")
    return _joined(files.digest(some, [_reads(named, some)], since) for some in found)


def _check(load: Any, known: bool, named: str) -> None:
    """Unreadable: a loader that may read anything else."""
    extra = getattr(load, "model_loader_extra_config", None) or {}
    if not known:
        raise Unreadable(f"load_format {named}: it may read other weights than lie there")
    if named in _READ and not (isinstance(extra, dict) and set(extra) <= _HARMLESS):
        raise Unreadable(
            f"model_loader_extra_config, allowed is {', '.join(sorted(_HARMLESS))}: it may say what is read"
        )
    if not _own_loader(named):
        raise Unreadable(f"load_format {named}: a plugin's loader may read other weights than lie there")


def _own_loader(named: str) -> bool:
    """Whether vLLM's own class reads that format. A plugin may have put its own in that place."""
    try:
        from vllm.model_executor import model_loader
    except ImportError:
        return True
    kind = model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(named)
    return kind is not None and kind.__module__.startswith("vllm.model_executor.model_loader.")


def _reads(named: str, found: dict[str, files.Found]) -> str:
    """Which of the files vLLM reads as weights: with another load format it may be others of the same folder."""
    names = [name for name in found if "/" not in name]
    patterns = _READ[named]
    if named == "auto" and fnmatch.filter(names, _CONSOLIDATED[0]):
        patterns = _CONSOLIDATED
    return next((pattern for pattern in patterns if fnmatch.filter(names, pattern)), "")


def _places(model: Any, load: Any, since: int | None) -> list[Path]:
    """Where the files lie: of the model, of the configuration where that is another's, of models that are parts."""
    revision = getattr(model, "revision", None)
    asked = [(str(model.model), revision)]
    if other := getattr(model, "hf_config_path", None):
        asked.append((str(other), revision))
    config = getattr(model, "hf_config", None)
    asked += [(part, None) for name in _PARTS if isinstance(part := getattr(config, name, None), str)]
    overrides = getattr(model, "hf_overrides", None)
    if callable(overrides) and not str(getattr(overrides, "__module__", "")).startswith("vllm."):
        raise Unreadable("hf_overrides is a function: nobody knows what it does")
    quantization = overrides.get("quantization_config_file") if isinstance(overrides, dict) else None
    places = [Path(quantization)] if isinstance(quantization, str) else []
    for name, version in asked:
        found = [Path(name)] if Path(name).exists() else _fetched(name, version, load, since)
        if not found:
            raise Unreadable(f"{name}: its files are not here")
        places += found
    return places


def _fetched(name: str, revision: str | None, load: Any, since: int | None) -> list[Path]:
    """The folders of a model of the hub: in its cache, and where vLLM was told to put what it fetches."""
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
    """Unreadable: the name of the revision was turned to another commit since ``since``."""
    if since is None or _COMMIT.match(revision):
        return
    reference = snapshot.parent.parent / "refs" / revision
    others = any(other != snapshot for other in snapshot.parent.iterdir())
    if others and reference.exists() and reference.stat().st_ctime_ns >= since:
        raise Unreadable(f"{reference}: it was turned since this process began")


def process_began_ns() -> int | None:
    """When this process was made, if vLLM made it for its engine; before that nothing was loaded. Else None."""
    if multiprocessing.parent_process() is None:
        return None  # a user's own, which may have written the weights itself before
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])  # starttime, proc_pid_stat(5)
    except (OSError, ValueError, IndexError):
        return None
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns - MARGIN_NS


def _joined(parts: Any) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
