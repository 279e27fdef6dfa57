"""An HTTP body as a JSON object. Every mistake in it raises InvalidRequest here."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from app.api.auth.limits import Reservation
from app.api.http.errors import ClientGone
from app.api.http.guard import reservation_of
from app.api.json_structure import check_structure
from app.api.prepared_request import RequestLimits
from app.api.request_context import headers_of
from app.api.threads import MAX_SMALL_SIZE, BodyThreads
from app.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, UnsupportedMediaType

PATIENCE_S = 10.0
MIN_BYTES_PER_S = 16 * 1024  # after that: no client holds a connection and what it has sent for next to nothing


async def read_json_object(
    request: Request, limits: RequestLimits, threads: BodyThreads | None = None
) -> dict[str, Any]:
    """The body as an object. `threads` parse what is large; without them it is parsed here.

    Raises UnsupportedMediaType when it is not declared as JSON, BodyTooLarge as soon as that is certain, BodyTooSlow
    when it is not there in time, InvalidRequest when it is no object or has too many values, LimitReached when too many
    bytes of bodies are in memory.
    """
    declared = headers_of(request.scope).get("content-type", "")
    json_media_type = "application/json"
    # A page may send what a form can declare, or nothing, to any address unasked.
    if declared.partition(";")[0].strip().lower() != json_media_type:
        raise UnsupportedMediaType(
            f"the body should be declared as JSON: send the header `Content-Type: {json_media_type}` "
            f"(got {declared[:100]!r})"
        )
    reservation = reservation_of(request)
    body = await _read(request, reservation, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s)
    if threads is None or len(body) <= MAX_SMALL_SIZE:
        return _object_of(body)

    def read() -> dict[str, Any]:
        check_structure([body], "the body")
        return _object_of(body)

    return await threads.read(reservation.account.name, len(body), read)


def _object_of(body: bytes | bytearray) -> dict[str, Any]:
    # Strict where json.loads is not: no NaN, no lone surrogates, bounded depth.
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body should be a JSON object", code="invalid_json")
    return value


async def _read(request: Request, reservation: Reservation, *, max_bytes: int, timeout_s: float) -> bytearray:
    declared = headers_of(request.scope).get("content-length", "")
    if declared.isdecimal() and len(declared) > 18:
        raise _too_large(declared[:18] + "...", max_bytes)
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(f"{int(declared):,}", max_bytes)
    body, loop = bytearray(), asyncio.get_running_loop()
    began_at, allowed_s, num_allowed_for = loop.time(), min(timeout_s, PATIENCE_S), 0
    try:
        async with asyncio.timeout(allowed_s) as timeout:
            async for chunk in request.stream():
                if not chunk:  # the last one
                    continue
                if len(body) + len(chunk) > max_bytes:
                    raise _too_large(f"more than {max_bytes:,}", max_bytes)
                reservation.hold_body(len(chunk))
                body += chunk
                if len(body) - num_allowed_for >= MIN_BYTES_PER_S:
                    num_allowed_for = len(body)
                    allowed_s = min(timeout_s, PATIENCE_S + num_allowed_for / MIN_BYTES_PER_S)
                    timeout.reschedule(began_at + allowed_s)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise BodyTooSlow(
            f"the body did not arrive within {allowed_s:.3g} s ({len(body):,} bytes of it did); send it faster: at "
            f"least {MIN_BYTES_PER_S:,} bytes a second after the first {PATIENCE_S:g} s, all of it in {timeout_s:g} s"
        ) from None
    return body


def _too_large(size: str, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size} bytes; this server accepts {max_bytes:,}")
