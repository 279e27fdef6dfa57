"""The replica's end of its connections to ingresses. Receives requests, and sends frames."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import NamedTuple, cast

from app.engine.async_engine import AsyncEngine
from app.engine.request import Address
from app.errors import EngineStopped, traceback_of
from app.fleet.dispatch import ReplicaReport
from app.fleet.frames import (
    AbortRequest,
    AskMetrics,
    Frame,
    InvalidFrame,
    SubmitRequest,
    WatchEngine,
    encode,
    message_decoder,
    report_of,
)  # fmt: skip
from app.fleet.ingress_session import IngressSession
from app.fleet.prefix_feed import PrefixFeed
from app.fleet.uncomputed_prompts import UncomputedPrompts

logger = logging.getLogger(__name__)

MAX_HELLO_BYTES = 1024
# If an ingress acknowledges no data for this time, its machine or its process has stopped. Its connection is then
# closed, and its requests end. Because of the heartbeats, there is always data to acknowledge.
UNREAD_TIMEOUT_S = 60.0
# How long the encoded metrics are reused for other ingresses. Encoding takes a millisecond or two. The time is short
# because a scrape after a request should include the request.
METRICS_HOLD_S = 0.05


class Hello(NamedTuple):
    """The first line that an ingress sends, encoded as a JSON array."""

    secret: str
    ingress_id: str
    heartbeat_s: float

    @property
    def is_valid(self) -> bool:
        """Whether the fields are valid. Raises TypeError if the heartbeat is not a number."""
        return isinstance(self.ingress_id, str) and 0.01 <= self.heartbeat_s <= 3600

    def line(self) -> bytes:
        return json.dumps(self).encode() + b"\n"


class FrameServer:
    """Listens on one address of this machine. The server belongs to the event loop that opens it.

    Requests and frames bypass Ray Serve, because a Serve call costs several times as much as a message on a socket. An
    ingress must send the secret of the server's address first.
    """

    def __init__(
        self,
        host: str,
        engine: AsyncEngine,
        report: Callable[[], ReplicaReport],
        metrics: Callable[[], bytes] = bytes,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`report` is called for each frame, and `metrics` when an ingress requests the metrics."""
        self._host = host
        self._engine = engine
        self._report = report
        self._metrics = metrics
        self._clock = clock
        self._measured = (-inf, b"")  # time and result of the last call to `metrics`
        self._secret = secrets.token_hex(16)
        self._opening: asyncio.Task[asyncio.Server] | None = None
        self._unidentified: set[_Connection] = set()
        self._connections: set[_Connection] = set()
        self._of_ingress: dict[str, _Connection] = {}
        self._draining: asyncio.Future[None] | None = None
        self._may_have_moved_requests = False  # whether a request may have been moved away since `drain` was called
        self._watching: set[_Connection] = set()
        self._showing: asyncio.Task[None] | None = None  # runs while any ingress watches
        self._full_view_at = 0.0  # when the next full view is due, by the event loop's clock
        self._prefixes = PrefixFeed()
        engine.on_prefixes(self._prefixes.note)
        self._prompts = UncomputedPrompts()

    async def open(self) -> Address:
        """Start listening, unless already listening. Raises OSError if this machine does not have the address."""
        if self._opening is None:
            loop = asyncio.get_running_loop()
            self._prefixes.address = self._engine.serve_prefixes(self._host)
            self._opening = loop.create_task(loop.create_server(lambda: _Connection(self), self._host, 0))
        server = await asyncio.shield(self._opening)
        host, port = server.sockets[0].getsockname()[:2]
        return Address(host, port, self._secret)

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._opening is not None:
            (await self._opening).close()
        for connection in [*self._connections]:
            connection.close()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being served and there is nothing left to send."""
        return all(each.session is None or each.session.is_idle for each in self._connections)

    async def drain(self) -> None:
        """Wait until all requests have ended. If one may have moved, also allow time to fetch its KV memory."""
        fetch_s = 1.0  # a fetch is abandoned after this time, or later if recomputing would take longer
        while not self.is_idle:
            self._draining = asyncio.get_running_loop().create_future()
            await self._draining
        if self._may_have_moved_requests and self._prefixes.address is not None:
            await asyncio.sleep(fetch_s)

    def left(self) -> None:
        """Record that an ingress has aborted a request. The request may have moved to another replica."""
        self._may_have_moved_requests = self._draining is not None

    def _check_drained(self) -> None:
        if self._draining is not None and not self._draining.done() and self.is_idle:
            self._draining.set_result(None)

    def opened(self, connection: _Connection) -> bool:
        """Register a new connection. Returns False while too many other connections have not identified themselves."""
        self._connections.add(connection)
        # The limit is high because all ingresses connect as soon as a replica is ready.
        max_unidentified = 256
        if len(self._unidentified) >= max_unidentified:
            return False
        self._unidentified.add(connection)
        return True

    def identified(self, connection: _Connection, line: bytes) -> None:
        """Check a connection's first line. Starts a session if the line is valid, and otherwise closes the connection.

        The ingress's previous connection is closed, because an ingress reconnects only after losing its connection.
        """
        self._unidentified.discard(connection)
        try:
            hello = Hello._make(json.loads(line))
            is_known = hmac.compare_digest(hello.secret, self._secret) and hello.is_valid
        except (ValueError, TypeError, RecursionError):  # not JSON, or not the fields of a Hello
            is_known = False
        if not is_known:
            connection.close()
            return
        before = self._of_ingress.get(hello.ingress_id)
        self._of_ingress[hello.ingress_id] = connection
        if before is not None:
            before.close()
        connection.session = IngressSession(
            connection, self._engine, self._report, prefixes=self._prefixes.open(), prompts=self._prompts,
            heartbeat_s=hello.heartbeat_s, on_idle=self._check_drained,
        )  # fmt: skip

    def watch(self, connection: _Connection, *, is_watched: bool) -> None:
        """Start or stop sending views of the engine to one ingress."""
        if not is_watched:
            self._watching.discard(connection)
            return
        self._watching.add(connection)
        self._full_view_at = 0.0
        if self._showing is None or self._showing.done():
            self._showing = asyncio.get_running_loop().create_task(self._show())

    def measured(self) -> bytes:
        """Return this replica's encoded metrics, at most `METRICS_HOLD_S` old. Empty if they cannot be encoded."""
        now = self._clock()
        if self._measured[0] <= now - METRICS_HOLD_S:
            try:
                self._measured = (now, self._metrics())
            except Exception as error:
                logger.error("the metrics could not be encoded: %s", traceback_of(error))
                self._measured = (now, b"")
        return self._measured[1]

    async def _show(self) -> None:
        """Send views until no ingress watches."""
        clock = asyncio.get_running_loop().time
        view_period_s = 0.2  # more views would not make a moving line look smoother
        full_view_period_s = 2.0  # for pages that have missed views or are opened later
        with suppress(EngineStopped):
            while self._watching:
                is_full = clock() >= self._full_view_at
                if is_full:
                    self._full_view_at = clock() + full_view_period_s
                view = await self._engine.snapshot(is_full=is_full)
                for connection in self._watching:
                    if connection.session is not None:
                        connection.session.show(view)
                await asyncio.sleep(view_period_s)
        self._engine.end_snapshots()

    def closed(self, connection: _Connection) -> None:
        """Remove a closed connection. This may complete a drain."""
        self._watching.discard(connection)
        self._unidentified.discard(connection)
        self._connections.discard(connection)
        self._of_ingress = {each: of_it for each, of_it in self._of_ingress.items() if of_it is not connection}
        self._check_drained()


class _Connection(asyncio.Protocol):
    """The replica's end of one connection. Used as a `FrameStream` once the ingress has sent the secret."""

    def __init__(self, server: FrameServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._line = bytearray()
        self._messages = message_decoder()
        self._timer: asyncio.TimerHandle | None = None
        self._has_spoken = False
        self.session: IngressSession | None = None
        self.is_writable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because Serve runs on uvloop, whose transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            connected = transport.get_extra_info("socket")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_TIMEOUT_S * 1000))
        hello_timeout_s = 5.0
        if self._server.opened(self):
            self._timer = asyncio.get_running_loop().call_later(hello_timeout_s, self._transport.abort)
        else:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.session is None and not self._has_spoken:
            data = self._take_hello(data)
        session = self.session
        if session is None or not data:
            return
        try:
            messages = self._messages.feed(data)
        except InvalidFrame as error:
            logger.warning("an ingress sent an invalid message: %s", error)
            self._transport.abort()
            return
        for message in messages:
            match message:
                case SubmitRequest():
                    session.submit(message.request, num_prefill_tokens=message.num_prefill_tokens)
                case AbortRequest():
                    self._server.left()
                    session.abort(message.request_id)
                case WatchEngine():
                    self._server.watch(self, is_watched=message.is_watched)
                case AskMetrics():
                    session.send_metrics(self._server.measured())

    def _take_hello(self, data: bytes) -> bytes:
        """Read the first line. Returns the bytes that follow it."""
        self._line += data
        if b"\n" not in self._line and len(self._line) <= MAX_HELLO_BYTES:
            return b""
        self._has_spoken = True
        if self._timer is not None:
            self._timer.cancel()
        line, _, following = bytes(self._line).partition(b"\n")
        self._server.identified(self, line if len(line) <= MAX_HELLO_BYTES else b"")
        return following

    def send(self, frame: Frame) -> None:
        self._transport.write(encode(frame))

    def close(self) -> None:
        self.is_writable = False
        self._transport.close()

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        if self._transport.is_closing():
            return
        self.is_writable = True
        if self.session is not None:
            self.session.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.is_writable = False
        if self.session is not None:
            self.session.close()
        self._server.closed(self)


def report_of_engine(engine: AsyncEngine, *, group: str = "", weights: int = 0) -> ReplicaReport:
    """Return the report for the replica that runs this engine. `weights` is the digest of the model's files."""
    return report_of(
        engine.stats(),
        num_requests=engine.num_requests,
        group=group,
        max_requests=engine.max_requests,
        step_age_s=engine.step_age_s,
        weights=weights,
        adapters=None if engine.adapters is None else engine.adapters.stats().loaded,
        sleep=engine.sleep,
        backend=engine.backend,
    )
