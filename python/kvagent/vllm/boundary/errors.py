"""The boundary between vLLM and the connector: no error of the connector's leaves a call of vLLM's.

A call that fails gets the answer of a connector that has nothing. If it is about one request, that
request goes on uncached; after any other error the scheduler's part retires, and a worker leaves
the agent and joins it again. A part that fails again and again retires for good. Each kind of error
is logged once with its traceback, and all are counted (``errors``).

Errors by which the connector refuses a start leave it: Unsupported with ``on_unsupported: fail``,
and OptionError.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvagent.vllm.counters import ErrorCounts
from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.options import FAIL, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_ERRORS = 8
"""The most errors after which a part goes on."""

log = logging.getLogger("vllm.kvagent")
_Class = TypeVar("_Class", bound=type)


class Errors:
    """The errors of one part in calls of vLLM's."""

    def __init__(self) -> None:
        self.counts = ErrorCounts()
        self._logged: set[tuple[str, str]] = set()

    def note(self, call: str, error: Exception, what: str) -> str:
        """Count an error, and log the first of its kind. Return it as a reason."""
        self.counts.errors += 1
        reason = f"{type(error).__name__} in {call}: {error}"
        kind = call, type(error).__name__
        if kind not in self._logged:
            self._logged.add(kind)
            log.error("%s. %s. Please report it", reason, what, exc_info=error)
        return reason

    @property
    def too_many(self) -> bool:
        """Whether the part is to retire."""
        return self.counts.errors > MAX_ERRORS


class Call(NamedTuple):
    """What becomes of an error in a call of vLLM's, and what a part that has nothing answers."""

    failed: Callable[..., Any]
    """Takes the connector, the call's name, the error and the call's arguments. Returns the answer,
    or None for ``answer``.
    """
    answer: Any = None
    part: str = ""
    """The attribute with the part that the call is made of: without it nothing is called."""


def contained(calls: Mapping[str, Call]) -> Callable[[_Class], _Class]:
    """Return a decorator of a class with these methods."""

    def decorate(cls: _Class) -> _Class:
        for name, one in calls.items():
            setattr(cls, name, _guarded(name, getattr(cls, name), one))
        return cls

    return decorate


def _guarded(name: str, method: Callable[..., Any], one: Call) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if one.part and getattr(self, one.part) is None:
            return one.answer
        try:
            return method(self, *args, **kwargs)
        except OptionError:
            raise
        except Exception as error:
            if isinstance(error, Unsupported) and getattr(self._options, "on_unsupported", "") == FAIL:
                raise
            answer = one.failed(self, name, error, *args, **kwargs)
            return one.answer if answer is None else answer

    return call
