"""Saves of states (Mamba, GDN, linear attention): only those that vLLM keeps, at their boundaries.

A state is what a layer knows after all tokens up to a boundary. vLLM computes on in a request's
last block, and leaves the block of a boundary behind: it hands over each that it keeps, with its
tokens, in the step that computes it. Its tables do not tell them from the others, and lose them a
few steps later. So a state is saved when it is handed over or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.scheduler.requests import Blocks, Tracked
    from kvagent.vllm.scheduler.save_plan import SaveBatch


class States:
    """Adds the states of a step to its saves."""

    def __init__(self, geometry: Geometry, blocks: Blocks) -> None:
        self._hash_tokens = geometry.hash_tokens
        self._sizes = {group: geometry.groups[group].block_tokens for group in geometry.states}
        self._blocks = blocks

    def add(
        self, batch: SaveBatch, block_state: Any, tracked_of: Mapping[str, Tracked], *, decode: bool
    ) -> None:  # fmt: skip
        """Add the states that vLLM hands over in a step, and pin them.

        ``decode``: whether to save states after generated tokens too.
        """
        handed = getattr(block_state, "boundary_state_offloads", None) or {}
        for request, states in handed.items():
            tracked = tracked_of.get(request)
            if tracked is None or not tracked.admitted or tracked.stale or tracked.no_save or tracked.unkeyed:
                continue
            most = tracked.request.num_tokens if decode else tracked.request.num_prompt_tokens
            for group, block_id, tokens in states:
                if group in self._sizes and tokens <= most:
                    self._add(batch, tracked, group, self._blocks.pool.blocks[block_id], tokens)
        batch.pin()

    def _add(self, batch: SaveBatch, tracked: Tracked, group: int, block: Any, tokens: int) -> None:
        """Add one state, unless it is inside a block, came from the agent."""
        size, hashes = self._sizes[group], tracked.request.block_hashes
        at = tokens // self._hash_tokens
        if tokens % size or not 0 < at <= len(hashes) or tracked.loaded[0] < tokens <= tracked.loaded[1]:
            return
        key = hashes[at - 1]
        if block.is_null or block.block_hash is None or self._blocks.is_stale(block):
            return
        if batch.room(tracked) > 0:
            batch.take(tracked, group, tokens // size - 1, [key], [block])
