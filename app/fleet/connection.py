"""The connection to one replica, opened again for as long as the replica is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from app.fleet.frame_client import FrameReader
from app.fleet.frames import Message, encode
from app.fleet.in_flight import ReplicaLost

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0


class ReplicaConnection:
    """Keeps a stream to one replica open. Its owner gets every loss; frames go where the reader puts them."""

    def __init__(
        self,
        replica_id: str,
        make_reader: Callable[[], FrameReader],
        connect: Callable[[FrameReader], Awaitable[asyncio.Transport]],
        on_lost: Callable[[str, ReplicaLost], None],
    ) -> None:
        """`connect` opens a stream for a reader.

        `on_lost(replica_id, lost)` is called whenever the stream ends: frames may be missing from then on.
        """
        self._replica_id = replica_id
        self._make_reader = make_reader
        self._connect = connect
        self._on_lost = on_lost
        self._reader: FrameReader | None = None
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []  # messages of this turn of the event loop
        self._keeping_open = asyncio.get_running_loop().create_task(self._keep_open())

    @property
    def is_open(self) -> bool:
        """Whether the replica takes messages now."""
        return self._transport is not None and self._reader is not None and self._reader.is_open

    def send(self, message: Message) -> None:
        """Send a message, while there is a stream. What is sent on a stream that breaks may be lost with it.

        All messages of one turn of the event loop are written at once: to write may wake the replica's process, which
        takes longer than all else that is done for a message.
        """
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(encode(message))

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None:
            self._transport.write(b"".join(outgoing))

    def close(self) -> None:
        """Read no more. `on_lost` is not called."""
        self._keeping_open.cancel()

    async def _keep_open(self) -> None:
        loop, delay_s = asyncio.get_running_loop(), _FIRST_DELAY_S
        while True:
            began_at = loop.time()
            lost = await self._read_stream()
            logger.warning("replica %s: %s", self._replica_id, lost)
            self._on_lost(self._replica_id, lost)
            lasted_s = loop.time() - began_at
            delay_s = _FIRST_DELAY_S if lasted_s > 2 * _LONGEST_DELAY_S else min(2 * delay_s, _LONGEST_DELAY_S)
            await asyncio.sleep(delay_s)

    async def _read_stream(self) -> ReplicaLost:
        """Read one stream to its end; returns why it ended."""
        reader = self._reader = self._make_reader()
        holding = asyncio.get_running_loop().create_task(self._hold(reader))
        try:
            return await reader.ended()
        finally:
            reader.end(None)
            holding.cancel()

    async def _hold(self, reader: FrameReader) -> None:
        """Open a stream and hold it until this is cancelled."""
        try:
            transport = self._transport = await self._connect(reader)
        except Exception as error:
            reader.end(error)
            return
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._transport = None
            transport.close()
