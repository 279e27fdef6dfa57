"""Every error of Carousel, in one tree with three branches: the caller's mistake, overload, our failure.

    CarouselError
    ├── InvalidRequest           the caller's mistake; nothing was queued
    │   ├── ContextTooLong       prompt + max_tokens exceed what the model accepts
    │   ├── NotFound             no such model or route
    │   ├── MethodNotAllowed     the route exists, the method does not
    │   ├── BodyTooLarge         the HTTP body exceeds the limit
    │   ├── BodyTooSlow          the HTTP body did not arrive in time
    │   ├── UnsupportedMediaType the HTTP body is not declared as what the route takes
    │   ├── Unauthenticated      no API key, or none that is known
    │   ├── NotPermitted         this key may not do that
    │   ├── Cancelled            it was cancelled while it ran
    │   └── Quarantined          this very request has failed the engine before
    ├── Overloaded               queues are full; try again after `retry_after_s`
    │   ├── DeadlineMissed       the deadline has passed or cannot be met; do not try again
    │   ├── LimitReached         this key has used what it may use for now
    │   │   └── BudgetSpent      of a day or a month; do not try again before `retry_after_s`
    │   │       └── MoneySpent   what it has used costs as much as it may
    │   └── StorageFull          the disk of files and batches has only its reserve left
    ├── Failure                  ours
    │   ├── StepFailed           a model step raised; its requests fail, the engine lives on
    │   │   └── DeviceFault     it raised for every request alike
    │   ├── EngineStopped        the engine is shutting down or has died
    │   └── Unavailable          no replica can take the request now
    │       └── ReplicasLost     several were lost while they served it, so it may be what they died of
    └── InvalidSetup             the operator's mistake, found at start
        ├── TooLittleMemory      a device's memory is too small for what it is to hold
        ├── UnsupportedModel     the model cannot be served, with the reason
        └── UnsupportedAdapter   the LoRA adapter cannot be used, with the reason

They cross process borders, so each survives pickling with all its attributes. HTTP statuses are not decided here
(see `app/api/http/errors.py`).
"""

from __future__ import annotations

import traceback
from pathlib import PurePath
from typing import Any


class CarouselError(Exception):
    """Root of the tree. `message` is a sentence for the person that has to act on it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.message, dict(self.__dict__))

    def to_plain(self) -> tuple[str, str, dict[str, Any]]:
        """Its kind, its words and its other attributes as plain values; `from_plain` makes it again."""
        return type(self).__name__, self.message, {k: v for k, v in vars(self).items() if k != "message"}


def _restore(kind: type[CarouselError], message: str, state: dict[str, Any]) -> CarouselError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


def from_plain(kind_name: str, message: str, attributes: dict[str, Any]) -> CarouselError:
    """The error that `to_plain` told in another process. A Failure when its kind is not known here."""
    kind = globals().get(kind_name)
    if not (isinstance(kind, type) and issubclass(kind, CarouselError)):
        return Failure(message)  # of a newer version, during an update
    return _restore(kind, message, {"message": message} | attributes)


class InvalidRequest(CarouselError):
    """The request cannot be served as it stands. `param` names the field at fault, `code` is for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLong(InvalidRequest):
    """Prompt and asked output together exceed the model's context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class NotFound(InvalidRequest):
    """No such model or route."""


class MethodNotAllowed(InvalidRequest):
    """The route does not take this HTTP method."""


class BodyTooLarge(InvalidRequest):
    """The HTTP body exceeds the configured limit."""


class BodyTooSlow(InvalidRequest):
    """The HTTP body did not arrive in time."""


class UnsupportedMediaType(InvalidRequest):
    """The HTTP body is not declared as what the route takes."""


class Unauthenticated(InvalidRequest):
    """No API key came with the request, or none that is known."""


class NotPermitted(InvalidRequest):
    """The caller's key does not allow this."""


class Cancelled(InvalidRequest):
    """The caller, or an admin, has cancelled the request while it ran."""


class Quarantined(InvalidRequest):
    """The same prompt and sampling parameters have made steps fail; they are not tried again."""


class Overloaded(CarouselError):
    """Nothing is wrong with the request; the queues are full."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineMissed(Overloaded):
    """The request's deadline has passed, or it would pass before the end. A retry would be of no use."""


class LimitReached(Overloaded):
    """The caller's key has used what it may use for now."""


class BudgetSpent(LimitReached):
    """A budget of the caller's key for a day or a month has no more left for this request."""


class MoneySpent(BudgetSpent):
    """The budget is one of money."""


class StorageFull(Overloaded):
    """The disk of files and batches has no room for anything new."""


class ExchangeFailed(RuntimeError):
    """An exchange between the ranks of a model failed, or work that all of them do failed on another one."""


class Failure(CarouselError):
    """Something of ours failed."""


class StepFailed(Failure):
    """The model step that computed this request raised."""


class DeviceFault(StepFailed):
    """The device failed on all requests of a step, each by itself too: the fault is hardly the request's."""


class EngineStopped(Failure):
    """The engine no longer runs."""


class Unavailable(Failure):
    """No replica can take the request now."""


class ReplicasLost(Unavailable):
    """As many replicas were lost while they served this request as one may cost."""


class InvalidSetup(CarouselError):
    """The service cannot start as configured."""


class TooLittleMemory(InvalidSetup):
    """A device's memory does not hold what a replica needs."""


class UnsupportedModel(InvalidSetup):
    """The model cannot be served; the message says why."""


class UnsupportedAdapter(InvalidSetup):
    """The LoRA adapter cannot be used with its model; the message says why."""


def may_be_served_later(error: Exception) -> bool:
    """Whether the same request may be served at another time."""
    return isinstance(error, Overloaded | Unavailable | EngineStopped) and not isinstance(error, DeadlineMissed)


def first_line(error: BaseException) -> str:
    """The message up to its first line break, for an error of a library that says much."""
    return str(error).strip().split("\n", 1)[0]


def described(error: BaseException) -> str:
    """An exception in one line of a log: its kind, where it was raised, and its message if that has no client's text.

    Other messages show values: that of a KeyError, of a ValueError of `int`, and the repr of a UnicodeEncodeError,
    which holds a whole text.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    message = str(error) if _may_be_shown(error) else ""
    return f"{type(error).__qualname__}{place}" + (f": {message}" if message else "")


def traceback_of(error: BaseException) -> str:
    """An exception and what it came from, over several lines of a log, with the messages that `described` shows."""
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
    """Messages of ours, unless they quote a request, of the system and of SQLite, which name no values.

    A RuntimeError is torch's, as a rule: it names sizes and devices.
    """
    if isinstance(error, CarouselError):
        return not isinstance(error, InvalidRequest)
    return isinstance(error, OSError | RuntimeError | MemoryError) or type(error).__module__ == "sqlite3"
