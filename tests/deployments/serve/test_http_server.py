"""How Serve's HTTP server answers odd clients, once an ingress has changed it."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.api.http import sse
from app.api.http.sse import SEND_NOW, EventStream, connection_of
from deployments.ray_internals import use_own_protocol
from deployments.serve.http_server import ChunkedConnection
from tests.api.odd_requests import received
from tests.benchmarks.servers import serving
from tests.deployments.conftest import Service
from tests.waiting import eventually

WEBSOCKET = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
HTTP_2 = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"  # as Java sends


async def echo(request: Request) -> Response:
    return JSONResponse(await request.json())


async def stream(_: Request) -> Response:
    return StreamingResponse(iter(["data: 1\n\n", "data: 2\n\n"]), media_type="text/event-stream")


async def nothing(_: Request) -> Response:
    return Response(status_code=204)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with uvicorn's defaults, as Serve starts it, changed as an ingress changes it."""
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])  # put back at the end
    use_own_protocol()
    app = Starlette(routes=[
        Route("/echo", echo, methods=["POST"]), Route("/stream", stream, methods=["GET", "HEAD"]),
        Route("/nothing", nothing), Route("/at-once", at_once),
    ])  # fmt: skip
    with serving(app, ws="auto") as url:
        yield url


def posted(body: str, headers: str, version: str = "1.1", path: str = "/echo") -> str:
    length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"POST {path} HTTP/{version}\r\nHost: localhost\r\n{length}{headers}\r\n{body}"


@pytest.mark.parametrize("upgrade", [WEBSOCKET, HTTP_2], ids=["websocket", "h2c"])
def test_a_post_that_asks_for_an_upgrade_is_answered_and_its_connection_goes_on(url: str, upgrade: str) -> None:
    small, large = '{"a":1}', '{"a":"' + "x" * 300_000 + '"}'
    for body in (small, large):  # the larger one comes in several pieces
        answer = received(url, posted(body, upgrade) + posted(small, "Connection: close\r\n"))
        assert answer.count(b"HTTP/1.1 200 ") == 2, answer[:1000]
        assert body.encode() in answer
        assert answer.endswith(small.encode())


def test_a_body_in_chunks_behind_an_upgrade_is_read(url: str) -> None:
    head = posted("", WEBSOCKET).replace("Content-Length: 0", "Transfer-Encoding: chunked")
    answer = received(url, f'{head}7\r\n{{"a":1}}\r\n0\r\n\r\n')
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b'{"a":1}')


def test_a_get_that_asks_for_a_websocket_is_answered(url: str) -> None:
    answer = received(url, f"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n{WEBSOCKET}\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")


def test_a_tunnel_is_refused(url: str) -> None:
    assert b" 400 " in received(url, "CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: localhost\r\n\r\n")


def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_its_connection(url: str) -> None:
    head, _, body = received(url, "GET /stream HTTP/1.0\r\n\r\n", stays=True).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body == b"data: 1\n\ndata: 2\n\n"


@pytest.mark.parametrize(
    ("request_line", "headers", "body"),
    [
        ("HEAD /stream HTTP/1.0", b"content-type: text/event-stream", b""),
        ("GET /nothing HTTP/1.0", b"204 No Content", b""),
        ("GET /nowhere HTTP/1.0", b"content-length: 9", b"Not Found"),
    ],
)
def test_other_answers_over_http_1_0_are_as_before(url: str, request_line: str, headers: bytes, body: bytes) -> None:
    head, _, found = received(url, f"{request_line}\r\n\r\n", stays=True).partition(b"\r\n\r\n")
    assert headers in head
    assert b"transfer-encoding" not in head
    assert found == body


def test_an_answer_with_a_length_over_http_1_0_keeps_it(url: str) -> None:
    answer = received(url, posted('{"a":1}', "", "1.0"), stays=True)
    assert b"content-length: 7" in answer
    assert answer.endswith(b'{"a":1}')


def test_a_stream_over_http_1_1_has_chunks(url: str) -> None:
    answer = received(url, "GET /stream HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", stays=True)
    assert b"transfer-encoding: chunked" in answer
    assert answer.endswith(b"0\r\n\r\n")


def test_the_service_answers_both_behind_its_proxy(service: Service) -> None:
    body = json.dumps({"model": "turns", "prompt": "3", "max_tokens": 3, "stream": True})
    end = b"data: [DONE]\n\n\r\n0\r\n\r\n"
    upgraded = received(service.url, posted(body, WEBSOCKET, path="/v1/completions"), stays=True, until=end)
    assert upgraded.startswith(b"HTTP/1.1 200 ")
    assert upgraded.endswith(end)
    head, _, events = received(service.url, posted(body, "", "1.0", "/v1/completions"), stays=True).partition(
        b"\r\n\r\n"
    )
    assert b"transfer-encoding" not in head.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


async def at_once(request: Request) -> Response:
    """Events that go out between those that the response itself sends."""
    connection = connection_of(request.scope)

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: begin\n\n"
        if connection is not None:
            for number in range(3):
                assert connection.may_send()
                connection.send(b"data: %d\n\n" % number)
            await asyncio.sleep(0.01)
        yield b"data: end\n\n"

    return Streamed(events(), connection)


class Streamed(Response):
    def __init__(self, events: AsyncGenerator[bytes, None], connection: sse.Connection | None) -> None:
        super().__init__()
        self._stream = EventStream(
            events, headers=dict, heartbeat_s=10.0, may_begin=lambda: True, connection=connection
        )
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._stream.send_to(send)
        assert self._connection is None or not self._connection.may_send()


def test_events_that_are_sent_at_once_come_in_order_as_chunks(url: str) -> None:
    answer = received(url, "GET /at-once HTTP/1.1\r\nHost: localhost\r\n\r\n", stays=True, until=b"0\r\n\r\n").decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert "transfer-encoding: chunked" in head
    assert [line for line in body.splitlines() if line.startswith("data: ")] == [
        "data: begin", "data: 0", "data: 1", "data: 2", "data: end"
    ]  # fmt: skip


def test_a_client_without_chunks_gets_all_events_from_the_response_itself(url: str) -> None:
    answer = received(url, "GET /at-once HTTP/1.0\r\nHost: localhost\r\n\r\n", stays=True)
    assert answer.endswith(b"\r\n\r\ndata: begin\n\ndata: end\n\n")


def test_nothing_of_a_request_stays_without_the_garbage_collector(url: str) -> None:
    gc.collect()
    gc.disable()
    try:
        received(url, "GET /at-once HTTP/1.1\r\nHost: localhost\r\n\r\n", stays=True, until=b"0\r\n\r\n")
        eventually(lambda: not [each for each in gc.get_objects() if isinstance(each, ChunkedConnection | EventStream)])
    finally:
        gc.enable()


def test_a_client_that_goes_away_ends_the_request_that_runs_and_no_event_of_others_is_lost() -> None:
    class Transport:
        is_closed = False

        def is_closing(self) -> bool:
            return self.is_closed

        def write(self, data: bytes) -> None:
            assert not self.is_closed
            if broken:
                raise OSError
            written.append(data)

    broken, written = False, list[bytes]()
    loop = asyncio.new_event_loop()
    connections, transports = [], [Transport() for _ in range(3)]
    for transport in transports:
        cycle = SimpleNamespace(flow=SimpleNamespace(write_paused=False), transport=transport, disconnected=False)
        connections.append(ChunkedConnection(cast(RequestResponseCycle, cycle), loop))
        connections[-1].is_blocked = False

    async def send() -> None:
        for connection in connections:
            connection.send(b"x")
        await asyncio.sleep(0)

    transports[1].is_closed = True
    try:
        loop.run_until_complete(send())
        assert len(written) == 2
        broken = True
        loop.run_until_complete(send())
        assert [each.may_send() for each in connections] == [False, True, False]
    finally:
        loop.close()


def test_the_connection_of_a_request_stays_in_its_process_and_its_event_loop() -> None:
    cycle = cast(RequestResponseCycle, SimpleNamespace(flow=None))
    loop = asyncio.new_event_loop()
    scope = {"type": "http", "extensions": {SEND_NOW: ChunkedConnection(cycle, loop)}}

    async def here() -> object:
        return connection_of(scope)

    try:
        assert asyncio.run(here()) is None
        assert loop.run_until_complete(here()) is scope["extensions"][SEND_NOW]  # type: ignore[index]
    finally:
        loop.close()
    assert pickle.loads(pickle.dumps(scope)) == {"type": "http", "extensions": {SEND_NOW: None}}
