"""Extends uvicorn's HTTP/1 protocol for Ray Serve, and fixes two kinds of requests that uvicorn handles incorrectly.

`ChunkedConnection` allows streams to send pieces without waiting, and writes the pieces of all streams together.

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
    """A connection that ignores protocol upgrades, and sends no chunks to HTTP/1.0 clients.

    A server may ignore `Upgrade` (RFC 9110, 7.8), and this service has no WebSocket routes. uvicorn would accept a
    WebSocket upgrade even for a POST, which would then receive no response. For other upgrades, such as those that
    Java's HTTP client requests, httptools would not read the request's body.
    """

    _data = b""
    _running: RequestResponseCycle | None = None  # the request that is being answered, or was answered last

    def data_received(self, data: bytes) -> None:
        self._data = data
        super().data_received(data)

    def _should_upgrade(self) -> bool:
        """Return whether to call `handle_websocket_upgrade`: for every upgrade except a tunnel (CONNECT)."""
        return self.scope["method"] != "CONNECT"

    def handle_websocket_upgrade(self) -> None:
        """Parse the head again without `Upgrade`, then the body. Called after the parser has stopped at the upgrade."""
        stopped = sys.exception()
        assert isinstance(stopped, httptools.HttpParserUpgrade), "uvicorn calls this while handling that error"
        rest = self._data[stopped.args[0] :]
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn's constructor
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
    """Sends the pieces of a response. Implements `app.api.http.sse.Connection`.

    The pieces of all connections are written together, after the work that creates them. The proxy then reads many
    pieces without sleeping in between. Waking a process takes several times as long as writing a piece.
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
        """Whether the connection is not blocked and the client has read enough of the data so far."""
        return not (self.is_blocked or self._flow.write_paused)

    def send(self, data: bytes) -> None:
        """Queue a piece of the body. It is written once the callbacks that are ready now have run."""
        if not self._outbox:
            self.loop.call_soon(_send_all, self._outbox, self.loop)
        self._outbox.append((self, data))

    def write(self, data: bytes, now: float) -> None:
        """Write a piece to the socket as a chunk. Skips empty pieces, because an empty chunk ends the response."""
        transport = self._cycle.transport
        if data and not (self._cycle.disconnected or transport.is_closing()):
            self.sent_at = now
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None. Serve's own proxy pickles the request's scope, which contains this object."""
        return type(None), ()


_Outbox = list[tuple[ChunkedConnection, bytes]]
_outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Outbox] = WeakKeyDictionary()


def _send_all(outbox: _Outbox, loop: asyncio.AbstractEventLoop) -> None:
    pieces, now = outbox.copy(), loop.time()
    outbox.clear()
    for connection, data in pieces:
        try:
            connection.write(data, now)
        except Exception as error:  # the stream's task will raise the error when it sends its next event
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
    """Call the application with a `ChunkedConnection` in the scope, and break the reference cycle afterwards."""
    scope["extensions"] = {SEND_NOW: ChunkedConnection(cycle, loop)}
    try:
        await app(scope, receive, send)
    finally:
        del scope["extensions"]


async def _answer_without_chunks(
    cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Call the application without chunking its response. If its length is unknown, closing the connection ends it."""
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
