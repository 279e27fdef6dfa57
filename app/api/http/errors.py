"""Converts errors to responses in OpenAI's and Anthropic's formats. Only this module defines status, type and code."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from app.errors import (
    BodyTooLarge,
    BodyTooSlow,
    BudgetSpent,
    Cancelled,
    CarouselError,
    DeadlineMissed,
    EngineStopped,
    InvalidRequest,
    LimitReached,
    MethodNotAllowed,
    MoneySpent,
    NotFound,
    NotPermitted,
    Overloaded,
    Quarantined,
    ReplicasLost,
    StorageFull,
    Unauthenticated,
    Unavailable,
    UnsupportedMediaType,
    traceback_of,
)

logger = logging.getLogger(__name__)

MESSAGES_PATH = "/v1/messages"  # this path and all paths below it belong to Anthropic's API
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ClientGone(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True, slots=True)
class _Kind:
    status: int
    type: str
    code: str | None


_FAILURE = _Kind(500, "server_error", "internal_error")

# The first matching class applies. An error without a matching class is `_FAILURE`.
_KINDS: tuple[tuple[type[CarouselError], _Kind], ...] = (
    (Unauthenticated, _Kind(401, "authentication_error", "invalid_api_key")),
    (NotPermitted, _Kind(403, "permission_error", "model_not_allowed")),
    (BodyTooSlow, _Kind(408, "timeout_error", "body_timeout")),
    (BodyTooLarge, _Kind(413, "invalid_request_error", "request_too_large")),
    (UnsupportedMediaType, _Kind(415, "invalid_request_error", "unsupported_media_type")),
    (MethodNotAllowed, _Kind(405, "invalid_request_error", "method_not_allowed")),
    (NotFound, _Kind(404, "invalid_request_error", "not_found")),
    (Cancelled, _Kind(400, "invalid_request_error", "request_cancelled")),
    (InvalidRequest, _Kind(400, "invalid_request_error", None)),
    (DeadlineMissed, _Kind(408, "timeout_error", "deadline_exceeded")),
    (MoneySpent, _Kind(402, "insufficient_quota", "budget_spent")),
    (BudgetSpent, _Kind(429, "insufficient_quota", "budget_spent")),
    (LimitReached, _Kind(429, "rate_limit_error", "rate_limit_exceeded")),
    (StorageFull, _Kind(429, "rate_limit_error", "storage_full")),
    (Overloaded, _Kind(429, "rate_limit_error", "overloaded")),
    (ReplicasLost, _Kind(503, "server_error", "replicas_lost")),
    (Unavailable, _Kind(503, "server_error", "unavailable")),
    (EngineStopped, _Kind(503, "server_error", "unavailable")),
)


def is_anthropic(path: str) -> bool:
    """Return whether the route at `path` belongs to Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def error_body(error: Exception, request_id: str, path: str = "") -> dict[str, Any]:
    """Return the error object in the format of the API at `path`. Without a path, the format is OpenAI's.

    The message of an internal error is not shown. Instead, a hint points to the log line with the request id.
    """
    kind = _kind_of(error)
    message = str(error)
    param = code = None
    if kind is _FAILURE:
        message = f"the server failed to process this request; see request id {request_id} in its log for the reason"
    if is_anthropic(path):
        type_ = _ANTHROPIC_TYPES.get(kind.status, "invalid_request_error")
        return {"type": "error", "error": {"type": type_, "message": message}, "request_id": request_id}
    if isinstance(error, InvalidRequest):
        param, code = error.param, error.code
    return {"error": {"message": message, "type": kind.type, "param": param, "code": code or kind.code}}


def error_status(error: Exception) -> int:
    """Return the HTTP status of an error."""
    return _kind_of(error).status


def error_response(error: Exception, request_id: str, path: str) -> Response:
    """Return the response to a request at `path` that failed before its response began."""
    client_gone_status = 499  # only the log shows this status, because the client is gone
    if isinstance(error, ClientGone):
        return Response(status_code=client_gone_status)
    return JSONResponse(
        error_body(error, request_id, path), status_code=_kind_of(error).status, headers=_headers(error)
    )


def log_error(error: Exception, request_id: str) -> None:
    """Log one line for a failed request, with a stack trace if the error is internal."""
    kind = _kind_of(error)
    if isinstance(error, ClientGone):
        logger.info("request %s: the client closed the connection", request_id)
    elif kind is _FAILURE:
        logger.error("request %s failed: %s", request_id, traceback_of(error))
    elif isinstance(error, InvalidRequest):  # the message is not logged, because it may quote the request
        code, param = error.code or kind.code, error.param
        logger.info("request %s refused with %d: code %s, param %.100r", request_id, kind.status, code, param)
    else:
        logger.info("request %s refused with %d: %.500r", request_id, kind.status, str(error))


def from_http_exception(error: HTTPException) -> CarouselError:
    """Convert an error of Starlette's router into one of `app.errors`."""
    if error.status_code == 405:
        return MethodNotAllowed("this route does not accept this HTTP method; see the Allow header for its methods")
    if error.status_code == 404:
        return NotFound("there is no such route; /openapi.json lists the routes and /v1/models the models")
    return InvalidRequest(error.detail)


def _kind_of(error: Exception) -> _Kind:
    return next((kind for error_class, kind in _KINDS if isinstance(error, error_class)), _FAILURE)


def _headers(error: Exception) -> dict[str, str]:
    if isinstance(error, DeadlineMissed | Quarantined):  # the openai package would retry a 408
        return {"x-should-retry": "false"}
    if isinstance(error, BudgetSpent):
        return {"x-should-retry": "false", "Retry-After": str(math.ceil(error.retry_after_s))}
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, BodyTooSlow):  # the server must not read the rest of the body as another request
        return {"Connection": "close"}
    if isinstance(error, Overloaded):
        return _retry_after(error.retry_after_s)
    unavailable_retry_after_s = 2.0
    if isinstance(error, Unavailable | EngineStopped):
        return _retry_after(unavailable_retry_after_s)
    return {}


def _retry_after(seconds: float) -> dict[str, str]:
    max_retry_after_s = 120.0  # the openai package does not retry when the value is larger
    seconds = min(max(seconds, 0.0), max_retry_after_s)
    return {"Retry-After": str(max(1, math.ceil(seconds))), "retry-after-ms": str(round(seconds * 1000))}
