"""The times of a worker's decode steps, as the agent is told of them.

The agent paces copies that can wait by what they do to decode steps, so only steps are reported
that can be compared: every request computed its next token, and the next step did so too, which
means that the engine went on at once. The time of a step is that from its begin to the next step's
begin: on a GPU the launches of one step say nothing of its time, those of many steps in a row do.
"""

from __future__ import annotations

import struct

REPORT_STEPS = 8  # are reported together,
REPORT_S = 0.25  # or fewer that are this old
_MAX_US = 2**32 - 1

_STEP = struct.Struct("<III")


class DecodeSteps:
    """The decode steps that have not been reported yet."""

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
