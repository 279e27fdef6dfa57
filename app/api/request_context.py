"""The context of one request: the account that pays for the request, the request's ids, and its headers.

The context is created before the body is read, so engine requests can be built with all of their fields.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from app.api.auth.limits import Reservation
from app.api.prepared_request import PreparedRequest, RequestLimits, ServedModel, SharedFields
from app.api.request_trace import RequestTrace
from app.api.schemas.requests import QueuedRequest
from app.engine.request import MAX_SESSION_LENGTH
from app.errors import InvalidRequest

DEADLINE_HEADER = "x-carousel-deadline-s"
GROUP_HEADER = "x-carousel-group"
PRESET_HEADER = "x-carousel-preset"
EXPLAIN_HEADER = "x-carousel-explain"
TIMINGS_HEADER = "x-carousel-timings"


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    """A request's account, and everything about the request except its body."""

    reservation: Reservation
    request_id: str
    has_own_id: bool = True  # if false, `request_id` in the body replaces the id
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # names in lower case
    is_strict: bool = False  # unknown fields are refused
    limits: RequestLimits = field(default_factory=RequestLimits)
    shares_prefixes: bool = True  # cached prefixes are shared with other accounts
    arrived_at: float = 0.0  # on the metrics' clock
    trace: RequestTrace | None = None  # None if requests are not traced
    may_store: bool = False  # the service stores responses, and this request may ask to be stored
    stored_as: tuple[str, int] | None = None  # the id and creation time of a response that is stored
    shared: Mapping[str, SharedFields] = field(default_factory=dict)  # fields that were already checked, by model
    begun: list[PreparedRequest] = field(default_factory=list)  # all generations that the request has started

    def response_id(self, prefix: str) -> str:
        """Return a new id: the prefix, up to 64 characters of the request's id, and a random suffix.

        The request's id lets a client find its entries in the step log and in an engine's log. The suffix makes the id
        unique: clients may repeat an id, but an engine accepts each id once. Ids are short: every token carries one.
        """
        return f"{prefix}{self.request_id[:64]}-{secrets.token_hex(4)}"

    def request_fields(self, body: QueuedRequest, model: ServedModel) -> dict[str, Any]:
        """Return the fields of an engine request that set its tenant and decide where and when it runs.

        The account's name becomes the tenant, regardless of `user` in the body, and part of the session. The name is
        also part of the cache salt if accounts share no prefixes. A request without a deadline receives the model's
        deadline, unless it is a background request. The fleet checks the group and the preset later. Raises
        InvalidRequest for a session that is too long and for a priority that the key may not use.
        """
        headers, account = self.headers, self.reservation.account
        if account.key is not None:
            account.check_priority(body.priority)
        name = account.name
        session_header = "x-carousel-session"
        salt, session = body.cache_salt, headers.get(session_header, "")
        if len(session) > MAX_SESSION_LENGTH:
            raise InvalidRequest(
                f"the header {session_header} has {len(session):,} characters; at most {MAX_SESSION_LENGTH} are "
                f"accepted",
                param=session_header,
            )
        if name:  # a name contains no line break, so two keys never have the same salt or session
            salt = salt if self.shares_prefixes else f"{name}\n{salt}"
            session = session and f"{name}\n{session}"
        is_background = body.service_tier == "flex"
        default_s = None if is_background else model.deadline_s
        no_queue_header = "x-carousel-no-queue"
        return {
            "cache_salt": salt,
            "priority": body.priority,
            "tenant": name or body.user,
            "deadline_s": default_s if body.deadline_s is None else body.deadline_s,
            "is_background": is_background,
            "group": headers.get(GROUP_HEADER, ""),
            "preset": headers.get(PRESET_HEADER, ""),
            "session": session,
            "no_queue": is_header_set(headers, no_queue_header),
            "adapter": model.adapter,
        }


def with_deadline(body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the body with the deadline from the header, for clients that can set headers but not body fields.

    A deadline in the body takes precedence over the header. Raises InvalidRequest if the header is not a number.
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


def is_header_set(headers: Mapping[str, str], name: str) -> bool:
    """Return whether the request has the header with this name, with the value 1, true or yes."""
    value = headers.get(name)
    return value is not None and value.strip().lower() in ("1", "true", "yes")
