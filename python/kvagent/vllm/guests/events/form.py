"""vLLM's KV events, in the form of the version that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MEDIA = {1: "CPU", 2: "STORAGE"}  # by the agent's numbers, as vLLM names them
_FIELDS = frozenset(BlockStored.__struct_fields__)


class EventForm:
    """Makes events. It is bound to vLLM's KV cache manager, which knows the kinds of its groups."""

    def __init__(self, media: Mapping[int, str] = MEDIA) -> None:
        """``media``: names by the agent's numbers."""
        self._media = media
        self._kinds: Sequence[tuple[str, int | None]] = ()

    def bind(self, manager: Any) -> None:
        """Take the kinds of the KV cache groups."""
        self._kinds = getattr(manager, "kv_cache_event_metadata", ())

    def hash(self, block_hash: bytes) -> Any:
        """Return a block hash as events name it: an integer, unless vLLM is told otherwise."""
        return maybe_convert_block_hash(block_hash)

    def stored(
        self,
        group: int,
        parent: Any,
        hashes: list[Any],
        tokens: list[int],
        size: int,
        keys: list[tuple[str] | None],
        medium: int,
    ) -> Any:
        """Return the event that chained blocks of ``size`` tokens are stored, after the block
        ``parent`` or None. ``keys``: the extra keys of each block.
        """
        kind, window = self._kinds[group] if group < len(self._kinds) else (None, None)
        optional = {
            "extra_keys": keys, "group_idx": group, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window,
        }  # fmt: skip
        return BlockStored(
            block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=size, lora_id=None,
            medium=self._media[medium], lora_name=None,
            **{name: value for name, value in optional.items() if name in _FIELDS},
        )  # fmt: skip

    def removed(self, group: int, hashes: list[Any], medium: int) -> Any:
        """Return the event that blocks are no longer stored there."""
        optional = {"group_idx": group} if "group_idx" in BlockRemoved.__struct_fields__ else {}
        return BlockRemoved(block_hashes=hashes, medium=self._media[medium], **optional)
