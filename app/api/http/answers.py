"""Answers that may be large: written in pieces, and only while their clients read."""

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
    """The content of a file, or another text in pieces, which ends when its client does not read any more."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, _while_read(send))


class JsonAnswer(Response):
    """An answer with `Rows` is sent as it is written, one piece in each turn of the event loop; others at once."""

    def __init__(self, value: Any, turns: asyncio.Lock, headers: Mapping[str, str] | None = None) -> None:
        """The answers of a process share `turns`: however many are written, the event loop waits for one piece."""
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
    """As `send`. It raises ClientGone once the client has not taken a message for `UNREAD_S`, as a stream does.

    Otherwise a client that does not read would keep its place, and the piece that it was sent, for as long as it likes.
    """

    async def send_while_read(message: Message) -> None:
        try:
            async with asyncio.timeout(UNREAD_S):
                await send(message)
        except OSError as error:  # TimeoutError, and how newer ASGI servers say that a connection is closed
            raise ClientGone from error

    return send_while_read
