"""How long a request waits for the answer to its look-up.

Waiting does not block the engine: vLLM passes over the request and asks again in its next step. The
wait is bounded by what the answer is worth, that is the time that computing the prompt takes longer
than loading it, so a wait in vain at most doubles the time to the first token:

    worth   = tokens * (time per token computed - time per token loaded), as measured
    longest = between lookup_grace_ms and lookup_age_ms

An agent that is late is still asked, but a silent one costs an engine a bounded time in total, not
each request: the wait is halved with each look-up that was waited for in vain, so all of them
together are at most twice the longest. Any answer, even one that comes too late for its request,
restores it. An agent that is gone is not waited for at all: its session has ended, or it does not
answer a ping (agent_session).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvagent.vllm.scheduler.requests import USUAL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvagent.vllm.options import Options
    from kvagent.vllm.scheduler.requests import Terms, Tracked

CHUNK_TOKENS = 32  # a step in which a request computes fewer tokens says nothing of prefills
KEPT = 0.8  # weight of the former samples of a rate when one is added
MAX_HALVINGS = 30


class Rate:
    """A mean over recent samples of the time per token, weighted by their tokens."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a sample."""
        self._tokens = KEPT * self._tokens + tokens
        self._seconds = KEPT * self._seconds + seconds

    @property
    def token_s(self) -> float | None:
        """Return the seconds per token; None without a sample."""
        return self._seconds / self._tokens if self._tokens else None


class LookupWaits:
    """The bounds of waiting for look-ups, from the options and what was measured.

    All times are of time.monotonic.
    """

    def __init__(self, options: Options) -> None:
        self.tiers_s = options.tier_wait_ms / 1e3
        """The longest that a request waits while the agent queries its lower tiers."""
        self.computed = Rate()
        self.loaded = Rate()
        self._age_s = options.lookup_age_ms / 1e3
        self._grace_s = min(options.lookup_grace_ms / 1e3, self._age_s)
        self._in_vain = 0  # look-ups that were waited for in vain since the last answer
        self._step = (0, 0.0)  # tokens of the step in flight, if it says something of prefills, and its begin

    def step(self, scheduled: Mapping[str, int], total: int, now: float) -> None:
        """Begin a step that computes these tokens by request, ``total`` together."""
        if self._step[0]:
            self.end_step(now)
        if total != len(scheduled) and max(scheduled.values(), default=0) >= CHUNK_TOKENS:
            self._step = total, now

    def end_step(self, now: float) -> None:
        """End the last step: the next one begins, or there is none because no request is left."""
        tokens, begin = self._step
        if tokens:
            self._step = 0, 0.0
            self.computed.add(tokens, now - begin)

    def answered(self) -> None:
        """Record an answer of the agent, whatever it says and however late."""
        self._in_vain = 0

    def in_vain(self) -> None:
        """Record a look-up that no answer came to within its bound."""
        self._in_vain += 1

    def pending_s(self, tracked: Tracked) -> float:
        """Return how long a request may wait while the agent says that more may come."""
        terms = tracked.asking.terms
        return terms.pending_s if terms.transfer else self.tiers_s

    def longest_s(self, tokens: int, terms: Terms = USUAL) -> float:
        """Return how long a request may wait for answers in total, of which ``tokens`` are not in
        the engine's own cache.
        """
        worth_s = terms.wait_s if terms.transfer else self._worth_s(tokens)
        return max(self._grace_s, min(worth_s, self._age_s)) / (1 << min(self._in_vain, MAX_HALVINGS))

    def may_wait(self, tracked: Tracked, tokens: int, now: float) -> bool:
        """Return whether a request whose look-up has no answer yet may go on waiting.

        Called whenever vLLM asks. After the agent has said that more may come, time does not count:
        up to pending_s in total, and up to lookup_age_ms of the look-up in flight.
        """
        asking = tracked.asking
        if since := asking.polled_at:
            if asking.pending_since:
                free = asking.pending_since + self.pending_s(tracked)
                since = max(since, min(free, asking.at + self._age_s) if asking.at else free)
            asking.waited_s += max(now - since, 0.0)
        asking.polled_at = now
        return asking.waited_s < self.longest_s(tokens, asking.terms)

    def _worth_s(self, tokens: int) -> float:
        """Return the time that a hit saves; infinite before the first prompt was computed."""
        compute, load = self.computed.token_s, self.loaded.token_s
        return math.inf if compute is None else tokens * max(compute - (load or 0.0), 0.0)
