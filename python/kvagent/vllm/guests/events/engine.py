"""KV events of an engine: the connector's guest that says and publishes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvagent.vllm.guests.events.publication import Publication, Published
from kvagent.vllm.guests.events.tokens import Tokens, extra_of
from kvagent.vllm.hooks import Guest, Reset

if TYPE_CHECKING:
    from kvagent.vllm.guests.events.publication import EventsOptions
    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.side import SchedulerSide


class Events(Guest):
    """The events of an engine's own blocks."""

    def __init__(self, options: EventsOptions) -> None:
        self._options = options

    def begin(self, side: SchedulerSide, manager: Any) -> None:
        """Begin with the side's agent, and answer vLLM when it takes events."""
        super().begin(side, manager)
        tokens = Tokens(side.geometry, side.counts)
        told = Published(self._options.form, tokens.sizes, side.counts)
        self._publication = Publication(side.agent, tokens, self._options, told)
        side.take_events = self._publication.take
        self._publication.form.bind(manager)  # it has the groups that vLLM's own events name

    def named(self, tracked: Tracked, group: int, first: int, blocks: int) -> None:
        """Say the tokens of blocks. The agent may have lost those of loaded ones by a restart."""
        extra = None if self.side.geometry.following else extra_of(tracked.request)
        self._publication.tokens.say(tracked.request, extra, group, first, blocks)

    def reset(self, what: Reset) -> None:
        """Follow the session, and what vLLM's own events say."""
        if what in (Reset.ENDED, Reset.BEGAN):
            self._publication.follow()
        elif what is Reset.CACHE:
            self._publication.cleared()

    def busy(self) -> bool:
        """Return whether there are events to publish."""
        return self._publication.pending()

    def close(self) -> None:
        """Stop waking the engine."""
        self._publication.close()
