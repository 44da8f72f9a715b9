"""How much of a request's prompt will be loaded: asks the agent, cuts its answer, and gives leases back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvagent.errors import TimedOut
from kvagent.lookup import LookupStatus
from kvagent.vllm.scheduler.requests import ANSWER_S, Asked

if TYPE_CHECKING:
    from kvagent.lookup import Answer
    from kvagent.vllm.counts import Counts
    from kvagent.vllm.geometry import Geometry
    from kvagent.vllm.options import Options
    from kvagent.vllm.scheduler.agent_session import Presence
    from kvagent.vllm.scheduler.lookups import Asker
    from kvagent.vllm.scheduler.requests import Tracked


class Promises:
    """See the module. What was asked is kept with the request."""

    def __init__(self, presence: Presence, geometry: Geometry, options: Options, counts: Counts) -> None:
        self._presence = presence
        self._hash_tokens = geometry.hash_tokens
        self._align = geometry.align
        self._options = options
        self._counts = counts

    def promise(self, tracked: Tracked, own: int, now: float) -> int | None:
        """Tokens beyond the ``own`` ones that will be loaded. None: not known yet."""
        asker = self._presence.asker
        if asker is None or self._whole(tracked.request.num_tokens - 1) <= own:
            return 0
        asked = tracked.asked
        if asked is None or own < asked.own or now - asked.at > ANSWER_S:
            asked = self._ask(asker, tracked, own, now)
            if asked is None:
                return None
        return self._cut(tracked, asked.tokens, own, now)

    def take(self, tracked: Tracked) -> Asked | None:
        """The answer, whose lease is the caller's from now on."""
        self.drop_question(tracked)
        asked, tracked.asked = tracked.asked, None
        return asked

    def forget(self, tracked: Tracked) -> None:
        """Drops the answer, or the question, and gives its lease back."""
        asked = self.take(tracked)
        if asked is not None and asked.lease:
            self._presence.release(asked.lease)

    def drop_question(self, tracked: Tracked) -> None:
        """Gives up a question under way; a lease that comes with its answer is given back then."""
        if tracked.ticket is not None and self._presence.asker is not None:
            self._presence.asker.abandon(tracked.ticket)
        tracked.ticket = None
        tracked.pending_since = 0.0

    def _ask(self, asker: Asker, tracked: Tracked, own: int, now: float) -> Asked | None:
        """Asks, or looks for the answer to what was asked. None: not known yet."""
        first = tracked.ticket is None
        if tracked.ticket is None:
            if tracked.asked is not None:
                self.forget(tracked)
            if asker.silent() or not tracked.request.block_hashes:
                return _NONE
            self._counts.lookups += not tracked.pending_since
            tracked.ticket = asker.ask(tracked.request.num_tokens, own, tracked.request.block_hashes)
            if tracked.ticket is None:
                return self._answered(tracked, Asked(0, 0, 0, now))
        try:
            answer = asker.answer(tracked.ticket, first=first)
        except TimedOut:
            self._counts.lookups_unanswered += 1
            tracked.ticket = None
            return self._answered(tracked, Asked(0, 0, 0, now))
        if answer is None:
            return None
        tracked.ticket = None
        return self._read(tracked, answer, own, now)

    def _read(self, tracked: Tracked, answer: Answer, own: int, now: float) -> Asked | None:
        if answer.status == LookupStatus.PENDING:
            tracked.pending_since = tracked.pending_since or now
            if now - tracked.pending_since <= self._options.tier_wait_ms / 1e3:
                if answer.lease:
                    self._presence.release(answer.lease)
                return None  # asked again in the next step
            self._counts.lookups_pending += 1
        hit = answer.status in (LookupStatus.HIT, LookupStatus.PENDING) and answer.lease != 0
        return self._answered(tracked, Asked(own, answer.tokens if hit else 0, answer.lease, now))

    @staticmethod
    def _answered(tracked: Tracked, asked: Asked) -> Asked:
        tracked.asked = asked
        tracked.pending_since = 0.0
        return asked

    def _cut(self, tracked: Tracked, tokens: int, own: int, now: float) -> int:
        """Cuts an answer: never the last token, whole blocks of every group, nothing behind a key that failed."""
        tokens = self._whole(min(tokens, tracked.request.num_tokens - 1))
        if tracked.failed:
            size, hashes = self._hash_tokens, tracked.request.block_hashes
            for i in range(own // size, tokens // size):
                if tracked.failing(hashes[i], now):
                    tokens = self._whole(i * size)
                    break
        return tokens - own if tokens - own >= self._options.min_load_tokens else 0

    def _whole(self, tokens: int) -> int:
        """As many of them as are whole blocks in every group."""
        return tokens // self._align * self._align


_NONE = Asked(0, 0, 0, 0.0)
