"""/v1/batches: create, list, get, cancel."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.endpoints.files import ExpiresAfter, page_of
from app.api.endpoints.table import ENDPOINTS
from app.api.http.body import read_json_object
from app.api.http.guard import owner_of
from app.api.http.operations import GENERATION_REFUSALS, LIST_REFUSALS, Operation, RouteGroup, page_query
from app.api.prepared_request import RequestLimits
from app.api.request_context import is_header_set
from app.api.schemas.fields import MAX_ID_LENGTH, Metadata, Schema
from app.api.schemas.parameters import STRICT_HEADER, ignored_fields, ignored_header, refuse_unknown
from app.batches import BatchService, NewBatch
from app.webhooks.receiver import WebhookReceiver

MAX_URL_LENGTH, MAX_SECRET_LENGTH = 2048, 256
MAX_BATCHES_OF_PAGE = 100
_BODY_LIMITS = RequestLimits(max_body_bytes=64 * 1024, body_timeout_s=60)


def _text(value: Any) -> Any:
    if not isinstance(value, str) or len(value) > MAX_SECRET_LENGTH:  # the error must not repeat a secret
        raise ValueError(f"should be a string of at most {MAX_SECRET_LENGTH} characters")
    return value


class WebhookRequest(Schema):
    """The receiver of the message that is sent when the batch ends. The secret signs it (Standard Webhooks)."""

    url: str = Field(min_length=1, max_length=MAX_URL_LENGTH)
    secret: Annotated[str, BeforeValidator(_text)] = Field(repr=False)

    def as_receiver(self) -> WebhookReceiver:
        return WebhookReceiver(url=self.url, secret=self.secret)


class BatchRequest(Schema):
    """The body of POST /v1/batches."""

    input_file_id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
    endpoint: str = Field(json_schema_extra={"enum": list(ENDPOINTS)})
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    webhook: WebhookRequest | None = None  # not in OpenAI's API, where webhooks belong to a project

    @field_validator("endpoint")
    @classmethod
    def _endpoint_is_served(cls, endpoint: str) -> str:
        if endpoint not in ENDPOINTS:
            raise ValueError(f"should be one of {', '.join(ENDPOINTS)}")
        return endpoint


class BatchRoutes(RouteGroup):
    """The routes of `/v1/batches`, which call the service that stores batches."""

    def __init__(self, service: BatchService) -> None:
        self._service = service

    @Operation("post", "/v1/batches", "Create a batch from a file", "Batch", GENERATION_REFUSALS, (BatchRequest,))
    async def create(self, request: Request) -> Response:
        body = await read_json_object(request, _BODY_LIMITS)
        if is_header_set(request.headers, STRICT_HEADER):
            refuse_unknown(body, BatchRequest)
        asked = BatchRequest.checked(body)
        expires_after = asked.output_expires_after
        new = NewBatch(
            owner=owner_of(request),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            metadata=asked.metadata,
            output_expires_after_s=None if expires_after is None else expires_after.seconds,
            webhook=None if asked.webhook is None else asked.webhook.as_receiver(),
        )
        return JSONResponse(await self._service.create_batch(new), headers=ignored_header(ignored_fields(body, asked)))

    @Operation("get", "/v1/batches", "The batches", "BatchList", LIST_REFUSALS, query=page_query(MAX_BATCHES_OF_PAGE))
    async def list(self, request: Request) -> Response:
        """List a page of batches, the newest first."""
        page = page_of(owner_of(request), request.query_params, max_limit=MAX_BATCHES_OF_PAGE, default_limit=20)
        return JSONResponse(await self._service.batches(page))

    @Operation("get", "/v1/batches/{batch_id}", "One batch", "Batch", LIST_REFUSALS)
    async def retrieve(self, request: Request) -> Response:
        return JSONResponse(await self._service.batch(owner_of(request), request.path_params["batch_id"]))

    @Operation("post", "/v1/batches/{batch_id}/cancel", "Cancel a batch", "Batch", LIST_REFUSALS)
    async def cancel(self, request: Request) -> Response:
        return JSONResponse(await self._service.cancel_batch(owner_of(request), request.path_params["batch_id"]))
