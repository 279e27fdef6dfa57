"""Reads a multipart/form-data upload in pieces with bounded memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from app.api.http.body import check_encoding
from app.api.http.errors import ClientGone
from app.batches import PIECE_BYTES
from app.errors import BodyTooLarge, BodyTooSlow, InvalidRequest

FILE_FIELD = "file"
MAX_PARTS = 16
SILENCE_TIMEOUT_S = 60.0
MIN_BYTES_PER_S = 64 * 1024  # required after the first minute, because an upload occupies one of few slots

Sink = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Form:
    """The file name and the other fields of a form."""

    filename: str
    fields: dict[str, str]


async def read_form(request: Request, *, max_file_bytes: int, sink: Sink) -> Form:
    """Read a form with one file and pass the file's content to `sink`.

    Raises InvalidRequest if the body is not such a form or is incomplete, UnsupportedMediaType if it is compressed,
    BodyTooLarge, BodyTooSlow, and any error that `sink` raises.
    """
    check_encoding(request.headers.get("content-encoding", ""))
    reader = _Reader()
    parser = reader.parser(_boundary(request.headers.get("content-type", "")))
    overhead_bytes = 256 * 1024  # for boundaries, headers and the fields besides the file
    async for piece in _pieces(request, max_file_bytes + overhead_bytes):
        reader.read(piece, parser)
        if len(reader.content) >= PIECE_BYTES:
            await sink(reader.take_content())
        await asyncio.sleep(0)
    if reader.content:
        await sink(reader.take_content())
    return reader.form()


async def _pieces(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    num_bytes, waited_s = 0, 0.0  # `waited_s` excludes the time that the server takes to store pieces
    chunks = request.stream()
    parsed_at_once = 64 * 1024  # bytes; the event loop serves other requests after each of these pieces
    while True:
        began_at = time.monotonic()
        left_s = SILENCE_TIMEOUT_S + num_bytes / MIN_BYTES_PER_S - waited_s
        chunk = await _next(chunks, min(left_s, SILENCE_TIMEOUT_S), num_bytes)
        waited_s += time.monotonic() - began_at
        if chunk is None:
            return
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        for start in range(0, len(chunk), parsed_at_once):
            yield chunk[start : start + parsed_at_once]


async def _next(chunks: AsyncIterator[bytes], timeout_s: float, num_bytes: int) -> bytes | None:
    """Return the next piece of the body, or None at its end. `num_bytes` have arrived before this piece."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(chunks, None)
    except TimeoutError:
        raise BodyTooSlow(
            f"the upload is too slow: only {num_bytes:,} bytes arrived; it may pause for {SILENCE_TIMEOUT_S:g} s, and "
            f"after {SILENCE_TIMEOUT_S:g} s it must send {MIN_BYTES_PER_S:,} bytes a second; send the file again faster"
        ) from None
    except ClientDisconnect:
        raise ClientGone from None


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the upload has more than {max_bytes:,} bytes, the limit for a file and its form; send less")


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type[:1024])
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise InvalidRequest("the body should be multipart/form-data with a boundary", code="invalid_form")
    return options[b"boundary"]


@dataclass(slots=True)
class _Part:
    """The part of the form that is being read."""

    header_name: bytearray = field(default_factory=bytearray)
    header_value: bytearray = field(default_factory=bytearray)
    disposition: str = ""
    name: str = ""
    value: bytearray = field(default_factory=bytearray)


class _Reader:
    """Collects the form from a parser's callbacks. `content` holds the file's bytes since the last `take_content`."""

    def __init__(self) -> None:
        self.content = bytearray()
        self._filename: str | None = None
        self._fields: dict[str, str] = {}
        self._part = _Part()
        self._num_parts = 0
        self._has_ended = False

    def read(self, data: bytes, parser: MultipartParser) -> None:
        """Parse a piece of the body. Raises InvalidRequest."""
        if self._has_ended:
            return  # ignore bytes after the last boundary
        try:
            parser.write(data)
        except FormParserError as error:
            raise _invalid(str(error)) from None

    def parser(self, boundary: bytes) -> MultipartParser:
        """Return a parser that calls this reader. The reader does not store the parser, to avoid a reference cycle."""
        try:
            return MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._part.header_name.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._part.header_value.extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._add,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _invalid(str(error)) from None

    def take_content(self) -> bytes:
        """Return and clear the file's content since the last call."""
        content = bytes(self.content)
        self.content.clear()
        return content

    def form(self) -> Form:
        """Return the complete form. Raises InvalidRequest if its end or its file is missing."""
        if not self._has_ended:
            raise _invalid("it ends before its last boundary")
        if self._filename is None:
            raise InvalidRequest("the form has no file; send it as the part `file`, with a filename", param=FILE_FIELD)
        return Form(filename=self._filename, fields=self._fields)

    def _begin_part(self) -> None:
        self._part = _Part()
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")

    def _end_header(self) -> None:
        part = self._part
        if bytes(part.header_name).lower() == b"content-disposition":
            part.disposition = part.header_value.decode("utf-8", "replace")
        part.header_name.clear()
        part.header_value.clear()

    def _end_headers(self) -> None:
        # The parser treats these bytes as latin-1. Encoding them as latin-1 again restores the client's UTF-8.
        _, options = parse_options_header(self._part.disposition.encode("utf-8").decode("latin-1"))
        name = options.get(b"name", b"")
        max_name_bytes = 128
        if not 0 < len(name) <= max_name_bytes:
            raise _invalid(f"it has a part without a name of 1 to {max_name_bytes} bytes")
        self._part.name = name.decode("utf-8", "replace")
        if self._part.name in self._fields or (self._is_file and self._filename is not None):
            raise _invalid(f"it has two parts named {self._part.name!r}")
        if self._is_file:
            if b"filename" not in options:
                raise InvalidRequest("the part `file` has no filename; send it as a file", param=FILE_FIELD)
            self._filename = options[b"filename"].decode("utf-8", "replace")

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.content += data[start:end]
            return
        self._part.value += data[start:end]
        max_field_bytes = 4096
        if len(self._part.value) > max_field_bytes:
            raise _invalid(f"its field {self._part.name!r} has more than {max_field_bytes:,} bytes")

    def _end_part(self) -> None:
        if not self._is_file:
            self._fields[self._part.name] = self._part.value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._has_ended = True

    @property
    def _is_file(self) -> bool:
        return self._part.name == FILE_FIELD


def _invalid(why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid multipart/form-data: {why}", code="invalid_form")
