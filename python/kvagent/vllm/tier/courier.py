"""The tier's thread: it speaks with the agent and copies, so that vLLM's scheduler does neither.

It has two sessions. One names vLLM's rows, for saves only; the other a staging memory, for loads
and look-ups. All orders come from the scheduler's thread, which takes the results in its own time.
Every wait for the agent ends: by its answer, by the end of its session, by a deadline, or because
it does not answer a ping.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic

import zmq

from kvagent import messages as m
from kvagent.registration import Registration
from kvagent.vllm.link import Link
from kvagent.vllm.scheduler.agent_session import AgentSession
from kvagent.vllm.tier.jobs import Loads, Saves
from kvagent.vllm.tier.memory import REGION, Memory, SaveMemory, Staging
from kvagent.vllm.tier.orders import Ask, Finished, Load, Order, Result, Store
from kvagent.vllm.tier.questions import Questions
from kvagent.vllm.weight_changes import with_generation

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.session import Session
    from kvagent.vllm.scheduler.agent_session import SessionChange
    from kvagent.vllm.tier.identity import Space
    from kvagent.vllm.tier.memory import Rows
    from kvagent.vllm.tier.options import TierOptions

BUSY_MS = 5  # between two turns while something is awaited
SEEK_MS = 50  # while there is no session
IDLE_MS = 1_000
JOIN_S = 30.0  # for the thread to end, in close, with both links

log = logging.getLogger("vllm.kvagent")


class Port(AgentSession, Generic[Memory]):
    """A session that is renewed when it ends. Used by one thread.

    The memory is made anew for each session, so what a former agent still writes to is not used
    again.
    """

    def __init__(self, options: TierOptions, owner: str, make: Callable[[], tuple[Registration, Memory]]) -> None:
        self.memory: Memory | None = None
        """That of the session; None without one."""
        self.silent = False
        """Whether the agent does not answer."""
        self._make: Callable[[], tuple[Registration, Memory]] = make
        self._made: list[Memory] = []  # by the link's thread, the last one for the session that it attaches
        self.link = Link(options.socket_dir, owner, self._registration, pool=options.pool)
        super().__init__(self.link, options)

    @property
    def session(self) -> Session | None:
        """Return the session of an agent that answers, or None."""
        return None if self.silent else self._session

    def turn(self, now: float, *, awaited: bool) -> tuple[SessionChange, list[m.Done]]:
        """Adopt a new session and read messages. Return what has changed, and the reports of jobs.

        ``awaited``: something is expected of the agent.
        """
        change = self.poll()
        done = self.take(m.Done)
        if change.began or done:
            self.heard(now)
        self.silent = (awaited or self.silent) and self.stopped(now)
        return change, done

    def fileno(self) -> int | None:
        """Return the descriptor of the session, if there is one."""
        return None if self._session is None else self._session.fileno()

    def close(self) -> None:
        """Leave the agent."""
        super().close()
        while self._made:
            self._made.pop().close()

    def _registration(self) -> Registration:
        """Make what an attempt registers. The link's thread calls it, while there is no session."""
        registration, memory = self._make()
        while self._made:
            self._made.pop().close()
        self._made.append(memory)
        return registration

    def _attach(self, session: Session) -> bool:
        self.memory = self._made.pop()
        return super()._attach(session)

    def _close_lookups(self) -> None:
        """Handle the end of the session."""
        super()._close_lookups()
        memory, self.memory, self.silent = self.memory, None, False
        if memory is not None:
            memory.close()


class Courier:
    """The thread. ``close`` ends it, and with it all that the agent may do with the rows."""

    def __init__(self, options: TierOptions, rows: Rows, space: Space, instance: str) -> None:
        self.results: SimpleQueue[Result] = SimpleQueue()
        self.loading = False
        """Whether there is an agent that answers, and has registered the memory for loads."""
        self.saving = False
        """The same for saves."""
        self._rows, self._space = rows, space
        self._identity = with_generation(space.identity, space.generation)
        self._instance = instance[:100]
        self._slots = max(1, min(options.staging_bytes // rows.bytes, rows.count))
        deadline_s = options.load_deadline_ms / 1e3
        self._questions = Questions(
            options.lookup_age_ms / 1e3, options.tier_wait_ms / 1e3, space.tokens, self.results.put
        )
        self._loads = Loads(rows, self._slots, deadline_s, self.results.put, self._questions.release)
        self._saves = Saves(deadline_s, self.results.put)
        self._load_port: Port[Staging] = Port(options, "tier, loads", self._load_registration)
        self._save_port: Port[SaveMemory] = Port(options, "tier, saves", self._save_registration)
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()  # for the thread to make
        self._drains: list[tuple[float, threading.Event]] = []  # with the latest time to end all jobs
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._begin(options.start_wait_ms / 1e3)
        self._thread = threading.Thread(target=self._run, name="kvagent tier", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs. Once it has ended, orders are not answered, and nothing touches
        the rows or stores what it reads from them.
        """
        return self._thread.is_alive()

    def post(self, order: Order) -> None:
        """Give an order, without waiting."""
        self._have(partial(self._obey, order))

    def forget(self, request: str) -> None:
        """Drop the look-ups and leases of a request that has ended, without waiting."""
        self._have(partial(self._questions.forget, request))

    def move(self, generation: str) -> None:
        """Continue in the space of other weights, without waiting."""
        self.loading = False
        self._have(partial(self._move, generation))

    def drain(self, wait_s: float) -> None:
        """Wait until all jobs have ended; those that the agent has not ended in time are given
        up.
        """
        done = threading.Event()
        self._have(partial(self._drains.append, (time.monotonic() + wait_s, done)))
        while not done.wait(0.05) and self.alive:
            pass

    def close(self) -> None:
        """End the thread. RuntimeError if it does not end: it may be copying into the rows."""
        self._closing = True
        if self.alive:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._wake, 1)
            self._thread.join(JOIN_S)
            if self.alive:
                raise RuntimeError(f"the tier's thread has not ended within {JOIN_S} s")
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        self._rows.close()

    def _have(self, call: Callable[[], None]) -> None:
        """Have the thread make a call."""
        self._calls.put(call)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def _begin(self, wait_s: float) -> None:
        """Wait for the first sessions, so that an engine's first requests find their chunks."""
        until = time.monotonic() + wait_s
        for port in (self._load_port, self._save_port):
            port.link.wait(max(0.0, until - time.monotonic()))
        self._turn(time.monotonic())

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn(time.monotonic())
                self._wait()
        except Exception:
            log.exception("tier: its thread ends; prompts are computed from now on")
        finally:
            self._end()

    def _end(self) -> None:
        """Leave the agent. Saves are revoked, and loads have only the staging memory."""
        self.loading = self.saving = False
        self._saves.abandon(self._save_port.memory)
        self._loads.lost()
        self._questions.detach()
        for port in (self._load_port, self._save_port):
            port.close()
        for _, done in self._drains:
            done.set()

    def _turn(self, now: float) -> None:
        self._listen(now)
        with contextlib.suppress(Empty):
            while True:
                self._calls.get_nowait()()
        self._loads.turn(self._load_port.session, self._load_port.memory, now)
        self._saves.turn(self._save_port.session, self._save_port.memory, now)
        self._questions.turn(now)
        self._drain(now)

    def _obey(self, order: Order) -> None:
        now = time.monotonic()
        if isinstance(order, Ask):
            self._questions.add(order, now)
            if not self.loading:
                self._questions.abandon()
        elif isinstance(order, Load) and self.loading:
            self._loads.add(order, self._questions.take_lease(order.request, order.keys), now)
        elif isinstance(order, Store) and self.saving:
            self._saves.add(order, now)
        else:
            self.results.put(Finished(order.job, (), 0.0))

    def _listen(self, now: float) -> None:
        """Read what the agent says, and give up what it does not answer."""
        loads, saves = self._load_port, self._save_port
        change, done = loads.turn(now, awaited=self._loads.open or self._questions.open)
        if change.ended:
            self._loads.lost()
            self._questions.detach()
        if change.began:
            self._questions.attach(loads.lookups)
        if (staging := loads.memory) is not None:
            for event in done:
                self._loads.done(event.job, event.statuses, staging)
        if loads.silent:
            self._loads.abandon()
            self._questions.abandon()
        self.loading = loads.session is not None
        change, done = saves.turn(now, awaited=self._saves.open)
        if change.ended:
            self._saves.lost()
        if (memory := saves.memory) is not None:
            for event in done:
                self._saves.done(event.job, event.statuses, memory)
        if saves.silent:
            self._saves.abandon(saves.memory)
        self.saving = saves.session is not None

    def _move(self, generation: str) -> None:
        """Continue in the space of other weights. What is in flight is of the old ones."""
        self.loading = self.saving = False
        self._identity = with_generation(self._space.identity, generation)
        self._saves.abandon(self._save_port.memory)
        self._saves.lost()
        self._loads.lost()
        self._questions.detach()
        self._load_port.begin_anew()
        self._save_port.begin_anew()

    def _drain(self, now: float) -> None:
        if not self._drains:
            return
        if any(now >= deadline for deadline, _ in self._drains):
            self._loads.abandon()
            self._saves.abandon(self._save_port.memory)
        if not (self._loads.open or self._saves.open):
            for _, done in self._drains:
                done.set()
            self._drains.clear()

    def _wait(self) -> None:
        """Wait for an order, or for the agent."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for fd in (self._load_port.fileno(), self._save_port.fileno()):
            if fd is not None:
                poller.register(fd, zmq.POLLIN)
        for socket in self._questions.sockets():
            poller.register(socket, zmq.POLLIN)
        if self._loads.open or self._saves.open or self._questions.open or self._drains:
            timeout_ms = BUSY_MS
        else:
            ports = (self._load_port, self._save_port)
            timeout_ms = SEEK_MS if any(port.session is None for port in ports) else IDLE_MS
        poller.poll(timeout_ms)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _load_registration(self) -> tuple[Registration, Staging]:
        staging = Staging(self._slots, self._rows.bytes)
        regions = [staging.words.region, staging.region]
        return self._registration("loads", self._slots, regions, staging.words.sync.sync(0)), staging

    def _save_registration(self) -> tuple[Registration, SaveMemory]:
        memory = SaveMemory()
        regions = [memory.words.region, self._rows.region()]
        return self._registration("saves", self._rows.count, regions, memory.words.sync.sync(0)), memory

    def _registration(self, which: str, rows: int, regions: list[Any], sync: m.Sync) -> Registration:
        """Return the registration of a session. Every group's chunk is one row."""
        segment = m.Segment(REGION, 0, self._rows.bytes, self._rows.bytes)
        groups = self._space.groups
        return Registration(
            instance=f"{self._instance} {which}", role=m.Role.WORKER, identity=self._identity,
            groups=(m.Group(self._space.tokens, rows),) * groups, hash_tokens=self._space.tokens, sync=sync,
            regions=regions, segments=dict.fromkeys(range(groups), (segment,)),
        )  # fmt: skip
