"""The declaration of an endpoint whose requests run on replicas. Each endpoint's file contains one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.api.output.response_state import Writer
from app.api.prepared_request import PreparedRequest, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.requests import GenerationRequest, QueuedRequest


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint whose requests run on replicas."""

    path: str
    schema: type[QueuedRequest]
    prepare: Callable[[Any, ServedModel, RequestContext], PreparedRequest]  # checks and tokenizes a body of the schema
    writer: Callable[[Any], Writer]  # writes the response to a body of the schema
    summary: str  # the summary in the OpenAPI document
    response: type[Any]  # the `TypedDict` of the response, from which the OpenAPI document is derived
    aliases: tuple[str, ...] = ()  # other HTTP paths of the endpoint
    # Raises InvalidRequest for a body that a bulk run cannot answer with one text. None if bulk runs are unsupported.
    check_bulk: Callable[[Any], None] | None = None

    @property
    def generates(self) -> bool:
        """Whether the response contains generated text."""
        return issubclass(self.schema, GenerationRequest)
