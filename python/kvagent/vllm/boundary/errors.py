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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvagent.vllm.geometry import Unsupported
from kvagent.vllm.options import FAIL, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_ERRORS = 8
"""The most errors after which a part goes on."""

log = logging.getLogger("vllm.kvagent")
_Class = TypeVar("_Class", bound=type)


@dataclass(slots=True)
class ErrorCounts:
    """Errors of one part in calls of vLLM's."""

    errors: int = 0


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


def contained(calls: Mapping[str, Callable[..., Any]]) -> Callable[[_Class], _Class]:
    """Return a decorator of a class.

    An error in one of its methods ``calls`` is passed to the function there, as (self, call, error)
    and the call's arguments, which returns the call's answer.
    """

    def decorate(cls: _Class) -> _Class:
        for name, failed in calls.items():
            setattr(cls, name, _guarded(name, getattr(cls, name), failed))
        return cls

    return decorate


def _guarded(name: str, method: Callable[..., Any], failed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except OptionError:
            raise
        except Exception as error:
            if isinstance(error, Unsupported) and getattr(self._options, "on_unsupported", "") == FAIL:
                raise
            return failed(self, name, error, *args, **kwargs)

    return call
