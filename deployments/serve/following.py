"""Carries the parts of stored answers from the process of batches to an ingress, all in one stream of messages.

One call for each part would cost more CPU than the rest of a token's way. Each answer has its own window and fails
alone: a slow reader delays no other reader.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass, field
from itertools import count

from app.batches import AnswerPart, BatchService
from app.errors import CarouselError, Failure, Unavailable, traceback_of

WINDOW_BYTES = 512 * 1024  # of one answer, sent and not taken by its reader
MAX_MESSAGE_BYTES = 1024 * 1024  # Serve's calls carry 4 MiB at most


@dataclass(frozen=True, slots=True)
class WantedAnswer:
    """An answer that a reader wants, and the arguments of `BatchService.follow_response`."""

    owner: str
    response_id: str
    offset: int
    waits: bool
    is_continued: bool


@dataclass(slots=True)
class FeedChange:
    """A change in the readers of an ingress."""

    opened: dict[int, WantedAnswer] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)  # bytes that a reader has taken since it was told last
    closed: list[int] = field(default_factory=list)


# A part for a reader, or the end of its parts: with the error that ended them, or None.
FeedItem = tuple[int, AnswerPart | None, CarouselError | None]


class Feed:
    """The end of one stream in the process of batches."""

    def __init__(self, service: BatchService) -> None:
        self._service = service
        self._readers: dict[int, _Sending] = {}
        self._items: deque[FeedItem] = deque()
        self._wanted: asyncio.Future[None] | None = None  # while the stream has nothing to send

    def change(self, change: FeedChange) -> None:
        """Apply a change that the ingress reports."""
        for reader_id, wanted in change.opened.items():
            self._readers[reader_id] = _Sending(asyncio.create_task(self._read(reader_id, wanted)))
        for reader_id, num_bytes in change.taken.items():
            if reader_id in self._readers:
                self._readers[reader_id].note_taken(num_bytes)
        for reader_id in change.closed:
            if reader_id in self._readers:
                self._readers.pop(reader_id).task.cancel()

    async def messages(self) -> AsyncGenerator[list[FeedItem], None]:
        """The parts for all readers, as they arrive. The first message is empty and says that the stream is open."""
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
            part = message[-1][1]
            num_bytes += 0 if part is None else len(part.data)
        return message

    async def _read(self, reader_id: int, wanted: WantedAnswer) -> None:
        error: CarouselError | None = None
        reader = self._readers[reader_id]
        try:
            parts = self._service.follow_response(
                wanted.owner,
                wanted.response_id,
                wanted.offset,
                waits=wanted.waits,
                is_continued=wanted.is_continued,
            )
            async with aclosing(parts):
                async for part in parts:
                    self._put(reader_id, part, None)
                    if reader.sent(len(part.data)):
                        await reader.room()
        except CarouselError as raised:
            error = raised
        except Exception as raised:
            error = Failure(f"an answer could not be read: {traceback_of(raised)}")
        self._put(reader_id, None, error)
        self._readers.pop(reader_id, None)

    def _put(self, reader_id: int, part: AnswerPart | None, error: CarouselError | None) -> None:
        self._items.append((reader_id, part, error))
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


class _Sending:
    """The bytes on their way to one reader."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self._num_bytes = 0
        self._room: asyncio.Future[None] | None = None

    def sent(self, num_bytes: int) -> bool:
        """Count bytes that were sent. Returns whether more than the window is on its way."""
        self._num_bytes += num_bytes
        return self._num_bytes > WINDOW_BYTES

    async def room(self) -> None:
        """Wait until no more than the window is on its way."""
        while self._num_bytes > WINDOW_BYTES:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def note_taken(self, num_bytes: int) -> None:
        """Count bytes that the reader has taken."""
        self._num_bytes -= num_bytes
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


OpenStream = Callable[[str], AsyncIterator[list[FeedItem]]]
SendChange = Callable[[str, FeedChange], Awaitable[None]]


class Following:
    """The end of the stream in an ingress, and all answers that it reads."""

    def __init__(self, open_stream: OpenStream, send_change: SendChange) -> None:
        """`open_stream` opens a stream, `send_change` sends a change to its other end. Both raise CarouselErrors."""
        self._open_stream = open_stream
        self._send_change = send_change
        self._readers: dict[int, _Receiving] = {}
        self._ids = count()
        self._streaming: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None  # while there is anything to tell
        self._change = FeedChange()
        self._is_there = asyncio.Event()  # the stream has begun

    async def follow(self, wanted: WantedAnswer) -> AsyncGenerator[AnswerPart, None]:
        """The parts of one answer. Raises its error, and Unavailable when the stream breaks off."""
        reader_id, reader = next(self._ids), _Receiving()
        self._readers[reader_id] = reader
        if self._streaming is None:
            # An empty context: Serve would cancel the task together with the request that started it.
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
        error: CarouselError = Unavailable("the process of batches has ended its stream")
        stream_id = self._stream_id = uuid.uuid4().hex
        try:
            async for message in self._open_stream(stream_id):
                self._is_there.set()
                for reader_id, part, ended_by in message:
                    reader = self._readers.get(reader_id)
                    if reader is not None:
                        reader.put(part, ended_by)
        except CarouselError as raised:
            error = raised
        finally:
            self._streaming = None
            self._is_there.clear()
            self._change = FeedChange()
            for reader in self._readers.values():
                reader.put(None, error)

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
                        self._readers[reader_id].put(None, error)
        finally:
            self._sending = None


class _Receiving:
    """The parts for one reader that it has not taken yet."""

    def __init__(self) -> None:
        self.has_ended = False  # the process of batches sends nothing more
        self._parts: deque[AnswerPart] = deque()
        self._error: CarouselError | None = None
        self._news: asyncio.Future[None] | None = None
        self._num_untold = 0

    def put(self, part: AnswerPart | None, error: CarouselError | None) -> None:
        """A part has come, or the end of the parts."""
        if part is None:
            self.has_ended, self._error = True, self._error or error
        else:
            self._parts.append(part)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def next(self) -> AnswerPart | None:
        """The next part; None at the end. Raises the error that ended them."""
        while not self._parts:
            if self.has_ended:
                if self._error is not None:
                    raise self._error
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._parts.popleft()

    def take(self, num_bytes: int) -> int:
        """Count bytes that were taken. Returns the number to report, or 0 while the report can wait."""
        self._num_untold += num_bytes
        if self._num_untold < WINDOW_BYTES // 2:
            return 0
        told, self._num_untold = self._num_untold, 0
        return told
