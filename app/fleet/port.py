"""The socket on which a replica hands out its frames. Only those whom it has told its secret get any."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple, cast

from app.fleet.frame import Frame
from app.fleet.outbox import Outbox
from app.fleet.wire import encode

logger = logging.getLogger(__name__)

MAX_HELLO_BYTES = 1024
_HELLO_TIMEOUT_S = 5.0
_MAX_STRANGERS = 64  # who have not said their secret yet; more are turned away


class Address(NamedTuple):
    """Where a replica's frames are to be had, and by which word."""

    host: str
    port: int
    secret: str


class Hello(NamedTuple):
    """What an ingress says first, on one line, and all it ever says."""

    secret: str
    ingress_id: str
    heartbeat_s: float

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(self).encode() + b"\n"


class FramePort:
    """Listens on one address of this machine. Belongs to the event loop that opens it.

    A stream of its own beside Serve's calls: there, the way of one frame costs more than all that is in it.
    """

    def __init__(self, host: str, outbox_of: Callable[[str], Outbox]) -> None:
        """`outbox_of(ingress_id)` is where the frames of one ingress come from."""
        self._host = host
        self._outbox_of = outbox_of
        self._secret = secrets.token_hex(16)
        self._opening: asyncio.Task[asyncio.Server] | None = None
        self._num_strangers = 0
        self._talks: set[asyncio.Task[None]] = set()  # one for each connection

    async def open(self) -> Address:
        """Listen, if it does not yet, and tell where. Raises OSError when this machine does not have that address."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(
                asyncio.start_server(self._accept, self._host, 0, limit=MAX_HELLO_BYTES)
            )
        server = await asyncio.shield(self._opening)
        host, port = server.sockets[0].getsockname()[:2]
        return Address(host, port, self._secret)

    async def close(self) -> None:
        """Listen no more, and close all connections."""
        if self._opening is not None:
            (await self._opening).close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        talk = asyncio.get_running_loop().create_task(self._talk(reader, writer))
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)

    async def _talk(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            hello = await self._hello(reader)
            if hello is not None:
                await self._send_frames(hello, writer)
        except (OSError, TimeoutError):
            logger.debug("a reader of frames has gone")
        finally:
            writer.close()

    async def _hello(self, reader: StreamReader) -> Hello | None:
        """Who is there; None for somebody who has no business here."""
        if self._num_strangers >= _MAX_STRANGERS:
            return None
        self._num_strangers += 1
        try:
            line = await asyncio.wait_for(reader.readline(), _HELLO_TIMEOUT_S)
            hello = Hello._make(json.loads(line))
            is_known = hmac.compare_digest(hello.secret, self._secret)
        except (ValueError, TypeError):  # too long, no JSON, or not these three
            is_known = False
        finally:
            self._num_strangers -= 1
        return hello if is_known else None

    async def _send_frames(self, hello: Hello, writer: StreamWriter) -> None:
        outbox = self._outbox_of(hello.ingress_id)
        frames = cast(AsyncGenerator[Frame, None], outbox.frames(heartbeat_s=hello.heartbeat_s))
        async with aclosing(frames):
            async for frame in frames:
                writer.write(encode(frame))
                await writer.drain()  # a slow reader gets fewer and longer frames
