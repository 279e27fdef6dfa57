"""Streams all stored answers that an ingress is reading from the batches process over a single Serve call.

One call per part would use more CPU time than all other work on a token outside the engine. Each answer has its own
window and its own errors, so that a slow reader does not delay other readers.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from app.batches import AnswerEnd, AnswerPart
from app.errors import CarouselError, Failure, Unavailable, traceback_of

if TYPE_CHECKING:
    from app.jobs.local_service import LocalBatchService

WINDOW_BYTES = 512 * 1024  # maximum bytes of an answer that may be sent ahead of the reader
RETRY_S = 0.5  # pause before a change is sent again after a failure
MAX_MESSAGE_BYTES = 1024 * 1024  # a Serve call carries at most 4 MiB


@dataclass(frozen=True, slots=True)
class WantedAnswer:
    """The stored answer that a reader follows. The fields are the arguments of `BatchService.follow_response`."""

    owner: str
    response_id: str
    offset: int
    waits: bool
    is_continued: bool


@dataclass(slots=True)
class FeedChange:
    """The changes to an ingress's readers since the last message, by reader id."""

    opened: dict[int, WantedAnswer] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)  # bytes that readers have consumed
    closed: list[int] = field(default_factory=list)

    def requeue(self, failed: FeedChange) -> None:
        """Add a change that may not have arrived. The readers that it opened have failed, so they are closed."""
        for reader_id, num_bytes in failed.taken.items():
            self.taken[reader_id] = self.taken.get(reader_id, 0) + num_bytes
        self.closed += [*failed.closed, *failed.opened]


# (reader id, content). The content is the next bytes of the answer or, at its end, the `AnswerEnd`, an error, or None.
# Items are plain tuples, which are quick to pickle, because every token may be an item.
FeedItem = tuple[int, bytes | AnswerEnd | CarouselError | None]


class Feed:
    """The sending end of a stream, used in the batches process."""

    def __init__(self, service: LocalBatchService) -> None:
        self._service = service
        self._readers: dict[int, _Sending] = {}
        self._items: deque[FeedItem] = deque()
        self._wanted: asyncio.Future[None] | None = None  # set while the stream is waiting for an item

    def change(self, change: FeedChange) -> None:
        """Apply a change that the ingress reports: start and stop readers, and record consumed bytes."""
        for reader_id, wanted in change.opened.items():
            self._readers[reader_id] = _Sending(asyncio.create_task(self._read(reader_id, wanted)))
        for reader_id, num_bytes in change.taken.items():
            if reader_id in self._readers:
                self._readers[reader_id].note_taken(num_bytes)
        for reader_id in change.closed:
            if reader_id in self._readers:
                self._readers.pop(reader_id).task.cancel()

    async def messages(self) -> AsyncGenerator[list[FeedItem], None]:
        """Yield the items of all readers as they arrive. The first message is empty and signals an open stream."""
        try:
            yield []
            while True:
                if not self._items:
                    self._wanted = asyncio.get_running_loop().create_future()
                    await self._wanted
                yield self._next_message()
        finally:
            for reader in self._readers.values():
                reader.task.cancel()

    def _next_message(self) -> list[FeedItem]:
        message: list[FeedItem] = []
        num_bytes = 0
        while self._items and num_bytes < MAX_MESSAGE_BYTES - WINDOW_BYTES:
            message.append(self._items.popleft())
            content = message[-1][1]
            num_bytes += len(content) if isinstance(content, bytes) else 0
        return message

    async def _read(self, reader_id: int, wanted: WantedAnswer) -> None:
        end: AnswerEnd | CarouselError | None = None
        reader = self._readers[reader_id]
        take = partial(self._take, reader_id, reader)
        try:
            parts = self._service.follow_response(
                wanted.owner,
                wanted.response_id,
                wanted.offset,
                waits=wanted.waits,
                is_continued=wanted.is_continued,
                take=take,
            )
            async with aclosing(parts):
                async for part in parts:
                    while not take(part.data):
                        await reader.room()
                    end = part.end
        except CarouselError as raised:
            end = raised
        except Exception as raised:
            end = Failure(f"an answer could not be read: {traceback_of(raised)}")
        self._put((reader_id, end))
        self._readers.pop(reader_id, None)

    def _take(self, reader_id: int, reader: _Sending, data: bytes) -> bool:
        """Send bytes to a reader. Returns False without sending them if the reader's window is full."""
        if reader.is_full:
            return False
        if data:
            reader.num_bytes += len(data)
            self._put((reader_id, data))
        return True

    def _put(self, item: FeedItem) -> None:
        self._items.append(item)
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


class _Sending:
    """A reader's window: counts the bytes that were sent but not consumed yet."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.num_bytes = 0
        self._room: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether the reader must consume bytes before more are sent."""
        return self.num_bytes > WINDOW_BYTES

    async def room(self) -> None:
        """Wait until the reader has consumed bytes."""
        self._room = asyncio.get_running_loop().create_future()
        await self._room

    def note_taken(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


OpenStream = Callable[[str], AsyncIterator[list[FeedItem]]]
SendChange = Callable[[str, FeedChange], Awaitable[None]]


class Following:
    """The receiving end of a stream, used in an ingress. Opens the stream for the first reader, and serves all."""

    def __init__(self, open_stream: OpenStream, send_change: SendChange) -> None:
        """`open_stream` opens a stream with an id; `send_change` reports a change. Both may raise CarouselErrors."""
        self._open_stream = open_stream
        self._send_change = send_change
        self._readers: dict[int, _Receiving] = {}
        self._ids = count()
        self._streaming: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None  # exists while there are changes to report
        self._change = FeedChange()
        self._is_there = asyncio.Event()  # set while the stream is open

    async def follow(self, wanted: WantedAnswer) -> AsyncGenerator[AnswerPart, None]:
        """Yield the parts of an answer. Raises the answer's error, or Unavailable if the stream breaks."""
        reader_id, reader = next(self._ids), _Receiving()
        self._readers[reader_id] = reader
        if self._streaming is None:
            # An empty context, because Serve would cancel the task with the request in whose context it was created.
            self._streaming = asyncio.create_task(self._stream(), context=Context())
        self._change.opened[reader_id] = wanted
        self._tell()
        try:
            while (part := await reader.next()) is not None:
                yield part
                if num_bytes := reader.take(len(part.data)):
                    self._change.taken[reader_id] = self._change.taken.get(reader_id, 0) + num_bytes
                    self._tell()
        finally:
            del self._readers[reader_id]
            if not reader.has_ended and self._change.opened.pop(reader_id, None) is None:
                self._change.closed.append(reader_id)
                self._tell()

    async def _stream(self) -> None:
        error: CarouselError = Unavailable("the batches process has ended its stream")
        stream_id = self._stream_id = uuid.uuid4().hex
        try:
            async for message in self._open_stream(stream_id):
                self._is_there.set()
                for reader_id, content in message:
                    reader = self._readers.get(reader_id)
                    if reader is not None:
                        reader.put(content)
        except CarouselError as raised:
            error = raised
        finally:
            self._streaming = None
            self._is_there.clear()
            self._change = FeedChange()
            for reader in self._readers.values():
                reader.put(error)

    def _tell(self) -> None:
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), context=Context())

    async def _send(self) -> None:
        try:
            while self._change != FeedChange() and self._streaming is not None:
                there = asyncio.create_task(self._is_there.wait())
                await asyncio.wait({there, self._streaming}, return_when=asyncio.FIRST_COMPLETED)
                there.cancel()
                change, self._change = self._change, FeedChange()
                try:
                    if self._streaming is not None:
                        await self._send_change(self._stream_id, change)
                except CarouselError as error:
                    for reader_id in change.opened.keys() & self._readers.keys():
                        self._readers[reader_id].put(error)
                    if self._streaming is not None:
                        self._change.requeue(change)
                        await asyncio.wait({self._streaming}, timeout=RETRY_S)
        finally:
            self._sending = None


class _Receiving:
    """A reader's buffer of bytes that have arrived but have not been consumed."""

    def __init__(self) -> None:
        self.has_ended = False  # whether the last item for this reader has arrived
        self._data: list[bytes] = []
        self._end: AnswerEnd | CarouselError | None = None
        self._news: asyncio.Future[None] | None = None
        self._num_unreported = 0

    def put(self, content: bytes | AnswerEnd | CarouselError | None) -> None:
        """Add bytes that have arrived, or the end of the answer."""
        if isinstance(content, bytes):
            self._data.append(content)
        elif not self.has_ended:
            self.has_ended, self._end = True, content
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def next(self) -> AnswerPart | None:
        """Wait for bytes and return all that have arrived, or None at the end. Raises the answer's error, if any."""
        if not self._data and not self.has_ended:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        if self._data:
            data, self._data = b"".join(self._data), []
            return AnswerPart(data)
        end, self._end = self._end, None
        if isinstance(end, CarouselError):
            raise end
        return None if end is None else AnswerPart(b"", end)

    def take(self, num_bytes: int) -> int:
        """Record bytes that the reader has consumed. Returns the number to report now, or 0 if there are only few."""
        self._num_unreported += num_bytes
        if self._num_unreported < WINDOW_BYTES // 2:
            return 0
        told, self._num_unreported = self._num_unreported, 0
        return told
