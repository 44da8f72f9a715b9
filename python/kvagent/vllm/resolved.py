"""What decides how a block's bytes are to be read and is not asked for: the attention backend, and the device.

Two backends may fill blocks of the same shape in another order, and the one for CPUs packs keys as the processor likes
them. A worker sees what its layers use. The scheduler asks vLLM what it would choose, in the same environment, and is
told by the workers where that was something else (WorkerWords).
"""

from __future__ import annotations

import itertools
import logging
import platform
from typing import Any

_MLA = "MLAAttentionSpec"
_WINDOW = "SlidingWindowSpec"

log = logging.getLogger("kvagent.vllm")


def expected(vllm_config: Any, kv_cache_config: Any) -> str:
    """The backends that vLLM would choose for layers like those of each group, in order; empty: it does not say."""
    try:
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.selector import get_attn_backend
    except ImportError:
        return ""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    names = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        kind = type(spec).__name__
        try:
            with set_current_vllm_config(vllm_config):
                backend = get_attn_backend(
                    spec.head_size, model.dtype, cache.cache_dtype, use_mla=kind == _MLA,
                    has_sliding_window=kind == _WINDOW,
                )  # fmt: skip
            names.append(_name(backend, vllm_config, spec))
        except Exception as error:  # noqa: BLE001  vLLM's own affair, which may fail in ways that nobody listed
            log.info("the attention backend of %s could not be asked: %s", kind, error)
            names.append("")
    return "; ".join(names)


def used(vllm_config: Any, kv_cache_config: Any) -> str:
    """The backends that the layers of each group use in this worker; where it has none, or they do not say: expected's.

    Empty if that is so for all groups.
    """
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    found = []
    for group in kv_cache_config.kv_cache_groups:
        backends = [
            layers[name].get_attn_backend()
            for name in group.layer_names
            if hasattr(layers.get(name), "get_attn_backend")
        ]
        found.append(", ".join(sorted({_name(backend, vllm_config, group.kv_cache_spec) for backend in backends})))
    if not any(found):
        return ""
    others = expected(vllm_config, kv_cache_config).split("; ")
    return "; ".join(one or other for one, other in itertools.zip_longest(found, others, fillvalue=""))


def device(cache: Any) -> str:
    """The kind of device. GPUs of one kind share whatever their generation: what they compute is as good as equal."""
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


def _name(backend: Any, vllm_config: Any, spec: Any) -> str:
    name = str(backend.get_name())
    if name != "CPU_ATTN":
        return name
    from vllm.v1.attention.backends import cpu_attn

    asked = (vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
    return f"{name} {cpu_attn._get_attn_isa(*asked)}"
