"""The sender of a request, as far as its handling needs to know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.api.auth.limits import Reservation
from app.api.request_trace import RequestTrace


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """The account that pays for a request, and what came with its body."""

    reservation: Reservation
    request_id: str
    has_own_id: bool = True  # else `request_id` of the body replaces the id
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    is_strict: bool = False  # unknown fields are refused
    num_bodies: int = 1  # that are answered together, and share what one answer may have
    arrived_at: float | None = None  # by the clock of the metrics; None: now
    trace: RequestTrace | None = None  # where traces are sent
