"""Other connectors beside this one under MultiConnector: they store nothing, and send handshakes
like P2P connectors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

from tests.vllm.setting import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Greeting(KVConnectorHandshakeMetadata):
    """Its workers' handshake; like NIXL's connector, it refuses any other."""


class Sibling(KVConnectorBase_V1, SupportsHMA):
    greeted = 0

    def get_handshake_metadata(self) -> Greeting:
        return Greeting()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        for one in metadata.values():
            if not isinstance(one, Greeting):
                raise ValueError(f"{one} is not a greeting")  # noqa: TRY004  as NIXL's
        self.greeted += 1

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class Keeper(Sibling):
    """It keeps the blocks of each request that has ended until the next step."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return True, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return set(finished_req_ids) or None, None


@dataclass
class Loads(KVConnectorMetadata):
    blocks: dict[str, list[int]] = field(default_factory=dict)
    """By request, the blocks to load."""


class Loader(Sibling):
    """It loads the first tokens of each prompt, in several steps, in which the request waits."""

    TOKENS = 64
    STEPS = 5
    write: ClassVar[Callable[[str, list[int]], Any]]
    """Writes what is right to a request's blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planned = Loads()
        self._left: dict[str, int] = {}  # steps
        self._blocks: dict[str, list[int]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        left = max(self.TOKENS - num_computed_tokens, 0)
        return left, left > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._planned.blocks[request.request_id] = blocks.get_block_ids()[0]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        planned, self._planned = self._planned, Loads()
        return planned

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        self._blocks |= metadata.blocks
        self._left |= dict.fromkeys(metadata.blocks, self.STEPS)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        over = {name for name, steps in self._left.items() if steps == 1}
        self._left = {name: steps - 1 for name, steps in self._left.items() if steps > 1}
        for name in over:
            type(self).write(name, self._blocks.pop(name))
        return None, over or None


class Failing(Loader):
    """It loads the first tokens of each prompt in the step that admits the request, and fails."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)[0], False

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._blocks = self._blocks, {}
        return {block for blocks in failed.values() for block in blocks[: self.TOKENS // BLOCK]}
