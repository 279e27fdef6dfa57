"""Requests as bytes, in forms that no HTTP client would send: for a server behind a socket."""

from __future__ import annotations

import itertools
import re
import socket
from urllib.parse import urlsplit

from tests.kit.service import KEY
from tests.waiting import PATIENCE_S

REQUEST_LINES = [
    "GET /v1/models HTTP/1.1", "GET //v1/models HTTP/1.1", "GET /v1/../v1/models HTTP/1.1", "GET /V1/MODELS HTTP/1.1",
    "GET /health/../v1/models HTTP/1.1", "GET /health/%2e%2e/v1/models HTTP/1.1", "GET /v1/%6dodels HTTP/1.1",
    "GET /v1/models/ HTTP/1.1", "GET /v1/models/demo HTTP/1.1", "GET /v1%2fmodels HTTP/1.1",
    "GET /v1/models%00 HTTP/1.1",
    "GET http://127.0.0.1/v1/models HTTP/1.1", "GET http://127.0.0.1/health/../v1/models HTTP/1.1",
    "GET http://x/health?/v1/models HTTP/1.1", "GET /v1/models?/health HTTP/1.1", "GET /v1/models#/health HTTP/1.1",
    "GET /v1/models;/health HTTP/1.1", "GET \\v1\\models HTTP/1.1", "GET v1/models HTTP/1.1", "GET /v1/models HTTP/1.0",
    "HEAD /v1/models HTTP/1.1", "OPTIONS * HTTP/1.1", "OPTIONS /v1/models HTTP/1.1", "CONNECT 127.0.0.1:80 HTTP/1.1",
    "TRACE /v1/models HTTP/1.1", "get /v1/models HTTP/1.1", "GET /metrics HTTP/1.1", "GET /openapi.json HTTP/1.1",
    "GET /tokenizer_info HTTP/1.1", "GET /version HTTP/1.1", "POST /v1/completions HTTP/1.1", "GET /docs HTTP/1.1",
    "GET /-/routes HTTP/1.1",
]  # fmt: skip
HEADER_LINES = [
    [], ["Host: health"], ["Host: 127.0.0.1/health?"], ["Host: a", "Host: b"], ["Authorization: Bearer wrong"],
    ["Authorization: bearer"], ["Authorization:"], [f"Authorization: Basic {KEY}"], [f"X-Authorization: Bearer {KEY}"],
    ["Authorization: Bearer wrong", f"Authorization: Basic {KEY}"], [f"Authorization : Bearer {KEY}"],
    ["X-HTTP-Method-Override: GET", "X-Original-URL: /health"], ["Connection: upgrade", "Upgrade: h2c"],
    ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZQ=="],
    ["Content-Length: 5", "Transfer-Encoding: chunked"], ["Content-Length: -1"], ["Connection: Authorization"],
]  # fmt: skip


def answered(url: str) -> set[str]:
    """The request lines that got an answer below 400, each tried with all odd headers, none of which shows a key."""
    found = set()
    for request_line, header_lines in itertools.product(REQUEST_LINES, HEADER_LINES):
        statuses = exchange(url, "\r\n".join([request_line, *header_lines, "Connection: close", "", ""]))
        assert not any(500 <= status < 503 for status in statuses), (request_line, header_lines, statuses)
        if any(status < 400 for status in statuses):
            found.add(request_line)
    return found


def exchange(url: str, request: str, *, stays: bool = False) -> list[int]:
    """The statuses of all answers to these bytes, as `received` gets them."""
    answers = received(url, request, stays=stays)
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def received(url: str, request: str, *, stays: bool = False, until: bytes | None = None) -> bytes:
    """All that comes back for these bytes until the server closes the connection.

    until: or until this is the last that came, as a server keeps a connection open for another request.

    stays: the client goes on listening without an end of its own. To one that has ended, HAProxy says 400 by itself
    unless a connection to the service is open already.
    """
    address = urlsplit(url)
    assert address.hostname
    assert address.port
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as connection:
        connection.sendall(request.encode("latin-1"))
        if not stays:
            connection.shutdown(socket.SHUT_WR)
        answers = b""
        while (until is None or not answers.endswith(until)) and (chunk := connection.recv(65536)):
            answers += chunk
    return answers
