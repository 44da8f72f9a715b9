"""Loads that a step waits for layer by layer: the words that count their stages, and which layers
have waited.

A layer that did not wait may have read bytes that had not arrived. So what a step computed while a
load was under way counts only if all of its layers have waited; else the load is reported as
failed, and from then on steps wait for whole loads.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvagent import messages as m

if TYPE_CHECKING:
    from kvagent.packing import Packed
    from kvagent.session import Session
    from kvagent.shm import SyncWords
    from kvagent.vllm.guests.sync.stages import Stages
    from kvagent.vllm.plan import LoadJob

log = logging.getLogger("vllm.kvagent")


class LayerLoads:
    """The staged loads of a worker."""

    def __init__(self, stages: Stages, words: SyncWords) -> None:
        self._stages = stages
        self._landed = words.landed
        self._off = words.stages_off
        self._free = list(range(len(words.landed)))
        self._words: dict[int, int] = {}  # by load, while it is at the agent
        self._declared: Session | None = None  # to which the stages were declared
        self._expected: set[str] = set()
        self._broken = False

    def send(
        self, session: Session, load: LoadJob, sections: Packed, *, step: int, event: int
    ) -> int | None:  # fmt: skip
        """Send a load. Return the job's number in the session, or None if it cannot be staged, as
        one of several parts: then nothing was sent.
        """
        if self._broken or not self._free or len(load.parts) > 1:
            return None
        if self._declared is not session:
            session.send(m.Stages(self._off, len(self._landed), self._stages.segments))
            self._declared = session
        word = self._free[-1]
        self._landed[word] = 0
        number = session.staged_load(
            sections, epoch=load.epoch, step=step, event=event, lease=load.lease, word=word
        )  # fmt: skip
        self._words[load.job] = self._free.pop()
        return number

    def over(self, job: int) -> None:
        """Free the word of a load that is over, so that the agent does not write it any more."""
        if (word := self._words.pop(job, None)) is not None:
            self._free.append(word)

    def begin(self) -> None:
        """Expect all layers of the step to wait."""
        if not self._broken:
            self._expected = set(self._stages.needed)

    def end(self) -> bool:
        """End the step. Return whether all layers that were expected to have waited."""
        missing, self._expected = self._expected, set()
        if missing:
            self._broken = True
            log.error(
                "layerwise: %d layers, such as %s, did not wait for their part of a load: the load is computed, and "
                "from now on steps wait for whole loads",
                len(missing), min(missing),
            )  # fmt: skip
        return not missing

    def usable_before(self, job: int) -> bool:
        """Return whether all that layers do not wait for has arrived."""
        return self._has(job, self._stages.first)

    def waits(self, layer: str) -> bool:
        """Return whether a layer has to wait, and note that it does."""
        if not self._expected:
            return False
        self._expected.discard(layer)
        return True

    def usable(self, job: int, layer: str) -> bool:
        """Return whether the layer's part of a load has arrived."""
        return self._has(job, self._stages.needed.get(layer, self._stages.count))

    def _has(self, job: int, stages: int) -> bool:
        word = self._words.get(job)
        return word is not None and self._landed[word] >= stages
