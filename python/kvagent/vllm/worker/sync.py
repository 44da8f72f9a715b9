"""The steps of a worker: the words and the clock that tell the agent which of them have ended, the
times of decode steps, and the wait of idle ones.

The clock runs on the host or on a GPU's compute stream. It writes the step word and one event for
each recent step.

vLLM keeps stepping while a connector expects a report or a lease. A step with requests does not
wait. Without requests, the worker waits in each step for a message of the agent, longer each time
none arrived, up to MAX_WAIT_MS, which also bounds the delay of a new request.
"""

from __future__ import annotations

import select
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvagent.cuda import clock as cuda
from kvagent.shm import SyncWords
from kvagent.vllm.plan import REVOKES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvagent.cuda.torchgpu import TorchGpu


STAGE_WORDS = 64  # of a worker, and so the most staged loads in flight
EVENTS = 1024  # events of a worker on a CPU; an event is reused after that many steps


class HostClock:
    """The clock of a CPU, where the kernels have ended when the forward pass returns."""

    def __init__(self, words: SyncWords) -> None:
        self._words = words

    def begin(self, step: int) -> None:
        """Mark a step whose kernels are about to be launched."""
        self._words.record(self.event(step))

    def end(self, step: int) -> None:
        """Mark a step whose kernels have ended."""
        self._words.step = step
        self._words.fire(self.event(step))

    def event(self, step: int) -> int:
        """Return the event that fires when the step's kernels have ended."""
        return step % self._words.events

    def close(self) -> None:
        """Stop signalling."""


@dataclass(slots=True)
class Sync:
    """The words and the clock. ``close`` frees the words once nothing writes to them."""

    words: SyncWords
    clock: HostClock | cuda.CudaClock

    def close(self) -> None:
        """Close the clock, then free the words."""
        self.clock.close()
        self.words.close()


def make_sync(device: Any, gpu: TorchGpu | None = None) -> Sync:
    """Return the words and clock for KV caches on a device; None is host memory.

    ``gpu`` replaces torch's in tests.
    """
    if device is None:
        words = SyncWords(EVENTS, REVOKES, stages=STAGE_WORDS)
        return Sync(words, HostClock(words))
    if gpu is None:
        from kvagent.cuda.torchgpu import TorchGpu

        gpu = TorchGpu(device)
    words = SyncWords(cuda.EVENTS, REVOKES, cuda.IPC_HANDLE, stages=STAGE_WORDS)
    try:
        return Sync(words, cuda.CudaClock(words, gpu))
    except BaseException:
        words.close()
        raise


FREE_STEPS = 8  # consecutive idle steps that do not wait
MAX_WAIT_MS = 10


class IdleBackoff:
    """The wait of idle steps."""

    def __init__(self) -> None:
        self._idle = 0

    @property
    def active(self) -> bool:
        """Return whether steps wait now."""
        return self._idle > FREE_STEPS

    def step(self, *, idle: bool) -> None:
        """Begin a step; ``idle``: the engine has no request."""
        self._idle = self._idle + 1 if idle else 0

    def reset(self) -> None:
        """Shorten the wait, since the agent sent a message."""
        self._idle = min(self._idle, FREE_STEPS)

    def wait(self, descriptors: Iterable[int]) -> bool:
        """Wait, if active, until a descriptor is readable. Return whether one is."""
        if not self.active:
            return False
        poller = select.poll()
        for fd in descriptors:
            poller.register(fd, select.POLLIN)
        return bool(poller.poll(min(1 << min(self._idle - FREE_STEPS - 1, 8), MAX_WAIT_MS)))


REPORT_STEPS = 8  # are reported together,
REPORT_S = 0.25  # or fewer that are this old
_MAX_US = 2**32 - 1

_STEP = struct.Struct("<III")


class DecodeSteps:
    """The decode steps that have not been reported yet.

    The agent paces copies that can wait by what they do to decode steps, so only steps are reported
    that can be compared: every request computed its next token, and the next step did so too, which
    means that the engine went on at once. The time of a step is that from its begin to the next
    step's begin: on a GPU the launches of one step say nothing of its time, those of many steps in
    a row do.
    """

    def __init__(self) -> None:
        self._requests = 0  # of the step in flight; 0: it is no decode step
        self._begin = 0.0  # of the step in flight
        self._ended: list[tuple[float, float, int]] = []  # end, time, requests

    def begin(self, requests: int, now: float) -> bytes:
        """Begin a step in which ``requests`` decode; 0: it is no decode step.

        Return the ended steps (messages.Steps) when it is time to report them, or nothing.
        """
        ended = self._ended
        if requests and self._requests:
            ended.append((now, now - self._begin, self._requests))
        self._requests, self._begin = requests, now
        if not ended or (len(ended) < REPORT_STEPS and now - ended[0][0] < REPORT_S):
            return b""
        self._ended = []
        return b"".join(
            _STEP.pack(_us(now - end), max(_us(took), 1), count)
            for end, took, count in ended
        )  # fmt: skip


def _us(seconds: float) -> int:
    return min(round(seconds * 1e6), _MAX_US)
