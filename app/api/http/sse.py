"""Server-sent events: the framing, and a response that ends its events when the client goes away."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.http.errors import ClientGone

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": still here\n\n"  # a comment: clients skip it

T = TypeVar("T")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encoded(text: str) -> bytes:
    """A text as the JSON of events has it."""
    return _encode(text).encode()


def event(payload: Mapping[str, Any]) -> bytes:
    """One event: the payload as JSON on one line."""
    return f"data: {_encode(payload)}\n\n".encode()


def named_event(payload: Mapping[str, Any]) -> bytes:
    """One event whose name is the payload's type."""
    return f"event: {payload['type']}\n".encode() + event(payload)


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; when the client goes away first, cancel it, let it clean up and raise ClientGone.

    The request's body must have been read: afterwards a disconnect is all that `receive` can bring.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if watcher.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def begin_event_stream(
    receive: Receive,
    events: AsyncGenerator[bytes, None],
    *,
    heartbeat_s: float,
    may_begin: Callable[[], bool],
) -> Response:
    """Wait for the first event, so that an error before it can still have a status of its own.

    After `heartbeat_s` without one the stream begins all the same where it `may_begin`, for example when the request is
    queued: its client and all that is between would else think that nobody is there. From then on a comment goes out
    whenever nothing else has for `heartbeat_s`; that is also how a client that vanished without a word is noticed.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        while True:
            await unless_disconnected(receive, asyncio.wait({first}, timeout=heartbeat_s))
            if first.done():
                first.result()
                break
            if may_begin():
                break
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()
        raise
    return _EventStreamResponse(first, events, heartbeat_s=heartbeat_s)


class _EventStreamResponse(Response):
    """Sends a first event and those that follow as they come; closes their source whatever happens.

    Raises ClientGone when the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(self, first: asyncio.Future[bytes], rest: AsyncGenerator[bytes, None], *, heartbeat_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._heartbeat_s = heartbeat_s
        self._sent_at = 0.0  # by the event loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        keeping_open = asyncio.ensure_future(self._keep_open(send))
        try:
            async with aclosing(self._rest):
                await unless_disconnected(receive, self._send_all(send))
        finally:
            self._first.cancel()
            keeping_open.cancel()
            await asyncio.gather(self._first, keeping_open, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if not self._first.done():
                await send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
            self._sent_at = clock()
            await send({"type": "http.response.body", "body": await self._first, "more_body": True})
            async for data in self._rest:
                # The streams that a frame has woken all write now, before the first of them sends: one after the
                # other, their sends find the proxy awake, and a send that wakes somebody takes several times as long.
                await asyncio.sleep(0)
                self._sent_at = clock()
                await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sent_at = math.inf  # nothing may follow
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError as error:  # how newer ASGI servers say that nobody reads
            raise ClientGone from error

    async def _keep_open(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for a while. One timer a heartbeat, whatever goes out meanwhile."""
        clock = asyncio.get_running_loop().time
        wait_s = self._heartbeat_s
        while wait_s < math.inf:
            await asyncio.sleep(wait_s)
            wait_s = self._sent_at + self._heartbeat_s - clock()
            if wait_s <= 0:
                self._sent_at = clock()
                wait_s = self._heartbeat_s
                await send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
