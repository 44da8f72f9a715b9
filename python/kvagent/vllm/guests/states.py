"""Saves of states (Mamba, GDN, linear attention): only those that vLLM keeps, at their boundaries.

A state is what a layer knows after all tokens up to a boundary. vLLM computes on in a request's
last block, and leaves the block of a boundary behind: it hands over each that it keeps, with its
tokens, in the step that computes it. Its tables do not tell them from the others, and lose them a
few steps later. So a state is saved when it is handed over or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.hooks import Guest
from kvagent.vllm.options import LAZY, OptionError
from kvagent.vllm.scheduler.requests import Phase

if TYPE_CHECKING:
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import StepPlan
    from kvagent.vllm.scheduler.requests import Tracked


_MOST_TOKENS = {
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_scheduled_tokens": "--max-num-batched-tokens",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
}
"""The limits of a step's tokens, 0 or None for no limit, and vLLM's arguments for them."""


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


class States(Guest):
    """Adds the states of a step to its saves."""

    def __init__(self, geometry: Geometry) -> None:
        self._hash_tokens = geometry.hash_tokens
        self._sizes = {group: geometry.groups[group].block_tokens for group in geometry.states}

    def planned(self, plan: StepPlan, output: Any, now: float) -> None:  # noqa: ARG002
        """Add the states that vLLM hands over in a step, unless blocks are scarce."""
        handed = getattr(getattr(output, "kv_connector_block_state", None), "boundary_state_offloads", None) or {}
        side = self.side
        short = output.preempted_req_ids or side.agent.silent or side.blocks.scarce()
        if not handed or short or not (side.takes and side.saves.ready()):
            return
        for request, states in handed.items():
            tracked = side.requests.get(request)
            if tracked is None or tracked.phase != Phase.RUNNING or not tracked.saved:
                continue
            most = min(tracked.request.num_tokens, tracked.saving.most)
            for group, block_id, tokens in states:
                if group in self._sizes and tokens <= most:
                    self._add(tracked, group, block_id, tokens)

    def _add(self, tracked: Tracked, group: int, block_id: int, tokens: int) -> None:
        """Add one state, unless it is inside a block, or came from the agent."""
        blocks, saves = self.side.blocks, self.side.saves
        size, hashes = self._sizes[group], tracked.request.block_hashes
        at, block = tokens // self._hash_tokens, blocks.pool.blocks[block_id]
        if tokens % size or not 0 < at <= len(hashes) or tracked.loaded[0] < tokens <= tracked.loaded[1]:
            return
        if block.is_null or block.block_hash is None or blocks.is_stale(block):
            return
        if saves.room(tracked) > 0:
            saves.take(tracked, group, tokens // size - 1, [hashes[at - 1]], [block])
