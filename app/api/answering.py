"""A request that comes as a line of a batch: the same use case and answers as over HTTP, in the lowest class."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.api.body import parse
from app.api.choices import generate_pieces
from app.api.completions import Call, ServedModel, by_any_name, model_named, prepare_chat, prepare_completion
from app.api.errors import error_body, error_status, log_error
from app.api.parameters import UnknownFields
from app.api.responses import ChatFormat, CompletionFormat, Format, Progress, whole_response
from app.api.schemas import ChatRequest, CompletionRequest, GenerationRequest
from app.batches import Answered
from app.config import ApiConfig
from app.engine.request import MAX_PRIORITY
from app.errors import CarouselError, DeadlineMissed, EngineStopped, Overloaded, Unavailable
from app.metrics import NO_MODEL, RequestMetrics


@dataclass(frozen=True, slots=True)
class _Endpoint:
    schema: type[GenerationRequest]
    prepare: Callable[[Any, ServedModel, ApiConfig], Awaitable[Call]]
    form: Format


_ENDPOINTS = {
    "/v1/chat/completions": _Endpoint(ChatRequest, prepare_chat, ChatFormat()),
    "/v1/completions": _Endpoint(CompletionRequest, prepare_completion, CompletionFormat()),
}
BATCH_ENDPOINTS = tuple(_ENDPOINTS)


class Answering:
    """Answers lines from the served models: `answer` is the seam that `app.batches` asks for."""

    def __init__(self, models: Sequence[ServedModel], limits: ApiConfig, metrics: RequestMetrics) -> None:
        """`metrics` measures lines as it does requests; it knows the models."""
        self._models = by_any_name(models)
        self._limits = limits
        self._metrics = metrics
        self._unknown_fields = UnknownFields()

    async def answer(self, owner: str, endpoint: str, body: Mapping[str, Any]) -> Answered:
        """What an HTTP client would have got for this body at this endpoint, one of BATCH_ENDPOINTS.

        An owner with a name is the tenant, whatever the body says of its `user`.

        Raises Overloaded, Unavailable or EngineStopped when nobody can serve it now.
        """
        request_id = uuid.uuid4().hex
        try:
            return Answered(200, await self._response(_ENDPOINTS[endpoint], {**body, **_class_of(owner)}, request_id))
        except Exception as error:
            if isinstance(error, Overloaded | Unavailable | EngineStopped) and not isinstance(error, DeadlineMissed):
                raise
            log_error(error, request_id)
            return Answered(error_status(error), error_body(error, request_id))

    async def _response(self, endpoint: _Endpoint, body: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        arrived_at = self._metrics.arrived()
        call = await self._call(endpoint, body)
        progress = Progress.measured(call, request_id, self._metrics, arrived_at=arrived_at)
        return await whole_response(progress, generate_pieces(call), endpoint.form)

    async def _call(self, endpoint: _Endpoint, body: Mapping[str, Any]) -> Call:
        model_name = NO_MODEL
        try:
            parsed = parse(body, endpoint.schema, self._unknown_fields)
            model = model_named(parsed.model, self._models)
            model_name = model.name
            return await endpoint.prepare(parsed, model, self._limits)
        except CarouselError as error:
            self._metrics.model(model_name).refused(error)
            raise


def _class_of(owner: str) -> dict[str, Any]:
    """The fields that a line does not choose."""
    lowest: dict[str, Any] = {"priority": MAX_PRIORITY, "service_tier": "flex"}
    return lowest | {"user": owner} if owner else lowest
