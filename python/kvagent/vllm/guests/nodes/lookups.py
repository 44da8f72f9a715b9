"""Look-ups at the agents of all nodes: a hit is what all of them have.

The other nodes' delegates are asked with the next plan, and answer with its report. The own agent
is asked after that, for no more than the least of their answers. For full attention, and so for all
models that are served so, the first blocks of a longer hit are a hit.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvagent.errors import Busy, Malformed, TimedOut
from kvagent.lookup import Answer, LookupStatus, Ticket, Want
from kvagent.ownform import encode_request
from kvagent.vllm.scheduler.lookups import Lookups
from kvagent.vllm.scheduler.requests import USUAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.session import Session
    from kvagent.vllm.guests.nodes.joint import JointSession
    from kvagent.vllm.guests.nodes.orders import Answered
    from kvagent.vllm.options import Options
    from kvagent.vllm.scheduler.requests import Terms


@dataclass(eq=False, slots=True, kw_only=True)
class JointTicket(Ticket):
    """A question to all agents."""

    number: int = 0
    tokens: int
    own: int
    asked: Sequence[bytes]
    answers: dict[int, Answered] = field(default_factory=dict)
    """By part, those of the other agents."""
    here: Ticket | None = None
    """The question to the own agent, once the others have answered."""
    first: bool = True
    """Whether the own agent's answer was not polled yet."""
    pending_since: float = 0.0
    """When the own agent first answered that more may come; 0 if it did not."""


class JointLookups(Lookups):
    """The look-ups of a joint session."""

    def __init__(self, session: Session, options: Options, joint: JointSession) -> None:
        super().__init__(session, options.lookup_wait_ms / 1e3, options.lookup_age_ms / 1e3)
        self._joint = joint
        self._tiers_s = options.tier_wait_ms / 1e3

    def outstanding(self) -> bool:
        """Return whether an agent has a question that it has not answered."""
        return super().outstanding() or self._joint.outstanding()

    def ask(
        self,
        tokens: int,
        own: int,
        hashes: Sequence[bytes],
        terms: Terms = USUAL,  # noqa: ARG002
        *,
        ready: bool = False,  # noqa: ARG002
    ) -> Ticket:
        """Ask all agents. Malformed for more hashes than a look-up may have."""
        request = self._request(Want.RESERVE, tokens, own, hashes, USUAL)
        encode_request(request)
        ticket = JointTicket(None, math.inf, leases=True, tokens=tokens, own=own, asked=hashes)
        self._joint.ask(ticket, request.hashes)
        return ticket

    def answer(self, ticket: Ticket, *, first: bool) -> Answer | None:  # noqa: ARG002
        """Return the answer, or None without one; raise TimedOut if there will be none."""
        assert isinstance(ticket, JointTicket)
        if len(ticket.answers) < len(self._joint.others):
            return None
        answers = ticket.answers.values()
        if any(one.lost for one in answers):
            raise TimedOut("an agent of another node did not answer")
        least = min(one.tokens for one in answers)
        if least <= ticket.own:
            return self._miss(ticket)
        answer = self._here(ticket, least)
        if answer is None:
            return None
        tokens = min(answer.tokens, least)
        hit = answer.status in (LookupStatus.HIT, LookupStatus.PENDING) and answer.lease and tokens > ticket.own
        if not hit:
            if answer.lease:
                self._joint.release(answer.lease)
            return self._miss(ticket)
        self._joint.hold(answer.lease, ticket.number)
        return Answer(
            answer.version, LookupStatus.HIT, tokens, answer.lease, answer.boot, answer.disk, answer.shared
        )  # where they are on this node

    def abandon(self, ticket: Ticket) -> None:
        """Abandon a look-up; leases in its answers are released."""
        assert isinstance(ticket, JointTicket)
        self._joint.drop(ticket.number)
        if ticket.here is not None:
            super().abandon(ticket.here)

    def _here(self, ticket: JointTicket, least: int) -> Answer | None:
        """Return the own agent's answer. While it says that more may come, it is asked again."""
        try:
            if ticket.here is None:
                ticket.here = super().ask(min(ticket.tokens, least + 1), ticket.own, ticket.asked)
        except Busy:
            return None
        except Malformed as error:
            raise TimedOut(str(error)) from error
        first, ticket.first = ticket.first, False
        answer = super().answer(ticket.here, first=first)
        if answer is None:
            return None
        ticket.here = None
        if answer.status == LookupStatus.PENDING:
            now = time.monotonic()
            ticket.pending_since = ticket.pending_since or now
            if now - ticket.pending_since < self._tiers_s:
                if answer.lease:
                    self._joint.release(answer.lease)
                return None
        return answer

    def _miss(self, ticket: JointTicket) -> Answer:
        self.abandon(ticket)
        return Answer(self._session.version, LookupStatus.HIT, 0, 0, self.boot)
