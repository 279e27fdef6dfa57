"""One HTTP/1.1 request on a new connection; a reader gets the response as the response arrives.

Uses only asyncio's protocols: a client that measures streams must be cheap and must run without installed packages.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol
from urllib.parse import urlsplit

from benchmarks.harness.command import BenchmarkError

_HEAD_END = b"\r\n\r\n"


class CutOff(OSError):
    """The server closed the connection before the end of the answer, or the answer is not HTTP/1.1."""


class Reader(Protocol):
    """Receives a response, and the arrival time of each part of its body."""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Receive the status and the headers, by their names in lower case."""

    def body(self, data: bytes, *, at_s: float) -> None:
        """Receive the next bytes of the body, without the transfer coding."""


class EventStream:
    """Parses server-sent events from pieces of bytes of any size."""

    def __init__(self) -> None:
        self.last_id = ""  # id of the last complete event
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data lines of newly completed events, without comments and event names."""
        if b"\r" in data:  # some servers end lines with CR LF, and JSON contains no CR
            data = data.replace(b"\r", b"")
        *events, self._held = (self._held + data).split(b"\n\n")
        lines = [line for event in events for line in event.split(b"\n")]
        for line in lines:
            if line.startswith(b"id:"):
                self.last_id = line[3:].strip().decode()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server with an OpenAI API."""

    host: str
    port: int
    is_encrypted: bool
    path: str  # before `/completions`

    @classmethod
    def parse(cls, base_url: str) -> Target:
        """Parse a URL like `http://127.0.0.1:8000`, with or without `/v1`. Raises BenchmarkError for other texts."""
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise BenchmarkError(f"--base-url {base_url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchmarkError(f"--base-url {base_url}: write it as http://HOST:PORT")
        path = parts.path.rstrip("/")
        is_encrypted = parts.scheme == "https"
        return cls(
            parts.hostname, port or (443 if is_encrypted else 80), is_encrypted,
            path if path.endswith("/v1") else f"{path}/v1",
        )  # fmt: skip

    def url(self, path: str) -> str:
        """Return the URL of a path outside the API, for example `/metrics`."""
        scheme = "https" if self.is_encrypted else "http"
        return f"{scheme}://{self.host}:{self.port}{self.path.removesuffix('/v1')}{path}"

    def request(
        self, endpoint: str, body: object, headers: Mapping[str, str] = MappingProxyType({}), *, method: str = "POST"
    ) -> bytes:
        """Return the bytes of a request to an endpoint such as `completions`. Bodies other than bytes become JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Host": f"{self.host}:{self.port}", "Content-Type": "application/json", "Connection": "close"}
        lines = [f"{name}: {value}\r\n" for name, value in (given | {"Content-Length": len(data), **headers}).items()]
        return f"{method} {self.path}/{endpoint} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + data


async def call(target: Target, request: bytes, reader: Reader) -> None:
    """Send a request on a new connection, as a new client does; return at the end of the answer.

    Raises:
        OSError: the connection failed, or ended before the answer (CutOff).
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    transport, _ = await loop.create_connection(
        lambda: _Exchange(request, reader, ended), target.host, target.port, ssl=target.is_encrypted or None
    )
    try:
        await ended
    finally:
        transport.close()


class _Exchange(asyncio.Protocol):
    """One connection: sends the request and finds the end of the answer."""

    def __init__(self, request: bytes, reader: Reader, ended: asyncio.Future[None]) -> None:
        self._request = request
        self._reader = reader
        self._ended = ended
        self._head = b""
        self._framing: _Framing | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport), "a stream can be written to"
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        at_s = time.perf_counter()
        try:
            self._receive(data, at_s)
        except (ValueError, IndexError) as error:
            self._end(CutOff(f"the answer is not HTTP/1.1: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._framing is not None and self._framing.ends_with_connection and exc is None:
            self._end(None)
        self._end(CutOff(str(exc or "the server closed the connection before the answer was complete")))

    def _receive(self, data: bytes, at_s: float) -> None:
        if self._framing is None:
            self._head += data
            head, found, data = self._head.partition(_HEAD_END)
            if not found:
                return
            status, headers = _parse_head(head)
            self._framing = _Framing.of(headers)
            self._reader.head(status, headers)
        content = self._framing.feed(data)
        if content:
            self._reader.body(content, at_s=at_s)
        if self._framing.is_done:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


class _Framing:
    """Finds the end of a body: after a given length, at the end of the connection, or at an empty chunk."""

    def __init__(self, num_left: int | None) -> None:
        self._num_left = num_left
        self.is_done = num_left == 0

    @property
    def ends_with_connection(self) -> bool:
        return self._num_left is None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> _Framing:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return _Chunks()
        length = headers.get("content-length")
        return cls(None if length is None else int(length))

    def feed(self, data: bytes) -> bytes:
        if self._num_left is None:
            return data
        content = data[: self._num_left]
        self._num_left -= len(content)
        self.is_done = self._num_left == 0
        return content


class _Chunks(_Framing):
    """The chunked transfer coding (RFC 9112, 7.1). Trailers are not read."""

    def __init__(self) -> None:
        super().__init__(0)
        self.is_done = False
        self._held = b""
        self._in_chunk = 0  # bytes of the current chunk that have not arrived

    def feed(self, data: bytes) -> bytes:
        held, place, parts = self._held + data, 0, []
        while place < len(held) and not self.is_done:
            if self._in_chunk:
                part = held[place : place + self._in_chunk]
                parts.append(part)
                place += len(part)
                self._in_chunk -= len(part)
                continue
            line_end = held.find(b"\r\n", place)
            if line_end < 0:
                break
            if line_end > place:  # an empty line ends the previous chunk
                self._in_chunk = int(held[place:line_end].partition(b";")[0], 16)
                self.is_done = self._in_chunk == 0
            place = line_end + 2
        self._held = held[place:]
        return b"".join(parts)


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(first.split(" ", 2)[1]), headers
