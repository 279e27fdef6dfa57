"""A stream of server-sent events that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.http.errors import ClientGone

HEARTBEAT = b": still here\n\n"  # a comment: clients skip it
# A message that the client's connection has not taken for so long ends the stream: a client that does not read would
# keep its request on a replica, and all that comes of it in memory.
UNREAD_S = 60.0
SEND_NOW = "carousel.send_now"  # the extension of ASGI whose value in the scope is a `Connection`


class WhileConnected:
    """`async with` it around work for a client: a client that goes away cancels the work, and ClientGone is raised.

    The request's body must have been read: afterwards a disconnect is all that `receive` can bring. The work runs in
    the task that it is in, as under `asyncio.timeout`.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "requests are served in tasks"
        self._task = task
        self._num_cancelled = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        try:
            await asyncio.wait({self._watcher})
        except asyncio.CancelledError:
            if not self._is_gone:
                raise
        finally:
            # Its traceback refers to this object: in a circle, all of the request would wait for the garbage collector.
            del self._watcher
        if self._is_gone and self._task.uncancel() <= self._num_cancelled:  # nothing else cancelled the task
            raise ClientGone from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._task.cancel()


class Connection(Protocol):
    """Sends events of an `EventStream` without a task, between those that the stream itself sends.

    Servers that can have it in the scope of a request, as the extension `SEND_NOW` of ASGI.
    """

    loop: asyncio.AbstractEventLoop  # that alone may use it
    is_blocked: bool  # the stream has not begun, sends a comment or has ended
    sent_at: float  # when an event went out, by the event loop's clock

    def may_send(self) -> bool:
        """Whether an event may go out now: the connection is not blocked, and the client has read enough."""

    def send(self, data: bytes) -> None:
        """Send one event, or more."""


def connection_of(scope: Scope) -> Connection | None:
    """None: the server has no such extension, or it runs in another event loop."""
    connection: Connection | None = scope.get("extensions", {}).get(SEND_NOW)
    return connection if connection is not None and connection.loop is asyncio.get_running_loop() else None


class EventStream:
    """A response of server-sent events, sent as they come."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        headers: Callable[[], Mapping[str, str]],
        heartbeat_s: float,
        may_begin: Callable[[], bool],
        connection: Connection | None = None,
    ) -> None:
        """No byte goes out before the first event, so that an error before it can still have a status of its own.

        After `heartbeat_s` without an event the stream begins all the same where it `may_begin`, for example when the
        request is queued: the client, and proxies before it, would close a connection that stays silent. From then on a
        comment goes out whenever nothing else has for `heartbeat_s`. It also finds out clients that have vanished.
        `headers` are asked for when the stream begins. A client that takes nothing for `UNREAD_S` counts as gone.
        `connection` may send events while the next of `events` is waited for.
        """
        self._events = events
        self._headers = headers
        self._heartbeat_s = heartbeat_s
        self._may_begin = may_begin
        self._connection = connection
        self._has_begun = False
        self._sent_at = 0.0  # when the last message was given to the server, by the event loop's clock
        self._is_taken = True  # the server has taken it: the client has read enough of those before
        self._is_unread = False  # the client has not read for too long

    async def send_to(self, send: Send) -> None:
        """Send all events. Raises what the events raise, and ClientGone when the client does not read any more."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "requests are served in tasks"
        self._sent_at = loop.time()
        self._send = send
        self._beating: asyncio.Task[None] | None = None
        self._timer = loop.call_later(self._heartbeat_s, self._beat)
        try:
            # In a task of its own: what wakes a task passes all coroutines that it waits in, and in the caller's task
            # those of the HTTP server, Serve and the routers, some twenty, would be passed twice for each event.
            self._sending = asyncio.create_task(self._send_all(), name=task.get_name())
            await self._sending
            self._timer.cancel()  # nothing may follow
            # Here, not in that task: after the last message the server reports a disconnect, which must find this done.
            async with asyncio.timeout(UNREAD_S):
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError as error:  # TimeoutError, and how newer ASGI servers say that a connection is closed
            raise ClientGone from error
        except asyncio.CancelledError:
            if self._is_unread and not task.cancelling():
                raise ClientGone from None
            raise
        finally:
            self._block_connection(True)
            self._timer.cancel()
            del self._sending  # else an error's traceback and this object would be in a circle
            if self._beating is not None:
                self._beating.cancel()
                await asyncio.wait({self._beating})

    async def _send_all(self) -> None:
        clock = asyncio.get_running_loop().time
        async with aclosing(self._events):
            async for data in self._events:
                if not self._has_begun:
                    await self._begin()
                else:
                    # All streams that a frame has woken write now, before the first of them sends: their sends, one
                    # after the other, find the proxy awake, and a send that wakes a process takes several times as
                    # long.
                    await asyncio.sleep(0)
                if self._beating is not None and not self._beating.done():
                    await asyncio.wait({self._beating})
                self._sent_at, self._is_taken = clock(), False
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
                self._is_taken = True
        if self._beating is not None:
            await asyncio.wait({self._beating})

    async def _begin(self) -> None:
        self._has_begun = True
        self._sent_at, self._is_taken = asyncio.get_running_loop().time(), False
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._headers(),
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        self._block_connection(self._is_beating)

    @property
    def _is_beating(self) -> bool:
        return self._beating is not None and not self._beating.done()

    def _block_connection(self, is_blocked: bool) -> None:
        if self._connection is not None:
            self._connection.is_blocked = is_blocked

    def _beat(self) -> None:
        """Send a comment if nothing was sent for a while. One timer a heartbeat, whatever goes out meanwhile."""
        loop = asyncio.get_running_loop()
        if not self._is_taken and loop.time() - self._sent_at >= UNREAD_S:
            self._is_unread = True
            self._sending.cancel()
            return
        sent_at = max(self._sent_at, 0.0 if self._connection is None else self._connection.sent_at)
        wait_s = sent_at + self._heartbeat_s - loop.time()
        if wait_s <= 0:
            wait_s = self._heartbeat_s
            if self._is_taken and (self._has_begun or self._may_begin()):
                self._sent_at, self._is_taken = loop.time(), False
                self._block_connection(True)
                self._beating = asyncio.create_task(self._send_heartbeat())
        self._timer = loop.call_later(wait_s, self._beat)

    async def _send_heartbeat(self) -> None:
        with suppress(OSError):  # the client is gone, which the next event finds out too
            if not self._has_begun:
                await self._begin()
            await self._send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
        self._is_taken = True
        self._block_connection(False)


class EventResponse(Response):
    """Events that begin at once. They end when their client goes away."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        heartbeat_s: float,
        timeout_s: float | None = None,
        headers: Callable[[], Mapping[str, str]] = dict,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        """A client that has not taken them in `timeout_s` counts as gone. See `EventStream` for the others."""
        super().__init__()
        self._stream = EventStream(events, headers=headers, heartbeat_s=heartbeat_s, may_begin=may_begin)
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with WhileConnected(receive):
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._stream.send_to(send)
            except TimeoutError:
                raise ClientGone from None
