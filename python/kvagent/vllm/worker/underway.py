"""A worker's jobs that the agent has, by the numbers that each session gave them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvagent.errors import Busy, SessionBroken, SessionEnded
from kvagent.messages import BlockStatus

if TYPE_CHECKING:
    from kvagent.vllm.link import Attachment
    from kvagent.vllm.plan import LoadJob, SaveJob


@dataclass(eq=False, slots=True)
class UnderWay:
    """A job. A load of many blocks has several parts, each a job of the session; a save has one."""

    plan: SaveJob | LoadJob
    attachment: Attachment | None
    parts: list[bytes | None] = field(default_factory=list)
    """What became of the blocks of each part; None as long as the agent has it."""
    numbers: list[int] = field(default_factory=list)
    """Of the parts that the agent got, in the session."""
    deadline: float = 0.0
    told: bool = False
    """A load that vLLM does not wait for any more."""
    cancelled: bool = False

    @property
    def over(self) -> bool:
        """Whether the agent has none of its parts."""
        return None not in self.parts

    @property
    def statuses(self) -> bytes:
        """Of all blocks, once it is over."""
        parts = [part for part in self.parts if part is not None]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def cancel(self) -> None:
        """Asks the agent to end it. Its DONE, or the session's end, comes nevertheless."""
        self.cancelled = True
        if self.attachment is None:
            return
        for number in self.numbers:
            try:
                self.attachment.session.cancel(number)
            except (Busy, SessionBroken, SessionEnded):
                return


def lost(part: bytes | None, blocks: int, status: BlockStatus = BlockStatus.FAILED) -> bytes:
    """The statuses of a part that the agent reports no more."""
    return bytes([status]) * blocks if part is None else part
