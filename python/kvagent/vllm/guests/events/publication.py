"""Publishes in the engine's own stream of events what the agent's memory and disk hold.

In each step vLLM takes the events. What was published is remembered: a block is stored once in
each medium, after the one before it, and removed once. When the agent's session ends, nothing of
what it held can be loaded, so all of it is removed, and the next session begins anew; likewise when
the agent says that what it told is void. After an
AllBlocksCleared of vLLM's, by which routers forget all media, everything that is held is asked for
and told again.
"""

from __future__ import annotations

import logging
import time
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvagent.errors import Busy, SessionBroken, SessionEnded
from kvagent.messages import EventKind, EventsState, NextEvents
from kvagent.vllm.guests.events.tokens import Tokens, extra_of, salt_of, unpacked
from kvagent.vllm.hooks import Guest, Reset

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvagent.messages import BlockEvents, EventRun
    from kvagent.session import Session
    from kvagent.vllm.guests.events.form import EventForm
    from kvagent.vllm.guests.events.waking import Waker
    from kvagent.vllm.scheduler.agent_session import AgentSession
    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.side import SchedulerSide

ASK_BLOCKS = 256  # of one answer, which one step publishes
REMOVE_BLOCKS = 4096  # that one step removes after the end of a session
REFUSED_S = 1.0  # between questions that the agent refuses
MEDIA = (1, 2)  # of an EventRun: the agent's memory, and its disk

log = logging.getLogger("vllm.kvagent")


class EventCounts(Protocol):
    """What is counted, in blocks (counters)."""

    events_stored: int
    events_removed: int
    events_unsaid: int


class EventsOptions(NamedTuple):
    """How events are made, and what wakes an idle engine for them, if anything can."""

    form: EventForm
    waker: Waker | None = None


class Told(Protocol):
    """What the engine's stream says is stored."""

    def __len__(self) -> int:
        """Return how many blocks of the agent are stored."""

    def clear(self) -> None:
        """Forget all: the stream says that nothing is stored."""

    def remove(self, most: int) -> list[Any]:
        """Return events that remove blocks, at most that many, each before the one before it."""

    def take(self, run: EventRun) -> list[Any]:
        """Return the events of a run: none if it says nothing new."""


class Published:
    """The blocks of which the engine's stream says that they are stored."""

    def __init__(self, form: EventForm, sizes: Mapping[int, int], counts: EventCounts) -> None:
        """``sizes``: tokens of a block, by group of which events tell."""
        self._form = form
        self._sizes = sizes
        self._counts = counts
        # The media of each block, a bit each; a block before those after it.
        self._stored: dict[int, dict[Any, int]] = {group: {} for group in sizes}

    def __len__(self) -> int:
        return sum(map(len, self._stored.values()))

    def clear(self) -> None:
        """Forget all: the stream says that nothing is stored."""
        for stored in self._stored.values():
            stored.clear()

    def remove(self, most: int) -> list[Any]:
        """Return events that remove blocks, at most that many, each before the one before it."""
        events = []
        for group, stored in self._stored.items():
            gone = [stored.popitem() for _ in range(min(most, len(stored)))]
            most -= len(gone)
            for media, alike in groupby(gone, itemgetter(1)):
                hashes = [one for one, _ in alike]
                for medium in MEDIA:
                    if media & 1 << medium:
                        self._counts.events_removed += len(hashes)
                        events.append(self._form.removed(group, hashes, medium))
        return events

    def take(self, run: EventRun) -> list[Any]:
        """Return the event of a run, if it says anything new."""
        event = self._take(run)
        return [] if event is None else [event]

    def _take(self, run: EventRun) -> Any | None:
        stored = self._stored.get(run.group)
        if stored is None or run.medium not in MEDIA:
            return None
        n = run.hash_len
        hashes = [self._form.hash(run.hashes[at : at + n]) for at in range(0, len(run.hashes), n)]
        if run.kind == EventKind.REMOVED:
            gone = [one for one in hashes if _leave(stored, one, 1 << run.medium)]
            self._counts.events_removed += len(gone)
            return self._form.removed(run.group, gone, run.medium) if gone else None
        return self._take_stored(run, stored, hashes)

    def _take_stored(self, run: EventRun, stored: dict[Any, int], hashes: list[Any]) -> Any | None:
        size, tokens = self._sizes[run.group], unpacked(run.tokens)
        parent = self._form.hash(run.parent) if run.parent else None
        keys = salt_of(run.extra) if run.extra else None
        if len(tokens) != size * len(hashes) or (run.extra and keys is None):
            return None
        bit = 1 << run.medium
        if (parent is not None and parent not in stored) or any(stored.get(one, 0) & bit for one in hashes):
            return None
        for one in hashes:
            stored[one] = stored.get(one, 0) | bit
        self._counts.events_stored += len(hashes)
        return self._form.stored(run.group, parent, hashes, tokens, size, [keys] * len(hashes), run.medium)


def _leave(stored: dict[Any, int], block: Any, bit: int) -> bool:
    """Note that a block has left a medium. Return whether it was stored there."""
    media = stored.get(block, 0)
    if media == bit:
        del stored[block]
    elif media & bit:
        stored[block] = media & ~bit
    return media & bit != 0


class Publication:
    """Asks the agent, and publishes its answers."""

    def __init__(self, agent: AgentSession, tokens: Tokens, options: EventsOptions, told: Told, scale: int = 1) -> None:
        """``scale``: blocks of vLLM in one of the agent."""
        self.tokens = tokens
        self.form = options.form
        self._agent = agent
        self._published = told
        self._scale = scale
        self._waker = options.waker
        self._session: Session | None = None  # whose events are published
        self._requests = 0
        self._asked = 0  # the request whose answer is awaited
        self._anew = False
        self._not_before = 0.0  # no question is asked before
        self._leaving = False  # what is published is of a session that has ended, or void
        self._full = False  # the session did not accept the last question
        self._open = False  # the agent keeps the tokens that it is told: it has answered a question

    def take(self) -> list[Any]:
        """Return the next events. Called once in each step."""
        self.follow()
        session = self._session
        events: list[Any] = []
        if self._leaving:
            events = self._published.remove(max(1, REMOVE_BLOCKS // self._scale))
            self._leaving = len(self._published) > 0
        elif session is not None:
            for answer in self._agent.take_answers():
                if answer.req == self._asked:
                    events = self._publish(answer)
        if session is not None:
            if self._open:
                self.tokens.send(session)
            if not self._leaving:
                self._ask(session)
        return events

    def follow(self) -> None:
        """Handle that the session has changed, if it has. Called before tokens are said to a new
        one.
        """
        session = self._agent.session
        if session is self._session:
            return
        self._session = session
        self._asked, self._anew, self._full, self._open, self._not_before = 0, False, False, False, 0.0
        self._leaving = len(self._published) > 0
        self.tokens.clear()

    def cleared(self) -> None:
        """Handle that vLLM's stream says that all blocks are gone, in all media."""
        self._published.clear()
        self._leaving = False
        self._asked = 0  # an answer to what was asked before is not published
        self._anew = True

    def pending(self) -> bool:
        """Return whether a step has something to publish or to ask. If not, the waker wakes the
        engine as soon as there is.
        """
        session = self._agent.session
        if self._agent.unread() or session is not self._session or self._leaving or self._agent.answers:
            return True
        asks = session is not None and not self._asked and not self._full
        wait_s = self._not_before - time.monotonic()
        if asks and wait_s <= 0:
            return True
        if self._waker is not None:
            self._waker.watch(self._agent.session, wait_s if asks else None)
        return False

    def close(self) -> None:
        """Stop waking the engine."""
        if self._waker is not None:
            self._waker.close()

    def _publish(self, answer: BlockEvents) -> list[Any]:
        self._asked = 0
        if answer.state == EventsState.REFUSED:
            self._not_before = time.monotonic() + REFUSED_S
            return []
        self._open = True
        if answer.state == EventsState.VOID:
            self._leaving = len(self._published) > 0
        return [event for run in answer.runs for event in self._published.take(run)]

    def _ask(self, session: Session) -> None:
        if self._asked or time.monotonic() < self._not_before:
            return
        self._requests = self._requests % 0xFFFFFFFF + 1
        try:
            session.send(NextEvents(self._requests, max(1, ASK_BLOCKS // self._scale), int(self._anew)))
        except (Busy, SessionEnded, SessionBroken):  # the next poll of the session shows an end
            self._full = True
        else:
            self._asked, self._anew, self._full = self._requests, False, False


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
