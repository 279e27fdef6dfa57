"""What the table of endpoints says of each of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from app.api.call import Call, ServedModel
from app.api.output.completion_writers import Writer
from app.api.schemas.requests import QueuedRequest
from app.config import ApiConfig


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that computes on replicas."""

    path: str
    schema: type[QueuedRequest]
    prepare: Callable[[Any, ServedModel, ApiConfig], Awaitable[Call]]  # checks and tokenizes a body of the schema
    writer: Callable[[Any], Writer]  # writes the response to a body of the schema
