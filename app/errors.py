"""All of Carousel's errors in one tree: callers' mistakes, overload, Carousel's failures, operators' mistakes.

    CarouselError
    ├── InvalidRequest           the caller's mistake; nothing was queued
    │   ├── ContextTooLong       prompt + max_tokens exceed the model's context
    │   ├── NotFound             no such model, route or object
    │   ├── MethodNotAllowed     the route exists, the method does not
    │   ├── BodyTooLarge         the HTTP body exceeds the limit
    │   ├── BodyTooSlow          the HTTP body did not arrive in time
    │   ├── UnsupportedMediaType the HTTP body has a content type that the route does not accept
    │   ├── Unauthenticated      the request has no API key, or an unknown one
    │   ├── NotPermitted         the API key does not allow the request
    │   ├── Cancelled            the request was cancelled while it was running
    │   └── Quarantined          an equal request has made the model fail before
    ├── Overloaded               the queues are full; retry after `retry_after_s`
    │   ├── DeadlineMissed       the deadline has passed or cannot be met; do not retry
    │   ├── LimitReached         the API key has currently reached a limit
    │   │   └── BudgetSpent      the daily or monthly budget is used up; do not retry before `retry_after_s`
    │   │       └── MoneySpent   the budget limits costs in money
    │   └── StorageFull          the disk for files and batches has only its reserve left
    ├── Failure                  Carousel's failure
    │   ├── StepFailed           a model step with this request failed; the engine continues
    │   │   └── DeviceFault      the device failed on all requests in the step
    │   ├── EngineStopped        the engine is shutting down or has died
    │   └── Unavailable          no replica can currently accept the request
    │       └── ReplicasLost     several replicas were lost while serving the request, perhaps because of it
    └── InvalidSetup             the operator's mistake, detected at startup
        ├── TooLittleMemory      a device has too little memory for the model
        ├── UnsupportedModel     the model cannot be served; the message explains why
        └── UnsupportedAdapter   the LoRA adapter cannot be used; the message explains why

Errors are sent between processes, so they keep all of their attributes when pickled. `app/api/http/errors.py` maps
them to HTTP statuses.
"""

from __future__ import annotations

import traceback
from pathlib import PurePath
from typing import Any


class CarouselError(Exception):
    """Base class of all errors. `message` is written for the person who can fix the problem."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.message, dict(self.__dict__))

    def to_plain(self) -> tuple[str, str, dict[str, Any]]:
        """Return the class name, the message and the other attributes as plain values, for `from_plain`."""
        return type(self).__name__, self.message, {k: v for k, v in vars(self).items() if k != "message"}


def _restore(kind: type[CarouselError], message: str, state: dict[str, Any]) -> CarouselError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


def from_plain(kind_name: str, message: str, attributes: dict[str, Any]) -> CarouselError:
    """Rebuild an error from the values of `to_plain`. Returns a Failure if this version does not have the class."""
    kind = globals().get(kind_name)
    if not (isinstance(kind, type) and issubclass(kind, CarouselError)):
        return Failure(message)  # during an update, the other process may run a newer version
    return _restore(kind, message, {"message": message} | attributes)


class InvalidRequest(CarouselError):
    """The request cannot be served unless it is changed. `param` names the invalid field; `code` is for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLong(InvalidRequest):
    """The prompt and the requested output together exceed the model's context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class NotFound(InvalidRequest):
    """The model, route or object does not exist."""


class MethodNotAllowed(InvalidRequest):
    """The route does not accept this HTTP method."""


class BodyTooLarge(InvalidRequest):
    """The HTTP body exceeds the configured limit."""


class BodyTooSlow(InvalidRequest):
    """The HTTP body did not arrive in time."""


class UnsupportedMediaType(InvalidRequest):
    """The HTTP body has a content type that the route does not accept."""


class Unauthenticated(InvalidRequest):
    """The request has no API key, or an unknown one."""


class NotPermitted(InvalidRequest):
    """The caller's API key does not allow this request."""


class Cancelled(InvalidRequest):
    """The caller or an admin cancelled the request while it was running."""


class Quarantined(InvalidRequest):
    """Requests with the same prompt and sampling parameters have made steps fail, so this one is not run."""


class Overloaded(CarouselError):
    """The request is valid, but the queues are full."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineMissed(Overloaded):
    """The request's deadline has passed, or would pass before the request ends. Retrying would not help."""


class LimitReached(Overloaded):
    """The caller's API key has currently reached a limit."""


class BudgetSpent(LimitReached):
    """Too little of the caller's daily or monthly budget is left for this request."""


class MoneySpent(BudgetSpent):
    """Too little is left of a budget that limits costs in money, not tokens."""


class StorageFull(Overloaded):
    """The disk for files and batches has no room for new data."""


class ExchangeFailed(RuntimeError):
    """An exchange between a model's ranks failed, or another rank failed during work that all ranks share."""


class Failure(CarouselError):
    """A part of Carousel failed."""


class StepFailed(Failure):
    """A model step with this request failed."""


class DeviceFault(StepFailed):
    """The device failed on a whole step, even when run in parts, so this request is probably not at fault."""


class EngineStopped(Failure):
    """The engine is shutting down or has died."""


class Unavailable(Failure):
    """No replica can currently accept the request."""


class ReplicasLost(Unavailable):
    """Too many replicas were lost while serving this request."""


class InvalidSetup(CarouselError):
    """The service cannot start as configured."""


class TooLittleMemory(InvalidSetup):
    """A replica needs more memory than its device has."""


class UnsupportedModel(InvalidSetup):
    """The model cannot be served; the message explains why."""


class UnsupportedAdapter(InvalidSetup):
    """The LoRA adapter cannot be used with its model; the message explains why."""


def may_be_served_later(error: Exception) -> bool:
    """Return whether the same request may succeed later without changes."""
    return isinstance(error, Overloaded | Unavailable | EngineStopped) and not isinstance(error, DeadlineMissed)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for libraries whose errors have long messages."""
    return str(error).strip().split("\n", 1)[0]


def described(error: BaseException) -> str:
    """Describe an exception for a log line: class, file and line, and the message if it cannot quote client text.

    Many messages quote values, for example those of KeyError, ValueError from `int`, and UnicodeEncodeError.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    message = str(error) if _may_be_shown(error) else ""
    return f"{type(error).__qualname__}{place}" + (f": {message}" if message else "")


def traceback_of(error: BaseException) -> str:
    """Return the stacks of an exception and its causes for a log, including only messages that `described` includes."""
    stacks: list[str] = []
    seen: set[int] = set()
    following: list[BaseException | None] = [error]
    while following:
        each = following.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        stacks.append("".join((*traceback.format_tb(each.__traceback__), described(each))))
        following += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        following.append(each.__cause__ or (None if each.__suppress_context__ else each.__context__))
    return "\nraised after:\n".join(stacks)


def _may_be_shown(error: BaseException) -> bool:
    """Return whether the message cannot quote client text, which is true of Carousel's errors except InvalidRequest.

    System and SQLite errors do not quote any either. A RuntimeError usually comes from torch and mentions sizes.
    """
    if isinstance(error, CarouselError):
        return not isinstance(error, InvalidRequest)
    return isinstance(error, OSError | RuntimeError | MemoryError) or type(error).__module__ == "sqlite3"
