"""An HTTP body to a typed request. Nothing a client can put there gets further than an InvalidRequest."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from app.api.http.errors import ClientGone
from app.api.schemas.parameters import UnknownFields, refuse_unavailable, refuse_unknown
from app.api.schemas.requests import ModelRequest, from_validation_error
from app.errors import BodyTooLarge, BodyTooSlow, InvalidRequest

RequestT = TypeVar("RequestT", bound=ModelRequest)

DEADLINE_HEADER = "x-carousel-deadline-s"


async def read_json_object(request: Request, *, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The body as an object.

    Raises BodyTooLarge as soon as that is certain, BodyTooSlow when it is not there in time, InvalidRequest when it is
    no object.
    """
    body = await _read(request, max_bytes=max_bytes, timeout_s=timeout_s)
    # Strict where json.loads is not: no NaN, no lone surrogates, bounded depth.
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body should be a JSON object", code="invalid_json")
    return value


async def _read(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) > 18:
        raise _too_large(declared[:18] + "...", max_bytes)
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(f"{int(declared):,}", max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(f"more than {max_bytes:,}", max_bytes)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise BodyTooSlow(
            f"the body did not arrive within {timeout_s:g} s ({len(body):,} bytes of it did); send it faster"
        ) from None
    return bytes(body)


def with_deadline(body: dict[str, Any], header: str | None) -> dict[str, Any]:
    """The body with the deadline of the `x-carousel-deadline-s` header, for those who cannot change bodies.

    A deadline in the body goes before that of the header.
    """
    if header is None or body.get("deadline_s") is not None:
        return body
    try:
        return body | {"deadline_s": float(header)}
    except ValueError:
        raise InvalidRequest(
            f"the header {DEADLINE_HEADER} should be a number of seconds; got {header[:40]!r}", param="deadline_s"
        ) from None


def parse(
    body: Mapping[str, Any], schema: type[RequestT], unknown_fields: UnknownFields, *, is_strict: bool = False
) -> RequestT:
    """The typed request. Raises InvalidRequest naming the first field at fault; `is_strict`: all unknown ones."""
    given = {name: value for name, value in body.items() if value is not None}
    refuse_unavailable(given, schema)
    if is_strict:
        refuse_unknown(given, schema)
    unknown_fields.note(given, schema)
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise from_validation_error(error) from None


def _too_large(size: str, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size} bytes; this server accepts {max_bytes:,}")
