"""uvicorn's HTTP/1 protocol for Ray Serve, with corrections for two kinds of requests that uvicorn answers incorrectly.

`ChunkedConnection` also sends pieces of responses without waiting, and writes all pieces of one moment together.

Serve has no setting for the protocol. No upstream issues are known.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.api.http.sse import SEND_NOW
from app.errors import described

logger = logging.getLogger(__name__)


class Protocol(HttpToolsProtocol):
    """One connection. It ignores protocol upgrades, and sends no chunks to an HTTP/1.0 client.

    A server may ignore `Upgrade` (RFC 9110, 7.8), and this service has no WebSocket routes. uvicorn accepts a WebSocket
    upgrade even from a POST, which then gets no answer. For any other upgrade, such as one from Java's HTTP client,
    httptools does not read the body of the request.
    """

    _data = b""
    _running: RequestResponseCycle | None = None  # the request that is being answered or was answered last

    def data_received(self, data: bytes) -> None:
        self._data = data
        super().data_received(data)

    def _should_upgrade(self) -> bool:
        """Whether `handle_websocket_upgrade` handles a request for an upgrade or a tunnel: all methods but CONNECT."""
        return self.scope["method"] != "CONNECT"

    def handle_websocket_upgrade(self) -> None:
        """Parse the head again without `Upgrade`, and then the body. Called when the parser has stopped at the head."""
        stopped = sys.exception()
        assert isinstance(stopped, httptools.HttpParserUpgrade), "uvicorn calls this when it catches that"
        rest = self._data[stopped.args[0] :]
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in the constructor
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        knows_chunks = cycle.scope["http_version"] != "1.0"  # RFC 9112, 6.1
        answer = partial(_answer_with_connection, self.loop) if knows_chunks else _answer_without_chunks
        self._running = cycle
        HttpToolsProtocol._start_asgi_task(self, cycle, partial(answer, cycle, app))

    def connection_lost(self, exc: Exception | None) -> None:
        """Also notify the running request. uvicorn notifies only the last one, which may be queued behind it."""
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self._running = None


class ChunkedConnection:
    """Sends the pieces of one response. Implements `Connection` of `app.api.http.sse`.

    The pieces of all connections are sent together, after the work that makes them. The proxy that reads them then
    stays awake between two pieces. To wake a process takes several times as long as to send a piece.
    """

    __slots__ = ("__weakref__", "_cycle", "_flow", "_outbox", "is_blocked", "loop", "sent_at")

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._outbox = _outboxes.setdefault(loop, [])
        self.loop = loop
        self.is_blocked = True
        self.sent_at = 0.0

    def may_send(self) -> bool:
        """Whether the connection is not blocked, and the client has read enough of the sent data."""
        return not (self.is_blocked or self._flow.write_paused)

    def send(self, data: bytes) -> None:
        """Send a piece of the body, after the callbacks that the event loop runs now."""
        if not self._outbox:
            self.loop.call_soon(_send_all, self._outbox, self.loop)
        self._outbox.append((self, data))

    def write(self, data: bytes, now: float) -> None:
        """Write a piece to the socket as a chunk. An empty piece is left out, because it would end the response."""
        transport = self._cycle.transport
        if data and not (self._cycle.disconnected or transport.is_closing()):
            self.sent_at = now
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: Serve's own proxy sends the scope of a request, with this object, to an ingress."""
        return type(None), ()


_Outbox = list[tuple[ChunkedConnection, bytes]]
_outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Outbox] = WeakKeyDictionary()


def _send_all(outbox: _Outbox, loop: asyncio.AbstractEventLoop) -> None:
    pieces, now = outbox.copy(), loop.time()
    outbox.clear()
    for connection, data in pieces:
        try:
            connection.write(data, now)
        except Exception as error:  # the stream's task gets the error when it sends the next event
            connection.is_blocked = True
            logger.warning("an event could not be sent: %s", described(error))


async def _answer_with_connection(
    loop: asyncio.AbstractEventLoop,
    cycle: RequestResponseCycle,
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answer a request with a `ChunkedConnection` in its scope, and break the reference cycle afterwards."""
    scope["extensions"] = {SEND_NOW: ChunkedConnection(cycle, loop)}
    try:
        await app(scope, receive, send)
    finally:
        del scope["extensions"]


async def _answer_without_chunks(
    cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a request without chunks. If the answer has no length, the end of the connection marks its end."""
    has_length = False

    async def send_without_chunks(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_without_chunks)
