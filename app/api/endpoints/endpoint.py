"""What the table of endpoints says of each of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from app.api.call import Call, ServedModel
from app.api.output.completion_writers import Writer
from app.api.request_limits import RequestLimits
from app.api.schemas.requests import QueuedRequest


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that computes on replicas."""

    path: str
    schema: type[QueuedRequest]
    prepare: Callable[[Any, ServedModel, RequestLimits], Awaitable[Call]]  # checks and tokenizes a body of the schema
    writer: Callable[[Any], Writer]  # writes the response to a body of the schema
