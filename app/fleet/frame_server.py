"""The replica's end of its sockets: requests come in, frames go out. Only for connections that say the secret."""

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
# After so long without any sign that an ingress takes what was sent, its connection is closed and its requests end: its
# machine is gone, or its process stands still. Heartbeats see to it that there is always something that was sent.
UNREAD_TIMEOUT_S = 60.0
# For which what is measured answers all ingresses. To write it takes a millisecond or two, and a scrape after a request
# should have the request.
METRICS_HOLD_S = 0.05


class Hello(NamedTuple):
    """What an ingress sends first, on one line."""

    secret: str
    ingress_id: str
    heartbeat_s: float

    @property
    def is_sound(self) -> bool:
        """Whether it has an ingress, and heartbeats that a replica can send. Raises TypeError."""
        return isinstance(self.ingress_id, str) and 0.01 <= self.heartbeat_s <= 3600

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(self).encode() + b"\n"


class FrameServer:
    """Listens on one address of this machine. Belongs to the event loop that opens it.

    Requests and frames have a connection of their own beside Serve's calls: a call of Serve's costs several times as
    much as a message on it.
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
        """`engine` serves the requests, `report` is called for each frame, `metrics` for ingresses that ask."""
        self._host = host
        self._engine = engine
        self._report = report
        self._metrics = metrics
        self._clock = clock
        self._measured = (-inf, b"")  # when `metrics` was called last, and its result
        self._secret = secrets.token_hex(16)
        self._opening: asyncio.Task[asyncio.Server] | None = None
        self._unidentified: set[_Connection] = set()
        self._connections: set[_Connection] = set()
        self._of_ingress: dict[str, _Connection] = {}
        self._draining: asyncio.Future[None] | None = None
        self._was_left = False  # by a request, since then
        self._watching: set[_Connection] = set()
        self._showing: asyncio.Task[None] | None = None  # while any watches
        self._full_view_at = 0.0  # when the next full view is due, by the event loop's clock
        self._prefixes = PrefixFeed()
        engine.on_prefixes(self._prefixes.note)
        self._prompts = UncomputedPrompts()

    async def open(self) -> Address:
        """Listen, if it does not yet. Raises OSError when this machine does not have that address."""
        if self._opening is None:
            loop = asyncio.get_running_loop()
            self._prefixes.address = self._engine.serve_prefixes(self._host)
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

    @property
    def is_idle(self) -> bool:
        """Whether no request is being served and nothing is left to send."""
        return all(each.session is None or each.session.is_idle for each in self._connections)

    async def drain(self) -> None:
        """Wait until all requests have ended, and those that went on elsewhere may have their KV memory there."""
        fetch_s = 1.0  # a replica gives up later than that only where it would compute for longer
        while not self.is_idle:
            self._draining = asyncio.get_running_loop().create_future()
            await self._draining
        if self._was_left and self._prefixes.address is not None:
            await asyncio.sleep(fetch_s)

    def left(self) -> None:
        """An ingress needs no more of a request."""
        self._was_left = self._draining is not None

    def _check_drained(self) -> None:
        if self._draining is not None and not self._draining.done() and self.is_idle:
            self._draining.set_result(None)

    def opened(self, connection: _Connection) -> bool:
        """Whether a new connection may identify itself; false while too many others have not done so."""
        self._connections.add(connection)
        # Connections that have not said the secret yet; more are closed at once. All ingresses connect in the moment
        # in which a replica is ready.
        max_unidentified = 256
        if len(self._unidentified) >= max_unidentified:
            return False
        self._unidentified.add(connection)
        return True

    def identified(self, connection: _Connection, line: bytes) -> None:
        """A connection has sent its first line: give it the frames of its ingress, or close it.

        The connection before is closed: an ingress that has lost one opens another.
        """
        self._unidentified.discard(connection)
        try:
            hello = Hello._make(json.loads(line))
            is_known = hmac.compare_digest(hello.secret, self._secret) and hello.is_sound
        except (ValueError, TypeError, RecursionError):  # no JSON, or not these three
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
        """An ingress wants views of the engine from now on, or no more."""
        if not is_watched:
            self._watching.discard(connection)
            return
        self._watching.add(connection)
        self._full_view_at = 0.0
        if self._showing is None or self._showing.done():
            self._showing = asyncio.get_running_loop().create_task(self._show())

    def measured(self) -> bytes:
        """What is measured here; empty where that fails."""
        now = self._clock()
        if self._measured[0] <= now - METRICS_HOLD_S:
            try:
                self._measured = (now, self._metrics())
            except Exception as error:
                logger.error("the metrics could not be written: %s", traceback_of(error))
                self._measured = (now, b"")
        return self._measured[1]

    async def _show(self) -> None:
        """Send views until none watches."""
        clock = asyncio.get_running_loop().time
        view_period_s = 0.2  # five a second: an eye sees no more of a line that moves
        # For a page that has missed some, and in what an ingress keeps for a page that is opened
        full_view_period_s = 2.0
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
        """A connection is gone."""
        self._watching.discard(connection)
        self._unidentified.discard(connection)
        self._connections.discard(connection)
        self._of_ingress = {each: of_it for each, of_it in self._of_ingress.items() if of_it is not connection}
        self._check_drained()


class _Connection(asyncio.Protocol):
    """The replica's end of one connection: a FrameStream once it has said the secret."""

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
        # Serve runs on uvloop; its transports are no subclasses of asyncio's.
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
            logger.warning("an ingress sent what is no request: %s", error)
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
        """Read the first line; returns what follows it."""
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
    """The report of the replica with this engine, whose weights have this digest."""
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
