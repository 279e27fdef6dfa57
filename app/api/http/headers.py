"""The request headers that have a meaning here beside those of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.types import Scope

from app.api.prepared_request import PreparedRequest
from app.api.schemas.parameters import STRICT_HEADER
from app.engine.request import MAX_SESSION_LENGTH
from app.errors import InvalidRequest

DEADLINE_HEADER = "x-carousel-deadline-s"
GROUP_HEADER = "x-carousel-group"
PRESET_HEADER = "x-carousel-preset"
SESSION_HEADER = "x-carousel-session"
EXPLAIN_HEADER = "x-carousel-explain"
TIMINGS_HEADER = "x-carousel-timings"
NO_QUEUE_HEADER = "x-carousel-no-queue"


def headers_of(scope: Scope) -> Mapping[str, str]:
    """The headers of a request by their names in lower case; of those that come twice, the first."""
    headers: dict[str, str] | None = scope["state"].get("headers")
    if headers is None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        scope["state"]["headers"] = headers
    return headers


def with_headers(call: PreparedRequest, headers: Mapping[str, str]) -> PreparedRequest:
    """The call with what its headers ask for: group, preset, session, whether it waits, timings in `usage`.

    A stream has `usage` then too.

    Raises InvalidRequest for a session that is too long. Whether there is such a group, or one with such a preset, is
    checked where groups are known.
    """
    if _is_true(headers.get(TIMINGS_HEADER, "")):
        call = replace(call, include_usage=True, wants_timings=True)
    group, preset, session = (headers.get(name, "") for name in (GROUP_HEADER, PRESET_HEADER, SESSION_HEADER))
    if len(session) > MAX_SESSION_LENGTH:
        raise InvalidRequest(
            f"the header {SESSION_HEADER} has {len(session):,} characters; at most {MAX_SESSION_LENGTH} are accepted",
            param=SESSION_HEADER,
        )
    no_queue = _is_true(headers.get(NO_QUEUE_HEADER, ""))
    if not (group or preset or session or no_queue):
        return call
    return replace(
        call,
        requests=tuple(
            replace(each, group=group, preset=preset, session=session, no_queue=no_queue) for each in call.requests
        ),
    )


def with_deadline(body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """The body with the deadline of the header, for clients that cannot change bodies.

    A deadline in the body goes before that of the header.
    """
    header = headers.get(DEADLINE_HEADER)
    if header is None or body.get("deadline_s") is not None:
        return body
    try:
        return body | {"deadline_s": float(header)}
    except ValueError:
        raise InvalidRequest(
            f"the header {DEADLINE_HEADER} should be a number of seconds; got {header[:40]!r}", param="deadline_s"
        ) from None


def wants_explanation(headers: Mapping[str, str]) -> bool:
    """Whether the response should say why the request went to its replica."""
    return _is_true(headers.get(EXPLAIN_HEADER, ""))


def is_strict(headers: Mapping[str, str]) -> bool:
    """Whether a body with unknown fields should be refused."""
    return _is_true(headers.get(STRICT_HEADER, ""))


def _is_true(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes")
