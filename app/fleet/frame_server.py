"""The replica's end of the socket that carries its frames. Only a connection that says the secret gets any."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import Callable
from typing import NamedTuple, cast

from app.fleet.frames import Frame, encode
from app.fleet.outbox import Outbox

logger = logging.getLogger(__name__)

MAX_HELLO_BYTES = 1024
_HELLO_TIMEOUT_S = 5.0
_MAX_UNIDENTIFIED = 64  # connections that have not said the secret yet; more are closed at once


class Address(NamedTuple):
    """Where a replica's frames are to be had, and the secret that opens the stream."""

    host: str
    port: int
    secret: str


class Hello(NamedTuple):
    """What an ingress sends first, on one line, and all it ever sends."""

    secret: str
    ingress_id: str
    heartbeat_s: float

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(self).encode() + b"\n"


class FrameServer:
    """Listens on one address of this machine. Belongs to the event loop that opens it.

    A stream of its own beside Serve's calls: a frame costs less than a call of Serve's around it would.
    """

    def __init__(self, host: str, outbox_of: Callable[[str], Outbox]) -> None:
        """`outbox_of(ingress_id)` is where the frames of one ingress come from."""
        self._host = host
        self._outbox_of = outbox_of
        self._secret = secrets.token_hex(16)
        self._opening: asyncio.Task[asyncio.Server] | None = None
        self._unidentified: set[_Connection] = set()
        self._connections: set[_Connection] = set()

    async def open(self) -> Address:
        """Listen, if it does not yet. Raises OSError when this machine does not have that address."""
        if self._opening is None:
            loop = asyncio.get_running_loop()
            self._opening = loop.create_task(loop.create_server(lambda: _Connection(self), self._host, 0))
        server = await asyncio.shield(self._opening)
        host, port = server.sockets[0].getsockname()[:2]
        return Address(host, port, self._secret)

    async def close(self) -> None:
        """Listen no more, and close all connections."""
        if self._opening is not None:
            (await self._opening).close()
        for connection in [*self._connections]:
            connection.close()

    def opened(self, connection: _Connection) -> bool:
        """Whether a new connection may identify itself; false while too many others have not done so."""
        self._connections.add(connection)
        if len(self._unidentified) >= _MAX_UNIDENTIFIED:
            return False
        self._unidentified.add(connection)
        return True

    def identified(self, connection: _Connection, line: bytes) -> None:
        """A connection has sent its first line: give it the frames of its ingress, or close it."""
        self._unidentified.discard(connection)
        try:
            hello = Hello._make(json.loads(line))
            is_known = hmac.compare_digest(hello.secret, self._secret)
        except (ValueError, TypeError, RecursionError):  # no JSON, or not these three
            is_known = False
        if not is_known:
            connection.close()
            return
        connection.outbox = self._outbox_of(hello.ingress_id)
        connection.outbox.attach(connection, heartbeat_s=hello.heartbeat_s)

    def closed(self, connection: _Connection) -> None:
        """A connection is gone."""
        self._unidentified.discard(connection)
        self._connections.discard(connection)


class _Connection(asyncio.Protocol):
    """The replica's end of one connection: a FrameStream once it has said the secret."""

    def __init__(self, server: FrameServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._line = bytearray()
        self._has_spoken = False
        self._timer: asyncio.TimerHandle | None = None
        self.outbox: Outbox | None = None
        self.is_writable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Serve runs on uvloop; its transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        if self._server.opened(self):
            self._timer = asyncio.get_running_loop().call_later(_HELLO_TIMEOUT_S, self._transport.abort)
        else:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._has_spoken:
            return
        self._line += data
        if b"\n" not in self._line and len(self._line) <= MAX_HELLO_BYTES:
            return
        self._has_spoken = True
        if self._timer is not None:
            self._timer.cancel()
        line, _, _ = bytes(self._line).partition(b"\n")
        self._server.identified(self, line if len(line) <= MAX_HELLO_BYTES else b"")

    def send(self, frame: Frame) -> None:
        self._transport.write(encode(frame))

    def close(self) -> None:
        self._transport.close()

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        if self.outbox is not None:
            self.outbox.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._server.closed(self)
        if self.outbox is not None:
            self.outbox.detach(self)
