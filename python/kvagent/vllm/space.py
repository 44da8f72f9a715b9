"""The identity of a space: everything besides the tokens that determines a block's bytes.

Both roles derive it from the same vLLM configuration and must get the same result, so it contains
nothing that only one of them knows.

All that vLLM resolved and the environment count, unless the table of harmless names it (resolved).
A worker computes the blocks, so what it has counts: its configuration after vLLM's changes, and the
attention backends and pages of its layers. Two backends may lay out blocks of the same shape
differently, and the CPU backend packs keys for the instruction set. The scheduler supposes the same
of its own copy, and asks vLLM which backends it would choose; the workers report what they have
(WorkerInfo).
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from typing import TYPE_CHECKING, Any

from kvagent.identity import identity_pairs
from kvagent.vllm.geometry import WITHOUT_DRAFTS, replicated
from kvagent.vllm.internals import cpu_isa
from kvagent.vllm.options import OptionError
from kvagent.vllm.resolved import Forms
from kvagent.vllm.specs import STATE, WINDOW, group_spec
from kvagent.vllm.weight_changes import LOADED, UNSHARED, of_engine, unobserved_changes
from kvagent.vllm.weights import DUMMY, load_format, process_began_ns, weights_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvagent.vllm.geometry import Ranks
    from kvagent.vllm.options import Options

log = logging.getLogger("vllm.kvagent")


def expected_backends(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the backends that vLLM would choose for each group's layers, in order.

    A group is empty if vLLM cannot tell; without a selector the whole string is empty.
    """
    try:
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.selector import get_attn_backend
    except ImportError:
        return ""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    names = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group_spec(group.kv_cache_spec)
        kind = type(spec).__name__
        if kind == STATE:
            names.append("")  # the specification says all about its form
            continue
        try:
            with set_current_vllm_config(vllm_config):
                backend = get_attn_backend(
                    spec.head_size, model.dtype, cache.cache_dtype, use_mla="MLA" in kind,
                    has_sliding_window=kind in WINDOW,
                )  # fmt: skip
            names.append(_backend_name(backend, vllm_config, spec))
        except Exception as error:  # noqa: BLE001  vLLM's internals, which may raise anything
            log.info("the attention backend of %s could not be determined: %s", kind, error)
            names.append("")
    return "; ".join(names)


def used_backends(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> str:
    """Return the backends that the layers of each group use in this worker, and into how many pages
    they split a block.

    A group without layers here, or whose layers do not tell, gets the expected backends.
    """
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    expected = expected_backends(vllm_config, kv_cache_config).split("; ")
    found = []
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group_spec(group.kv_cache_spec)
        backends = [
            layers[name].get_attn_backend()
            for name in (group.layer_names if type(spec).__name__ != STATE else ())
            if hasattr(layers.get(name), "get_attn_backend")
        ]
        names = ", ".join(sorted({_backend_name(one, vllm_config, spec) for one in backends}))
        names = names or "".join(expected[i : i + 1])
        caches = [kv_caches[name] for name in group.layer_names if hasattr(kv_caches.get(name), "shape")]
        pages = sorted({int(one.shape[0]) // int(kv_cache_config.num_blocks) for one in caches} - {1})
        found.append(" ".join([names, *(f"{count} pages a block" for count in pages)]).strip())
    return "; ".join(found)


def device_kind(cache: Any) -> str:
    """Return the kind of device.

    GPUs of all generations share blocks: their results are equivalent.
    """
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return ""
    kind = str(getattr(current_platform, "device_name", "") or "")
    if kind == "cpu":
        return f"cpu {platform.machine()}"
    if not str(cache.cache_dtype).startswith("fp8"):
        return kind
    return f"{kind} fnuz" if current_platform.is_fp8_fnuz() else kind  # AMD's first FP8 has another zero and bias


def _backend_name(backend: Any, vllm_config: Any, spec: Any) -> str:
    name = str(backend.get_name())
    if name != "CPU_ATTN":
        return name
    asked = (vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
    return f"{name} {cpu_isa(*asked)}"


UNKNOWN = ""  # unknown weights: the generation determines who shares them
_WEAK_HASHES = ("xxhash", "xxhash_cbor")  # collisions can be constructed if the seed is known


def identity(
    vllm_config: Any,
    kv_cache_config: Any,
    tenant: str,
    ranks: Ranks,
    version: str,
    distribution: dict[str, str] | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return the pairs of the identity.

    ``version`` is vLLM's: each minor version may define its own block layout. ``distribution``: the
    pairs that say which part of a block is in which shard, in place of the parallel sizes.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    _check_hash(algorithm, tenant)
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(cache, "kv_cache_layout", None)
    forms = Forms(process_began_ns())
    pairs = forms.sections(vllm_config) | {
        "environment": forms.environment(),
        "code": forms.code(getattr(getattr(model, "hf_config", None), "architectures", None) or ()),
        "model": str(model.model),
        "weights": _weights(vllm_config) or UNKNOWN,
        "generation": LOADED,
        "dtype": str(model.dtype),
        "resolved": expected_backends(vllm_config, kv_cache_config),
        "device": device_kind(cache),
        "tenant": tenant,
        "layout": str(getattr(layout, "name", layout) or ""),
        "shards": str(ranks.shards),
        "hash_seed": _seed(algorithm, str(vllm_config.kv_transfer_config.engine_id)),
        "engine": f"vllm {'.'.join(version.split('.')[:2])}",
    }
    if forms.unknown:
        log.warning(
            "this engine shares blocks with no other engine: of its configuration, %s. See docs/VLLM.md",
            "; ".join(forms.unknown),
        )
        pairs[UNSHARED] = of_engine(vllm_config)
    return identity_pairs(pairs | (distribution or _distribution(vllm_config.parallel_config, kv_cache_config)))


def _distribution(parallel: Any, kv_cache_config: Any) -> dict[str, str]:
    """Return what determines which part of a block is in which shard."""
    specs = [group_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    return {
        "groups": _digest(map(repr, specs)),
        "stages": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
        "tp": "any" if replicated(kv_cache_config) else str(parallel.tensor_parallel_size),
        "pp": str(parallel.pipeline_parallel_size),
    }


def unknown_weights(pairs: tuple[tuple[str, str], ...]) -> list[str]:
    """Return why an identity says nothing about the weights, if so; its engine must not share under
    it as it is.
    """
    return ["the model's weight files are not in a local folder"] if dict(pairs)["weights"] == UNKNOWN else []


def unobserved(vllm_config: Any, options: Options) -> list[str]:
    """Return how weights may change unnoticed, by configuration.

    Raise OptionError if weights_fixed contradicts that.
    """
    if not options.weights_fixed:
        return [*unobserved_changes(vllm_config)]
    if vllm_config.weight_transfer_config is not None:
        raise OptionError("weights_fixed: true, allowed is false where weight_transfer_config is set")
    return []


def with_resolved(pairs: tuple[tuple[str, str], ...], names: str) -> tuple[tuple[str, str], ...]:
    """Return the identity of an engine whose layers use these attention backends."""
    return identity_pairs(dict(pairs) | {"resolved": names})


def as_worker(pairs: tuple[tuple[str, str], ...], worker: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the scheduler's identity as a worker has it, but for the digest of the weights: if
    their files changed between the two, nobody knows which ones were loaded.
    """
    return identity_pairs(dict(worker) | {"weights": dict(pairs)["weights"]})


def _check_hash(algorithm: str, tenant: str) -> None:
    """Raise OptionError if a client of one tenant could construct a prompt with another prompt's
    block hashes.
    """
    if tenant and algorithm in _WEAK_HASHES and os.environ.get("PYTHONHASHSEED") is not None:
        given = (
            f"prefix_caching_hash_algo {algorithm} with a fixed PYTHONHASHSEED, while tenants share (tenant {tenant!r})"
        )
        hint = "start vLLM with --prefix-caching-hash-algo sha256 or sha256_cbor"
        raise OptionError(
            f"{given}: prompts can be constructed that have another tenant's block hashes; {hint}", "tenant"
        )


def _weights(vllm_config: Any) -> str | None:
    """Return what determines the engine's weights, including a draft model's. None if unknown."""
    load = getattr(vllm_config, "load_config", None)
    digest = weights_digest(vllm_config.model_config, load)
    if digest and load_format(load) == DUMMY:
        digest = f"{DUMMY} {digest}"
    speculative = getattr(vllm_config, "speculative_config", None)
    method = str(getattr(speculative, "method", None) or "")
    draft = getattr(speculative, "draft_model_config", None)
    if digest is None or draft is None or method in WITHOUT_DRAFTS:
        return digest
    load = getattr(speculative, "draft_load_config", None) or load
    drafts = weights_digest(draft, load)
    return drafts and f"{digest}, {method} {load_format(load)} {drafts}"


def _seed(algorithm: str, engine: str) -> str:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"PYTHONHASHSEED {seed}"
    return f"random {engine}" if algorithm in _WEAK_HASHES else "default"


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
