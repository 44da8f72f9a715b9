"""The identity of a space: all that changes a block's bytes besides its tokens, from vLLM's configuration.

Both roles make it from the same configuration and must come to the same: it holds nothing that only one of them knows.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvagent.identity import identity_pairs
from kvagent.vllm.generation import LOADED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvagent.vllm.geometry import Ranks

EDGE_BYTES = 1 << 20  # of each file's head and tail that the digest covers, besides its name and size
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
_DIGESTED = (*_WEIGHTS, ".json", ".model", ".txt")
UNKNOWN = ""  # weights of which nothing is known: the generation says whose they are
_DUMMY = "dummy"  # vLLM's load format that makes weights up, from a seed that never changes
_FROM_FOLDER = (_DUMMY, "auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral", "bitsandbytes")
"""Those that read nothing but the model's folder."""
_RANDOM_SEED = ("xxhash", "xxhash_cbor")  # without PYTHONHASHSEED their seed is each process's own


def identity(
    vllm_config: Any, kv_cache_config: Any, tenant: str, ranks: Ranks, version: str
) -> tuple[tuple[str, str], ...]:
    """The identity's pairs. ``version``: vLLM's, since the layout of a block is its own affair."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(cache, "kv_cache_layout", None)
    return identity_pairs(
        {
            "model": str(model.model),
            "revision": str(getattr(model, "revision", None) or ""),
            "weights": _weights(vllm_config) or UNKNOWN,
            "generation": LOADED,
            "overrides": _digest([_plain(getattr(model, "hf_overrides", None))]),
            "dtype": str(model.dtype),
            "quantization": str(getattr(model, "quantization", None) or ""),
            "cache_dtype": _cache_dtype(cache),
            "backend": _backend(getattr(vllm_config, "attention_config", None)),
            "rope": _rope(model),
            "tenant": tenant,
            "layout": str(getattr(layout, "name", layout) or ""),
            "groups": _digest(repr(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups),
            "stages": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
            "tp": str(vllm_config.parallel_config.tensor_parallel_size),
            "pp": str(vllm_config.parallel_config.pipeline_parallel_size),
            "shards": str(ranks.shards),
            "hash": algorithm,
            "hash_seed": _seed(algorithm, str(vllm_config.kv_transfer_config.engine_id)),
            "engine": f"vllm {'.'.join(version.split('.')[:2])}",
        }
    )


def unknown_weights(pairs: tuple[tuple[str, str], ...]) -> bool:
    """Whether an identity says nothing of the weights: its engine must not share under it as it is."""
    return dict(pairs)["weights"] == UNKNOWN


def _cache_dtype(cache: Any) -> str:
    """The KV cache's type, and the layers that have the model's."""
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
    return f"{cache.cache_dtype} but {', '.join(map(str, skipped))}" if skipped else str(cache.cache_dtype)


def _backend(attention: Any) -> str:
    """The attention backend that was asked for: each packs a block as it likes."""
    asked = [getattr(attention, "backend", None), *sorted((getattr(attention, "backend_per_kind", None) or {}).items())]
    return ", ".join(_plain(one) for one in asked if one is not None)


def _rope(model: Any) -> str:
    """The longest prompt where rotary embeddings go by it, whatever the prompt at hand (longrope)."""
    config = getattr(model, "hf_text_config", None)
    parameters = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    return f"longrope up to {model.max_model_len}" if '"longrope"' in _plain(parameters) else ""


def _weights(vllm_config: Any) -> str | None:
    """What says which weights the engine has. None: nothing does."""
    asked = getattr(getattr(vllm_config, "load_config", None), "load_format", "auto")
    load_format = str(getattr(asked, "value", asked))
    digest = weights_digest(vllm_config.model_config, load_format)
    return f"{_DUMMY} {digest}" if digest and load_format == _DUMMY else digest


def weights_digest(model: Any, load_format: str = "auto") -> str | None:
    """A digest of the files of vLLM's ModelConfig: names, sizes, head and tail of each. None: its weights are not here.

    They are read from an object store then, or by somebody else's loader: other weights may come from the same place. A
    folder without weights is one whose engine makes them up, or none at all, where vLLM reads nothing but that folder.
    """
    if getattr(model, "model_weights", None):
        return None
    found = _files(str(model.model), getattr(model, "revision", None))
    if not any(path.suffix in _WEIGHTS for path in found.values()) and (not found or load_format not in _FROM_FOLDER):
        return None
    return _digest(f"{name} {path.stat().st_size} {_edges(path)}" for name, path in sorted(found.items()))


def _files(model: str, revision: str | None) -> dict[str, Path]:
    """The files that count, by their place in the model's folder."""
    if Path(model).is_file():
        return {Path(model).name: Path(model)}
    folder = _folder(model, revision)
    if folder is None:
        return {}
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix in _DIGESTED)
    return {str(path.relative_to(folder)): path for path in files}


def _edges(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(EDGE_BYTES))
        file.seek(max(path.stat().st_size - EDGE_BYTES, 0))
        digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()


def _folder(model: str, revision: str | None) -> Path | None:
    path = Path(model)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def _seed(algorithm: str, engine: str) -> str:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"PYTHONHASHSEED {seed}"
    return f"random {engine}" if algorithm in _RANDOM_SEED else "default"


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_named)


def _named(value: Any) -> str:
    """A member of an enum, a class or a function by its own name, anything else by its type's."""
    return str(getattr(value, "name", None) or getattr(value, "__qualname__", type(value).__name__))


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
