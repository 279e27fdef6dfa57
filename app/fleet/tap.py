"""The ingress's end of a replica's stream of frames."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from app.fleet.frame import Frame
from app.fleet.port import Address, Hello
from app.fleet.wire import Decoder

_CONNECT_TIMEOUT_S = 5.0


async def frames_from(address: Address, ingress_id: str, *, heartbeat_s: float) -> AsyncGenerator[Frame, None]:
    """What the replica at `address` says to this ingress from now on, at least every `heartbeat_s`.

    Ends when the replica closes the stream.

    Raises:
        OSError, TimeoutError: it cannot be reached, or the connection broke.
        ValueError, TypeError: what came is no frame.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        transport, tap = await loop.create_connection(_Tap, address.host, address.port)
    try:
        transport.write(Hello(address.secret, ingress_id, heartbeat_s).line())
        while (frame := await tap.next()) is not None:
            yield frame
    finally:
        transport.abort()


class _Tap(asyncio.Protocol):
    """Frames that have come and are not read yet: as many as one `recv` brings, for their reader runs next."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._frames: deque[Frame] = deque()
        self._is_over = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # while it waits

    def data_received(self, data: bytes) -> None:
        try:
            self._frames.extend(self._decoder.feed(data))
        except (ValueError, TypeError) as error:
            self._is_over, self._error = True, error
        self._wake_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._error = self._error or exc
        self._wake_reader()

    async def next(self) -> Frame | None:
        """The next frame; None when the replica has closed the stream. Raises what broke it."""
        while not self._frames and not self._is_over:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._frames:
            return self._frames.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
