"""What a model with states (Mamba, GDN, linear attention) requires of vLLM's configuration and of
the options, checked at the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.options import LAZY, OptionError

if TYPE_CHECKING:
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.options import Options


def check_states(vllm_config: Any, geometry: Geometry, options: Options) -> None:
    """Raise Unsupported or OptionError if states would not be saved or not be right; the text says
    what to change.

    vLLM keeps a state only where a step ends at the end of a block, so a step must have room for a
    whole block.
    """
    if not geometry.states:
        return
    if len(geometry.states) == len(geometry.groups):
        raise Unsupported("the model has states alone: served are models that have layers with attention besides")
    size = max(geometry.groups[group].block_tokens for group in geometry.states)
    if any(geometry.scale(group) > 1 for group in geometry.states):
        raise Unsupported(
            f"vLLM shares parts of blocks: prefix_match_unit {geometry.hash_tokens}, allowed is {size}, the block size "
            "of the model's states. It copies such a part to another block, which loses the mark of old weights: start "
            f"vLLM without --prefix-match-unit, or with --prefix-match-unit {size}"
        )
    scheduler = vllm_config.scheduler_config
    for name, argument in _MOST_TOKENS.items():
        tokens = int(getattr(scheduler, name, None) or 0)
        if 0 < tokens < size:
            raise Unsupported(
                f"{name} {tokens}, allowed is at least {size}, the block size of the model's states: start vLLM with "
                f"{argument} {size} or more"
            )
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        raise Unsupported("use_replayssm: a state's block lacks the last tokens; start vLLM without --use-replayssm")
    if options.offload == LAZY:
        raise OptionError("offload: lazy, allowed is eager for a model with states, which vLLM hands over only once")


_MOST_TOKENS = {
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_scheduled_tokens": "--max-num-batched-tokens",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
}
"""The limits of a step's tokens, 0 or None for no limit, and vLLM's arguments for them."""
