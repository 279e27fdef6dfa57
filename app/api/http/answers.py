"""JSON answers that may be large: written in pieces, one of them in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import chain
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.json_pieces import json_pieces


class JsonAnswer(Response):
    """An answer with `Rows` is sent as it is written; one without is sent at once."""

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
