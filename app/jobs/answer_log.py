"""The files of answers that are being generated.

Appended bytes wait in memory until they are written. A full disk delays its own answers only: the write is tried again.
A slow disk blocks the event loop once; after that, a thread writes. Readers get a byte once the file has the byte, so a
client never reads a token that the death of this process would lose.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from app.batches import AnswerEnd, AnswerPart
from app.disk import STORAGE_PAUSE_S, may_pass
from app.errors import NotFound, Unavailable

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 1024 * 1024  # of one answer, in memory because the storage does not take them
READ_BYTES = 256 * 1024  # of a file at once
_TAIL_BYTES = 16 * 1024  # the end of a file stays in memory for readers of a growing file
# A turn of writes that takes longer is slow. The event loop itself writes to a fast storage: a thread, which must wait
# for the interpreter's lock after each write, takes twice the time and comes late.
_SLOW_S = 0.01

Take = Callable[[bytes], bool]  # takes the next bytes of an answer; returns False where it leaves them


class _Descriptor:
    """An open file. It closes when the log and all writes in threads have let go of it."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_WRONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class AnswerLog:
    """The file of one answer. Belongs to one event loop."""

    def __init__(self, path: Path, writer: LogWriter, num_bytes: int, *, content: bytes = b"") -> None:
        """The file is there, and begins with `num_bytes` that count. Raises OSError.

        Where `content` is all that the file has, readers get a short one from memory.
        """
        self.path = path
        self.num_bytes = num_bytes  # in the file
        self._file = _Descriptor(path)
        self._writer = writer
        self._pending = bytearray()
        self._tail = bytearray(content[-_TAIL_BYTES:])
        self._end: AnswerEnd | None = None
        self._failure: Exception | None = None  # ends all reads and writes
        self._waiting: list[tuple[asyncio.Future[int], Take | None]] = []  # for a change

    async def append(self, data: bytes) -> None:
        """Write behind the end, soon. Waits while too much is waiting. Raises Unavailable for a broken storage."""
        self._pending += data
        self._writer.add(self)
        if len(self._pending) > MAX_PENDING_BYTES or self._failure is not None:
            await self.flush()

    async def flush(self) -> None:
        """Returns once all that was appended is in the file. Raises Unavailable for a broken storage."""
        while self._pending and self._failure is None:
            await self._change()
        if self._failure is not None:
            raise self._failure

    def sync(self) -> None:
        """Bring the file to the disk. Blocks. Raises OSError."""
        os.fsync(self._file.number)

    def close(self, end: AnswerEnd | None = None, failure: Exception | None = None) -> None:
        """Nothing more will be appended. Readers get the end, or the failure."""
        self._end, self._failure = end, self._failure or failure
        self._pending.clear()
        self._wake()

    async def parts(self, offset: int, *, waits: bool, take: Take | None = None) -> AsyncGenerator[AnswerPart, None]:
        """The bytes from `offset` on, and the end; `waits`: as they come. Raises the failure.

        A reader that waits for the next part gets new bytes by `take`, as long as `take` takes them: to wake the
        reader for each token would cost several times as much.
        """
        while True:
            if offset < self.num_bytes:
                data = await self._read(offset)
                offset += len(data)
                yield AnswerPart(data)
            elif self._end is not None:
                yield AnswerPart(b"", self._end)
                return
            elif self._failure is not None:
                raise self._failure
            elif not waits:
                return
            else:  # a reader of the file may be ahead of `num_bytes` for a moment, while a thread writes
                offset = max(offset, await self._change(take if offset == self.num_bytes else None))

    async def _read(self, offset: int) -> bytes:
        in_tail = offset - (self.num_bytes - len(self._tail))
        if in_tail >= 0:
            return bytes(self._tail[in_tail:])
        data = await asyncio.to_thread(read_piece, self.path, offset)
        return data[: self.num_bytes - offset]  # behind that a write is under way, or has failed half-way

    async def _change(self, take: Take | None = None) -> int:
        """Wait for a change that `take` leaves. Returns the number of bytes before that change."""
        change: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, take))
        return await change

    def _wake(self, data: bytes = b"") -> None:
        """Tell all that wait for a change: `data` was written, or something else has changed."""
        waiting, self._waiting = self._waiting, []
        for change, take in waiting:
            if change.done():  # its reader has left
                continue
            if data and take is not None and take(data):
                self._waiting.append((change, take))
            else:
                change.set_result(self.num_bytes - len(data))

    # The writer calls these methods:

    def work(self) -> _Work:
        """The next write: a file, a place in it, and the bytes."""
        return self._file, self.num_bytes, bytes(self._pending)

    def note_written(self, data: bytes) -> bool:
        """The file has these bytes now. Returns whether there are more bytes to write."""
        del self._pending[: len(data)]
        self.num_bytes += len(data)
        self._tail += data
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
        self._wake(data)
        return bool(self._pending)

    def note_broken(self, error: OSError) -> None:
        """The storage has refused the bytes for good: the answer fails."""
        logger.error("the answer %s cannot be stored: %s", self.path.name, error)
        self.close(failure=Unavailable("the server cannot store this answer; its log has the reason"))


_Work = tuple[_Descriptor, int, bytes]


class LogWriter:
    """Writes the appended bytes of all logs, in one turn."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds. It decides whether a storage is slow."""
        self._clock = clock
        self.is_slow = False  # the storage was, the last time
        self._waiting: dict[AnswerLog, None] = {}
        self._put_off: dict[AnswerLog, asyncio.TimerHandle] = {}  # the storage of these logs is full or gone
        self._writing: asyncio.Task[None] | None = None

    def add(self, log: AnswerLog) -> None:
        """A log has something to write."""
        if log not in self._put_off:
            self._waiting[log] = None
            if self._writing is None:
                self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Finish the writes that have begun, and begin no other."""
        for timer in self._put_off.values():
            timer.cancel()
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def _write(self) -> None:
        try:
            while self._waiting:
                logs, self._waiting = list(self._waiting), {}
                work = [log.work() for log in logs]
                began_at = self._clock()
                errors = await asyncio.to_thread(_write_all, work) if self.is_slow else _write_all(work)
                self.is_slow = self._clock() - began_at > _SLOW_S
                for log, (_, _, data), error in zip(logs, work, errors, strict=True):
                    if error is None:
                        if log.note_written(data):
                            self._waiting[log] = None
                    elif may_pass(error):
                        self._put_off_until_later(log, error)
                    else:
                        log.note_broken(error)
        finally:
            self._writing = None

    def _put_off_until_later(self, log: AnswerLog, error: OSError) -> None:
        if not self._put_off:
            logger.error("answers cannot be stored: %s; trying again every %.0f s", error, STORAGE_PAUSE_S)
        self._put_off[log] = asyncio.get_running_loop().call_later(STORAGE_PAUSE_S, self._try_again, log)

    def _try_again(self, log: AnswerLog) -> None:
        del self._put_off[log]
        self.add(log)


def _write_all(work: Sequence[_Work]) -> list[OSError | None]:
    """The error of each write, or None."""
    errors: list[OSError | None] = []
    for file, offset, data in work:
        try:
            _write_at(file.number, offset, data)
            errors.append(None)
        except OSError as error:
            errors.append(error)
    return errors


def _write_at(file: int, offset: int, data: bytes) -> None:
    """Write all of `data` to a place in a file. After an error the same call may be made again. Raises OSError."""
    view = memoryview(data)
    while view:
        num_written = os.pwrite(file, view, offset)  # a disk that becomes full may take a part
        view, offset = view[num_written:], offset + num_written


def create_file(path: Path, content: bytes) -> None:
    """Create a file with this content and sync it to the disk. Blocks. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        _write_at(file, 0, content)
        os.fsync(file)
    finally:
        os.close(file)


def read_piece(path: Path, offset: int) -> bytes:
    """The next bytes of a file; empty behind its end. Blocks. Raises NotFound where there is no such file any more."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise NotFound(f"there is no response {path.name!r} any more", code="response_not_found") from None
    try:
        return os.pread(file, READ_BYTES, offset)
    finally:
        os.close(file)


async def pieces_of(path: Path, offset: int = 0) -> AsyncGenerator[bytes, None]:
    """A file from a byte on, read in a thread. Raises NotFound and OSError."""
    while piece := await asyncio.to_thread(read_piece, path, offset):
        yield piece
        offset += len(piece)
