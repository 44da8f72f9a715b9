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
from typing import TYPE_CHECKING

import zmq

from kvagent import messages as m
from kvagent.registration import Registration
from kvagent.vllm.tier.jobs import REGION, Loads, Saves, SessionMemory
from kvagent.vllm.tier.questions import Ask, Finished, Load, Order, Result, Store
from kvagent.vllm.weight_changes import with_generation

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvagent.vllm.tier.identity import Space
    from kvagent.vllm.tier.jobs import Rows
    from kvagent.vllm.tier.options import TierOptions

BUSY_MS = 5  # between two turns while something is awaited
SEEK_MS = 50  # while there is no session
IDLE_MS = 1_000
JOIN_S = 30.0  # for the thread to end, in close, with both links
REVOKES = 4096  # words of a session, and so the most saves in flight

log = logging.getLogger("vllm.kvagent")


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
        self._loads = Loads(options, rows, self._slots, space.tokens, self._register_loads, self.results.put)
        self._saves = Saves(options, "tier, saves", self._register_saves, self.results.put)
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()  # for the thread to make
        self._drains: list[tuple[float, threading.Event]] = []  # with the latest time to end all jobs
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        until = time.monotonic() + options.start_wait_ms / 1e3
        for jobs in (self._loads, self._saves):  # so that an engine's first requests find their chunks
            jobs.link.wait(max(0.0, until - time.monotonic()))
        self._turn()
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
        self._have(partial(self._loads.questions.forget, request))

    def move(self, generation: str) -> None:
        """Continue in the space of other weights, without waiting."""
        self.loading = False
        self._have(partial(self._move, generation))

    def drain(self, wait_s: float) -> None:
        """Wait until all jobs have ended; those that take longer are given up."""
        done = threading.Event()
        self._have(partial(self._drains.append, (time.monotonic() + wait_s, done)))
        while not done.wait(0.05) and self.alive:
            pass

    def close(self) -> None:
        """End the thread. RuntimeError if it does not end: it may be copying into the rows."""
        self._closing = True
        if self.alive:
            self._have(lambda: None)
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

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
                self._wait()
        except Exception:
            log.exception("tier: its thread ends; prompts are computed from now on")
        finally:  # saves are revoked, and loads have only the staging memory
            self.loading = self.saving = False
            self._saves.abandon()
            self._loads.abandon()
            for jobs in (self._saves, self._loads):
                jobs.close()
            for _, done in self._drains:
                done.set()

    def _turn(self) -> None:
        now = time.monotonic()
        self._loads.listen(now)
        self._saves.listen(now)
        self.loading, self.saving = self._loads.session is not None, self._saves.session is not None
        with contextlib.suppress(Empty):
            while True:
                self._calls.get_nowait()()
        self._loads.turn(now)
        self._saves.turn(now)
        if any(now >= deadline for deadline, _ in self._drains):
            self._loads.abandon()
            self._saves.abandon()
        if self._drains and not (self._loads.open or self._saves.open):
            for _, done in self._drains:
                done.set()
            self._drains.clear()

    def _obey(self, order: Order) -> None:
        if isinstance(order, Ask):
            self._loads.questions.add(order)
            if not self.loading:
                self._loads.questions.abandon()
        elif isinstance(order, Load) and self.loading:
            self._loads.add(order)
        elif isinstance(order, Store) and self.saving:
            self._saves.add(order)
        else:
            self.results.put(Finished(order.job, (), 0.0))

    def _move(self, generation: str) -> None:
        """Continue in the space of other weights. What is in flight is of the old ones."""
        self.loading = self.saving = False
        self._identity = with_generation(self._space.identity, generation)
        self._loads.begin_anew()
        self._saves.begin_anew()

    def _wait(self) -> None:
        """Wait for an order, or for the agent."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        both = (self._loads, self._saves)
        for waited in (*(jobs.fileno() for jobs in both), *self._loads.questions.sockets()):
            if waited is not None:
                poller.register(waited, zmq.POLLIN)
        if self._drains or any(jobs.awaited() for jobs in both):
            timeout_ms = BUSY_MS
        else:
            timeout_ms = SEEK_MS if any(jobs.session is None for jobs in both) else IDLE_MS
        poller.poll(timeout_ms)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _register_loads(self) -> tuple[Registration, SessionMemory]:
        memory = SessionMemory(slots=self._slots, row_bytes=self._rows.bytes)
        assert memory.staging is not None
        region = memory.staging.region(REGION), memory.staging.fd
        return self._registration("loads", self._slots, region, memory), memory

    def _register_saves(self) -> tuple[Registration, SessionMemory]:
        memory = SessionMemory(revokes=REVOKES)
        return self._registration("saves", self._rows.count, self._rows.region(), memory), memory

    def _registration(
        self, which: str, rows: int, region: tuple[m.Region, int | None], memory: SessionMemory
    ) -> Registration:
        """Return the registration of a session. Every group's chunk is one row."""
        words, tokens, groups = memory.words, self._space.tokens, self._space.groups
        segment = m.Segment(REGION, 0, self._rows.bytes, self._rows.bytes)
        return Registration(
            instance=f"{self._instance} {which}", role=m.Role.WORKER, identity=self._identity,
            groups=(m.Group(tokens, rows),) * groups, hash_tokens=tokens, sync=words.sync(0),
            regions=[(words.memory.region(0), words.memory.fd), region],
            held={0: dict.fromkeys(range(groups), (segment,))},
        )  # fmt: skip
