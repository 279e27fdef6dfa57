"""Reads an HTTP body as a JSON object. Every mistake in the body raises InvalidRequest or one of its subclasses."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from app.api.auth.limits import Reservation
from app.api.http.errors import ClientGone
from app.api.http.guard import reservation_of
from app.api.json_structure import check_structure
from app.api.prepared_request import RequestLimits
from app.api.threads import MAX_SIZE_ON_THE_LOOP, MAX_SMALL_SIZE, BodyThreads
from app.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, UnsupportedMediaType
from app.json_input import read_json

_ENCODINGS = ("gzip", "deflate")
PATIENCE_S = 10.0
MIN_BYTES_PER_S = 16 * 1024  # after PATIENCE_S, so that a slow client cannot hold a connection and memory for long


async def read_json_object(
    request: Request, limits: RequestLimits, threads: BodyThreads | None = None
) -> dict[str, Any]:
    """Return the body as an object, decompressed if needed. `threads`, if given, parse large bodies.

    Raises UnsupportedMediaType if the body is not declared as JSON or has an unknown encoding, BodyTooLarge as soon as
    its size is known, BodyTooSlow if it does not arrive in time, InvalidRequest if it is not a JSON object or contains
    too many values, and LimitReached if the client's bodies occupy too much memory.
    """
    headers: Mapping[str, str] = request.scope["state"]["headers"]
    declared, encoding = headers.get("content-type", ""), headers.get("content-encoding", "").strip().lower()
    json_media_type = "application/json"
    # Web pages may send form content types, or none, to any address. Browsers send a CORS preflight before JSON.
    if declared.partition(";")[0].strip().lower() != json_media_type:
        raise UnsupportedMediaType(
            f"the body should be declared as JSON: send the header `Content-Type: {json_media_type}` "
            f"(got {declared[:100]!r})"
        )
    if encoding:
        check_encoding(encoding, _ENCODINGS)
    reservation = reservation_of(request)
    max_bytes, length = limits.max_body_bytes, headers.get("content-length", "")
    body: bytes | bytearray = await _read(
        request, reservation, length, max_bytes=max_bytes, timeout_s=limits.body_timeout_s
    )
    if encoding in _ENCODINGS:
        unpack = partial(_unpacked, body, encoding, max_bytes)
        tenant = reservation.account.name
        body = unpack() if threads is None else await threads.encode(tenant, len(body), unpack)
        reservation.hold_body(len(body))
    try:
        if threads is None or len(body) <= MAX_SMALL_SIZE:
            value = read_json(body)
        else:
            value = await threads.read(reservation.account.name, len(body), partial(_read_large, body))
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body should be a JSON object", code="invalid_json")
    return value


def check_encoding(encoding: str, accepted: Sequence[str] = ()) -> None:
    """Raise UnsupportedMediaType if the body is compressed with an encoding that is not in `accepted`."""
    if encoding not in ("", "identity", *accepted):
        ways = f" or with {' or '.join(accepted)}" if accepted else ""
        raise UnsupportedMediaType(f"the body has the Content-Encoding {encoding[:40]!r}; send it without one{ways}")


def _unpacked(packed: bytes | bytearray, encoding: str, max_bytes: int) -> bytes:
    """Return the decompressed body. Raises BodyTooLarge and InvalidRequest."""
    # Some clients leave out the zlib header that deflate should have (RFC 9110, section 8.4.1.2).
    is_bare = encoding == "deflate" and packed[:1] and packed[0] & 0x0F != zlib.DEFLATED
    find_header = zlib.MAX_WBITS | 32
    unpacking = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else find_header)
    try:
        body = unpacking.decompress(packed, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not valid {encoding}: {error}", code="invalid_json") from None
    if len(body) > max_bytes:
        raise _too_large(f"more than {max_bytes:,}", max_bytes, " after decompression")
    if not unpacking.eof or unpacking.unused_data:
        wrong = "has data after its end" if unpacking.eof else "ends too early"
        raise InvalidRequest(f"the body is not valid {encoding}: it {wrong}", code="invalid_json")
    return body


def _read_large(body: bytes | bytearray) -> Any:
    check_structure([body], "the body")
    return read_json(body)


async def _read(
    request: Request, reservation: Reservation, declared: str, *, max_bytes: int, timeout_s: float
) -> bytearray:
    if declared.isdecimal() and len(declared) > 18:
        raise _too_large(declared[:18] + "...", max_bytes)
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(f"{int(declared):,}", max_bytes)
    body, loop = bytearray(), asyncio.get_running_loop()
    began_at, allowed_s, num_allowed_for = loop.time(), min(timeout_s, PATIENCE_S), 0
    try:
        async with asyncio.timeout(allowed_s) as timeout:
            has_more = True
            while has_more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk, has_more = message.get("body", b""), message.get("more_body", False)
                if not chunk:
                    continue
                if len(body) + len(chunk) > max_bytes:
                    raise _too_large(f"more than {max_bytes:,}", max_bytes)
                if body or has_more or len(chunk) > MAX_SIZE_ON_THE_LOOP:  # a small complete body is parsed immediately
                    reservation.hold_body(len(chunk))
                body += chunk
                if len(body) - num_allowed_for >= MIN_BYTES_PER_S:
                    num_allowed_for = len(body)
                    allowed_s = min(timeout_s, PATIENCE_S + num_allowed_for / MIN_BYTES_PER_S)
                    timeout.reschedule(began_at + allowed_s)
    except TimeoutError:
        raise BodyTooSlow(
            f"only {len(body):,} bytes of the body arrived within {allowed_s:.3g} s; send at least "
            f"{MIN_BYTES_PER_S:,} bytes a second after the first {PATIENCE_S:g} s, and all of it within {timeout_s:g} s"
        ) from None
    return body


def _too_large(size: str, max_bytes: int, when: str = "") -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size} bytes{when}; this server accepts at most {max_bytes:,}")
