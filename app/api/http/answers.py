"""Responses that may be large. The server sends them in pieces, and stops when the client stops reading."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import chain
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.api.http.errors import ClientGone
from app.api.http.sse import UNREAD_S
from app.json_pieces import json_pieces


class FileAnswer(StreamingResponse):
    """Streams a file or another long text. Raises ClientGone when the client stops reading."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, _while_read(send))


class JsonAnswer(Response):
    """A JSON response. A long value with `Rows` is encoded and sent piece by piece."""

    def __init__(self, value: Any, turns: asyncio.Lock, headers: Mapping[str, str] | None = None) -> None:
        """A process's responses share the lock `turns`, so the event loop encodes at most one piece per iteration."""
        pieces = json_pieces(value)
        super().__init__(next(pieces), headers=headers, media_type="application/json")
        self._turns = turns
        self._second = next(pieces, None)
        self._others = pieces
        if self._second is not None:
            del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._second is None:
            await super().__call__(scope, receive, send)
            return
        send = _while_read(send)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pieces = chain((bytes(self.body), self._second), self._others)
        while True:
            async with self._turns:
                await asyncio.sleep(0)
                piece = next(pieces, None)
            if piece is None:
                break
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _while_read(send: Send) -> Send:
    """Return a `send` that raises ClientGone if the client does not accept a message within `UNREAD_S`.

    Without this limit, a client that does not read would hold its slot and the unsent piece indefinitely.
    """

    async def send_while_read(message: Message) -> None:
        try:
            async with asyncio.timeout(UNREAD_S):
                await send(message)
        except OSError as error:  # a TimeoutError, or the error of newer ASGI servers for a closed connection
            raise ClientGone from error

    return send_while_read
