"""Reads requests from an access log: Carousel's own log of finished requests, or JSON with one request per line.

Our own log has one line per request, written when the request ends and with its duration. A request that took 3 s
arrived 3 s before the time of its line, so the lines are not in order of arrival.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from math import isfinite
from typing import Any, NamedTuple

from app.errors import InvalidSetup

# The names that each field may have. If a line contains several of them, the first name in the tuple is used.
_TIMES = ("timestamp", "time", "ts", "asctime")
_PROMPT_TOKENS = ("prompt_tokens", "input_tokens", "num_prompt_tokens")
_OUTPUT_TOKENS = ("completion_tokens", "output_tokens", "num_output_tokens")

_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
# The line that `ResponseState.log_end` writes. Serve adds the level and the time in front.
_FINISHED = re.compile(
    r"request \S+ finished after (?P<seconds>\d+\.\d+) s: .* (?P<prompt>\d+) prompt tokens, "
    r"(?P<output>\d+) completion tokens"
)
_AT = re.compile(r"\w+ (?P<at>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d+)")


class LoggedRequest(NamedTuple):
    """A request in a log. Times are in seconds since 1970."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int


def is_access_log(first_line: str) -> bool:
    """Return whether a file that starts with this line can be read by `read_access_log`."""
    if _LEVEL.match(first_line):
        return True
    try:
        given = json.loads(first_line)
    except ValueError:
        return False
    return isinstance(given, dict) and any(name in given for name in _TIMES)


def read_access_log(lines: Iterable[str], place: str) -> Iterator[LoggedRequest]:
    """Return the requests, sorted by arrival. Skips other lines, and requests without output tokens.

    Raises InvalidSetup, with the line number, if a request's field is missing or is not a number.
    """
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            logged = _of_json(json.loads(line)) if line.startswith("{") else _of_text(line)
        except (ValueError, TypeError) as error:
            raise InvalidSetup(f"--trace {place}:{number}: {error}") from error
        if logged is not None and logged.num_output_tokens:
            found.append(logged)
    return iter(sorted(found))


def _of_text(line: str) -> LoggedRequest | None:
    finished, at = _FINISHED.search(line), _AT.match(line)
    if finished is None:
        return None
    if at is None:
        raise ValueError(f"got {line[:40]!r}; a request's line must start with a level and a time")
    return _finished(finished, at["at"])


def _of_json(given: Mapping[str, Any]) -> LoggedRequest | None:
    message = given.get("message")
    if isinstance(message, str):  # our own log, written with Serve's `encoding: JSON`
        finished = _FINISHED.search(message)
        return None if finished is None else _finished(finished, str(_field(given, _TIMES)))
    at_s = seconds_of(_field(given, _TIMES))
    usage = given.get("usage")
    counts = usage if isinstance(usage, dict) else given
    return LoggedRequest(at_s, _count(counts, _PROMPT_TOKENS), _count(counts, _OUTPUT_TOKENS))


def _finished(finished: re.Match[str], ended_at: str) -> LoggedRequest:
    arrival_s = seconds_of(ended_at) - float(finished["seconds"])
    return LoggedRequest(arrival_s, int(finished["prompt"]), int(finished["output"]))


def _field(given: Mapping[str, Any], names: Iterable[str]) -> Any:
    for name in names:
        if name in given:
            return given[name]
    raise ValueError(f"one of the fields {', '.join(names)} is required; the fields are {', '.join(given) or 'none'}")


def _count(given: Mapping[str, Any], names: Iterable[str]) -> int:
    value = _field(given, names)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"got {value!r} tokens; must be an integer of at least 0")
    return value


def seconds_of(value: object) -> float:
    """Return seconds since 1970 for a number of seconds, or for a date and time (in UTC, unless it names a zone)."""
    with suppress(ValueError):
        if isinstance(value, int | float | str) and not isinstance(value, bool) and isfinite(float(value)):
            return float(value)
    if not isinstance(value, str):
        raise ValueError(f"got the time {value!r}; must be a number of seconds, or a date and time")
    at = datetime.fromisoformat(value.replace(",", "."))
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
