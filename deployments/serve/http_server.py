"""HTTP/1 as uvicorn speaks it for Ray Serve, but for two kinds of requests that it does not answer as HTTP says.

Responses can also be sent without waiting, all that one moment brings together (`ChunkedConnection`).

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
    """One connection. No request changes its protocol, and no chunks are sent to a client that does not know them.

    A server may ignore `Upgrade` (RFC 9110, 7.8), and no route of ours has WebSockets. uvicorn takes an upgrade to a
    WebSocket also from a POST, which gets no answer then. Of a request for any other upgrade, as the HTTP client of
    Java sends it, httptools does not read the body.
    """

    _data = b""
    _running: RequestResponseCycle | None = None  # whose request is answered, or was the last one

    def data_received(self, data: bytes) -> None:
        self._data = data
        super().data_received(data)

    def _should_upgrade(self) -> bool:
        """Asked of a request that wants an upgrade, or to be a tunnel: such a request is handled below, not here."""
        return self.scope["method"] != "CONNECT"

    def handle_websocket_upgrade(self) -> None:
        """Called where the parser has stopped behind the head: parse it again without `Upgrade`, and then the body."""
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
        """Tell the request that runs, too: uvicorn tells the last one, which may wait behind it."""
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self._running = None


class ChunkedConnection:
    """A `Connection` of `app.api.http.sse`: sends pieces of one response.

    Pieces of all connections go out together, after the work that makes them: while one follows the other, the proxy
    that reads them is awake, and to wake a process takes several times as long as to send.
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
        """Whether it is not blocked, and the client has read enough."""
        return not (self.is_blocked or self._flow.write_paused)

    def send(self, data: bytes) -> None:
        """Send a piece of the body at the end of what the event loop does now."""
        if not self._outbox:
            self.loop.call_soon(_send_all, self._outbox, self.loop)
        self._outbox.append((self, data))

    def write(self, data: bytes, now: float) -> None:
        """Write a piece to the socket, as a chunk. An empty one would end the response."""
        transport = self._cycle.transport
        if data and not (self._cycle.disconnected or transport.is_closing()):
            self.sent_at = now
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """In another process it is nothing: Serve's own proxy sends the scope of a request to an ingress."""
        return type(None), ()


_Outbox = list[tuple[ChunkedConnection, bytes]]
_outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Outbox] = WeakKeyDictionary()


def _send_all(outbox: _Outbox, loop: asyncio.AbstractEventLoop) -> None:
    pieces, now = outbox.copy(), loop.time()
    outbox.clear()
    for connection, data in pieces:
        try:
            connection.write(data, now)
        except Exception as error:  # the task of the stream finds out why when it sends the next event
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
    """Answer a request whose scope has a `ChunkedConnection`. Afterwards the two must not keep each other."""
    scope["extensions"] = {SEND_NOW: ChunkedConnection(cycle, loop)}
    try:
        await app(scope, receive, send)
    finally:
        del scope["extensions"]


async def _answer_without_chunks(
    cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a request so that the end of the connection ends an answer without a length."""
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
