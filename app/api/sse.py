"""Server-sent events: the framing, and a response that ends its events when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.errors import ClientGone

DONE = b"data: [DONE]\n\n"

T = TypeVar("T")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encoded(text: str) -> bytes:
    """A text as the JSON of events has it."""
    return _encode(text).encode()


def event(payload: Mapping[str, Any]) -> bytes:
    """One event: the payload as JSON on one line."""
    return f"data: {_encode(payload)}\n\n".encode()


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


async def begin_event_stream(receive: Receive, events: AsyncGenerator[bytes, None]) -> Response:
    """Wait for the first event, so that an error before it can still have a status of its own."""
    try:
        first = await unless_disconnected(receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return _EventStreamResponse(first, events)


class _EventStreamResponse(Response):
    """Sends a first event and those that follow as they come; closes their source whatever happens.

    Raises ClientGone when the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in self._rest:
                # The streams that a frame has woken all write now, before the first of them sends: one after the
                # other, their sends find the proxy awake, and a send that wakes somebody takes several times as long.
                await asyncio.sleep(0)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError as error:  # how newer ASGI servers say that nobody reads
            raise ClientGone from error
