"""The KV layout to wish for: block by block over all layers, where the attention backend can read such a cache.

Copies between an engine and the agent are as large as the runs of a block. A wish that the backend rejects costs a
warning of vLLM's and gets its own choice, so the backend is asked before.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ONE_RUN = ("BLHNC", "BLNHC")  # a block of all layers lies together

log = logging.getLogger("kvagent.vllm")


def wish(vllm_config: Any, option: str, supported: Callable[[Any], Sequence[str]] | None = None) -> str | None:
    """The layout's name, or None for vLLM's own choice. ``option`` is that of the user."""
    if option != "auto":
        return None if option == "none" else option
    if getattr(getattr(vllm_config, "device_config", None), "device_type", "") != "cuda":
        return None
    try:
        names = (supported or _supported)(vllm_config)
    except Exception as error:  # noqa: BLE001  vLLM's own affair, which may fail in ways that nobody listed
        log.info("layout: the attention backend could not be asked (%s): vLLM chooses", error)
        return None
    found = next((name for name in names if name in ONE_RUN), None)
    if found is None:
        log.info("layout: the attention backend reads %s; blocks are copied layer by layer", ", ".join(names))
    return found


def _supported(vllm_config: Any) -> Sequence[str]:
    """The layouts that the backend of the model's attention reads, those that it likes best first."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
    from vllm.v1.attention.selector import get_attn_backend

    model, cache = vllm_config.model_config, vllm_config.cache_config
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            model.get_head_size(),
            model.dtype,
            cache.cache_dtype,
            use_mla=bool(getattr(model, "use_mla", False)),
            has_sliding_window=model.get_sliding_window() is not None,
        )
        return [layout.name for layout in get_supported_kv_cache_layouts([backend])]
