"""The context of one request: the account that pays for it, its ids, and what its headers ask for.

It is made before the body is read, so that an engine's request is built once, with all that belongs in it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from starlette.types import Scope

from app.api.auth.limits import Reservation
from app.api.prepared_request import PreparedRequest, RequestLimits, ServedModel, SharedFields
from app.api.request_trace import RequestTrace
from app.api.schemas.requests import QueuedRequest
from app.engine.request import MAX_SESSION_LENGTH
from app.errors import InvalidRequest

GROUP_HEADER = "x-carousel-group"
PRESET_HEADER = "x-carousel-preset"
EXPLAIN_HEADER = "x-carousel-explain"
TIMINGS_HEADER = "x-carousel-timings"


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    """The account of a request, and what came with its body."""

    reservation: Reservation
    request_id: str
    has_own_id: bool = True  # else `request_id` of the body replaces the id
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # names in lower case
    is_strict: bool = False  # unknown fields are refused
    limits: RequestLimits = field(default_factory=RequestLimits)
    shares_prefixes: bool = True  # with requests of other accounts
    arrived_at: float = 0.0  # by the clock of the metrics
    trace: RequestTrace | None = None  # where traces are sent
    may_keep: bool = False  # responses are kept here, and this request may ask for it
    kept_as: tuple[str, int] | None = None  # of a response that is kept: its id, and when it was created
    shared: Mapping[str, SharedFields] = field(default_factory=dict)  # by model: what is known of its body already
    begun: list[PreparedRequest] = field(default_factory=list)  # all that it computes, from its beginning

    def response_id(self, prefix: str) -> str:
        """An id that begins with that of the request, after a prefix.

        So what the client knows finds its entries in the step log and the lines of an engine. A client may send one id
        many times, and an engine accepts each once; every token of a request carries its id, so it must not be long.
        """
        return f"{prefix}{self.request_id[:64]}-{secrets.token_hex(4)}"

    def request_fields(self, body: QueuedRequest, model: ServedModel) -> dict[str, Any]:
        """The fields of an engine's request that say for which tenant it is, and where and when it runs.

        The name of the account is the tenant, whatever the body says of its `user`, and part of the session; where
        prefixes are not shared, of the cache salt too. A request that names no deadline has the model's; a background
        request has all the time there is. Raises InvalidRequest for a session that is too long and a priority below the
        key's own. Whether there is such a group, or one with such a preset, is checked where groups are known.
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
        if name:  # no name has a line end, so no two keys can agree on a salt or a session
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
            "no_queue": asks_for(headers, no_queue_header),
            "adapter": model.adapter,
        }


def headers_of(scope: Scope) -> Mapping[str, str]:
    """The headers of a request by their names in lower case; of those that come twice, the first."""
    headers: dict[str, str] | None = scope["state"].get("headers")
    if headers is None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        scope["state"]["headers"] = headers
    return headers


def with_deadline(body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """The body with the deadline of the header, for clients that cannot change bodies.

    A deadline in the body goes before that of the header.
    """
    deadline_header = "x-carousel-deadline-s"
    header = headers.get(deadline_header)
    if header is None or body.get("deadline_s") is not None:
        return body
    try:
        return body | {"deadline_s": float(header)}
    except ValueError:
        raise InvalidRequest(
            f"the header {deadline_header} should be a number of seconds; got {header[:40]!r}", param="deadline_s"
        ) from None


def asks_for(headers: Mapping[str, str], name: str) -> bool:
    """Whether the header of this name is sent and switches something on."""
    value = headers.get(name)
    return value is not None and value.strip().lower() in ("1", "true", "yes")
