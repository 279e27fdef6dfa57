"""What a call's headers say about where it would like to go. Bodies say what is wanted, headers where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from app.api.endpoints.completions import Call
from app.api.schemas.parameters import STRICT_HEADER
from app.engine.request import MAX_SESSION_LENGTH
from app.errors import InvalidRequest

EXPLAIN_HEADER = "x-carousel-explain"


def with_hints(call: Call, headers: Mapping[str, str]) -> Call:
    """The call with the group and the session that its headers name, by the header names of its model.

    Raises InvalidRequest for what cannot be a session. Whether there is such a group is known where groups are.
    """
    model = call.model
    group = headers.get(model.group_header, "")
    session = "" if model.session_header is None else headers.get(model.session_header, "")
    if len(session) > MAX_SESSION_LENGTH:
        raise InvalidRequest(
            f"the header {model.session_header} has {len(session):,} characters; at most {MAX_SESSION_LENGTH} are "
            f"accepted",
            param=model.session_header,
        )
    if not group and not session:
        return call
    return replace(call, requests=tuple(replace(each, group=group, session=session) for each in call.requests))


def wants_explanation(headers: Mapping[str, str]) -> bool:
    """Whether the caller asks why its request went where it did."""
    return _says_yes(headers.get(EXPLAIN_HEADER, ""))


def is_strict(headers: Mapping[str, str]) -> bool:
    """Whether the caller wants to be refused for fields that have no effect here."""
    return _says_yes(headers.get(STRICT_HEADER, ""))


def _says_yes(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes")
