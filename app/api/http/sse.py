"""A stream of server-sent events that stops when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.http.errors import ClientGone

HEARTBEAT = b": still here\n\n"  # a comment, which clients ignore
# A stream stops if the connection accepts no message for this long. Otherwise, a client that does not read would keep
# its request running on a replica and all of its output in memory.
UNREAD_S = 60.0
SEND_NOW = "carousel.send_now"  # an ASGI extension; its value in the scope is a `Connection`


@dataclass(eq=False)
class WhileConnected:
    """Async context manager that cancels its block and raises ClientGone when the client disconnects.

    Read the body of the request first, so that `receive` can only return a disconnect. The block runs in the current
    task, as with `asyncio.timeout`.
    """

    receive: Receive
    is_gone: bool = False

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
            if not self.is_gone:
                raise
        finally:
            # The watcher's traceback refers to this object. The cycle would keep the request in memory until the
            # garbage collector runs.
            del self._watcher
        if self.is_gone and self._task.uncancel() <= self._num_cancelled:  # nothing else cancelled the task
            raise ClientGone from None

    async def _watch(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        self._task.cancel()


class Connection(Protocol):
    """Sends events of an `EventStream` directly, without the stream's task.

    A server that supports direct sending puts a connection into each request's scope, as the ASGI extension `SEND_NOW`.
    """

    loop: asyncio.AbstractEventLoop  # only tasks of this loop may use the connection
    is_blocked: bool  # true before the stream starts, while it is sending a comment, and after its end
    sent_at: float  # time of the last event, on the event loop's clock

    def may_send(self) -> bool:
        """Return whether an event may be sent now: the connection is not blocked, and the client has read enough."""

    def send(self, data: bytes) -> None:
        """Send one or more events."""


def connection_of(scope: Scope) -> Connection | None:
    """Return the request's connection, or None if the server lacks the extension or runs in another event loop."""
    connection: Connection | None = scope.get("extensions", {}).get(SEND_NOW)
    return connection if connection is not None and connection.loop is asyncio.get_running_loop() else None


@dataclass(kw_only=True, eq=False)
class EventStream:
    """A response that sends each server-sent event as soon as the event is available.

    No byte is sent before the first event, so that an earlier error can still set the status of the response.

    After `heartbeat_s` without an event, the stream starts early if `may_begin()` returns true, for example because the
    request is queued. Otherwise, a client or proxy would close the silent connection. From then on, the stream sends a
    comment after every `heartbeat_s` of silence, which also detects clients that have vanished. `headers` is called
    when the stream starts. A client that accepts no message for `UNREAD_S` counts as gone. `connection` may send events
    while the stream waits for the next element of `events`.
    """

    events: AsyncGenerator[bytes, None] = field(kw_only=False)
    headers: Callable[[], Mapping[str, str]]
    heartbeat_s: float
    may_begin: Callable[[], bool]
    connection: Connection | None = None
    _has_begun: bool = field(default=False, init=False)
    # Time at which the last message was passed to the server, on the event loop's clock.
    _sent_at: float = field(default=0.0, init=False)
    # Whether the server has accepted the last message. The server waits until the client has read enough of them.
    _is_taken: bool = field(default=True, init=False)
    _is_unread: bool = field(default=False, init=False)  # the client has not read for `UNREAD_S`

    async def send_to(self, send: Send) -> None:
        """Send all events. Raises ClientGone if the client stops reading, and any error that the events raise."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "requests are served in tasks"
        self._sent_at = loop.time()
        self._send = send
        self._beating: asyncio.Task[None] | None = None
        self._timer = loop.call_later(self.heartbeat_s, self._beat)
        try:
            # Resuming a task re-enters every awaiting coroutine. In the caller's task, these would be about twenty
            # coroutines of the HTTP server, Serve and the routers, twice for each event. A separate task avoids them.
            self._sending = asyncio.create_task(self._send_all(), name=task.get_name())
            await self._sending
            self._timer.cancel()  # no heartbeat may follow the last message
            # The server reports a disconnect after the last message. The caller's task sends this message, so that the
            # caller is no longer waiting for another task when the disconnect arrives.
            async with asyncio.timeout(UNREAD_S):
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError as error:  # a TimeoutError, or the error of newer ASGI servers for a closed connection
            raise ClientGone from error
        except asyncio.CancelledError:
            if self._is_unread and not task.cancelling():
                raise ClientGone from None
            raise
        finally:
            self._block_connection(True)
            self._timer.cancel()
            del self._sending  # otherwise an error's traceback and this object would be a reference cycle
            if self._beating is not None:
                self._beating.cancel()
                await asyncio.wait({self._beating})

    async def _send_all(self) -> None:
        clock = asyncio.get_running_loop().time
        async with aclosing(self.events):
            async for data in self.events:
                if not self._has_begun:
                    await self._begin()
                else:
                    # One frame from a replica wakes many streams. Let all of them encode their events before the first
                    # one sends: a send that wakes the proxy takes several times longer than the sends after it.
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
            **self.headers(),
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        self._block_connection(self._is_beating)

    @property
    def _is_beating(self) -> bool:
        return self._beating is not None and not self._beating.done()

    def _block_connection(self, is_blocked: bool) -> None:
        if self.connection is not None:
            self.connection.is_blocked = is_blocked

    def _beat(self) -> None:
        """Send a comment if nothing was sent for `heartbeat_s`. Restarting the timer for each event would be slower."""
        loop = asyncio.get_running_loop()
        if not self._is_taken and loop.time() - self._sent_at >= UNREAD_S:
            self._is_unread = True
            self._sending.cancel()
            return
        sent_at = max(self._sent_at, 0.0 if self.connection is None else self.connection.sent_at)
        wait_s = sent_at + self.heartbeat_s - loop.time()
        if wait_s <= 0:
            wait_s = self.heartbeat_s
            if self._is_taken and (self._has_begun or self.may_begin()):
                self._sent_at, self._is_taken = loop.time(), False
                self._block_connection(True)
                self._beating = asyncio.create_task(self._send_heartbeat())
        self._timer = loop.call_later(wait_s, self._beat)

    async def _send_heartbeat(self) -> None:
        with suppress(OSError):  # the client is gone; sending the next event raises the same error
            if not self._has_begun:
                await self._begin()
            await self._send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
        self._is_taken = True
        self._block_connection(False)


class EventResponse(Response):
    """A response with a stream of events, which stops when its client disconnects."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        heartbeat_s: float,
        timeout_s: float | None = None,
        headers: Callable[[], Mapping[str, str]] = dict,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        """A client that has not accepted all events within `timeout_s` counts as gone. See `EventStream`."""
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
