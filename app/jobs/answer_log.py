"""The files of answers that are being generated.

Appended bytes wait in memory until they are written. A full disk delays only the answers on that disk: the write is
retried. A slow disk blocks the event loop once; after that, a thread writes. Readers get a byte only after the file has
the byte, so a client never reads a token that would be lost if this process died.
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

MAX_PENDING_BYTES = 1024 * 1024  # unwritten bytes of one answer; with more, `append` waits until all are written
READ_BYTES = 256 * 1024  # the most bytes that one read of a file returns
_TAIL_BYTES = 16 * 1024  # the end of a file stays in memory for readers of a growing file
# A round of writes that takes longer is slow. The event loop itself writes to a fast storage: a thread would have to
# wait for the interpreter's lock after each write, which doubles the time and delays the readers.
_SLOW_S = 0.01

Take = Callable[[bytes], bool]  # receives the next bytes of an answer; returns False to refuse the bytes


class _Descriptor:
    """An open file, which closes when the log and all writes in threads have dropped their references."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_WRONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class AnswerLog:
    """The file of one answer. Belongs to one event loop."""

    def __init__(self, path: Path, writer: LogWriter, num_bytes: int, *, content: bytes = b"") -> None:
        """Open an existing file, whose first `num_bytes` bytes are valid. Raises OSError.

        `content`, if given, is the whole content of the file. Readers then get the end of the file from memory.
        """
        self.path = path
        self.num_bytes = num_bytes  # the valid bytes in the file
        self._file = _Descriptor(path)
        self._writer = writer
        self._pending = bytearray()
        self._tail = bytearray(content[-_TAIL_BYTES:])
        self._end: AnswerEnd | None = None
        self._failure: Exception | None = None  # raised by all later reads and writes
        self._waiting: list[tuple[asyncio.Future[int], Take | None]] = []  # readers and writers that await a change

    async def append(self, data: bytes) -> None:
        """Queue bytes for writing. Waits if too many bytes are unwritten. Raises Unavailable for a broken storage."""
        self._pending += data
        self._writer.add(self)
        if len(self._pending) > MAX_PENDING_BYTES or self._failure is not None:
            await self.flush()

    async def flush(self) -> None:
        """Wait until all appended bytes are in the file. Raises Unavailable if the storage is broken."""
        while self._pending and self._failure is None:
            await self._change()
        if self._failure is not None:
            raise self._failure

    def sync(self) -> None:
        """Sync the file to the disk. Blocks. Raises OSError."""
        os.fsync(self._file.number)

    def close(self, end: AnswerEnd | None = None, failure: Exception | None = None) -> None:
        """End the answer, dropping unwritten bytes. Readers get the end or the failure."""
        self._end, self._failure = end, self._failure or failure
        self._pending.clear()
        self._wake()

    async def parts(self, offset: int, *, waits: bool, take: Take | None = None) -> AsyncGenerator[AnswerPart, None]:
        """Yield the bytes from `offset` on, then the end; `waits` includes bytes that come later. Raises the failure.

        While a reader waits for the next part, new bytes go to `take` until `take` refuses some: waking the reader for
        each token would cost several times as much.
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
            else:  # while a thread writes, a reader of the file may be ahead of `num_bytes` for a moment
                offset = max(offset, await self._change(take if offset == self.num_bytes else None))

    async def _read(self, offset: int) -> bytes:
        in_tail = offset - (self.num_bytes - len(self._tail))
        if in_tail >= 0:
            return bytes(self._tail[in_tail:])
        data = await asyncio.to_thread(read_piece, self.path, offset)
        return data[: self.num_bytes - offset]  # later bytes belong to a write that is in progress or failed half-way

    async def _change(self, take: Take | None = None) -> int:
        """Wait for a change that `take` does not accept. Returns the number of bytes before that change."""
        change: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, take))
        return await change

    def _wake(self, data: bytes = b"") -> None:
        """Tell all waiting callers that `data` was written, or that something else changed if `data` is empty."""
        waiting, self._waiting = self._waiting, []
        for change, take in waiting:
            if change.done():  # the reader has left
                continue
            if data and take is not None and take(data):
                self._waiting.append((change, take))
            else:
                change.set_result(self.num_bytes - len(data))

    # The writer calls these methods:

    def work(self) -> _Work:
        """Return the next write: the file, the offset in the file, and the bytes."""
        return self._file, self.num_bytes, bytes(self._pending)

    def note_written(self, data: bytes) -> bool:
        """Note that the file has these bytes now. Returns whether there are more bytes to write."""
        del self._pending[: len(data)]
        self.num_bytes += len(data)
        self._tail += data
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
        self._wake(data)
        return bool(self._pending)

    def note_broken(self, error: OSError) -> None:
        """End the answer with a failure, because the storage will not accept the bytes later either."""
        logger.error("the answer %s cannot be stored: %s", self.path.name, error)
        self.close(failure=Unavailable("the server cannot store this answer; its log has the reason"))


_Work = tuple[_Descriptor, int, bytes]


class LogWriter:
    """Writes the appended bytes of all logs together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds, which decide whether the storage is slow."""
        self._clock = clock
        self.is_slow = False  # whether the last round of writes was slow
        self._waiting: dict[AnswerLog, None] = {}
        self._put_off: dict[AnswerLog, asyncio.TimerHandle] = {}  # logs whose storage is full or gone at the moment
        self._writing: asyncio.Task[None] | None = None

    def add(self, log: AnswerLog) -> None:
        """Schedule the pending bytes of a log to be written."""
        if log not in self._put_off:
            self._waiting[log] = None
            if self._writing is None:
                self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Cancel all retries and finish the queued writes."""
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
    """Make all writes. Returns the error of each write, or None."""
    errors: list[OSError | None] = []
    for file, offset, data in work:
        try:
            _write_at(file.number, offset, data)
            errors.append(None)
        except OSError as error:
            errors.append(error)
    return errors


def _write_at(file: int, offset: int, data: bytes) -> None:
    """Write all of `data` at an offset in a file. The call may be repeated after an error. Raises OSError."""
    view = memoryview(data)
    while view:
        num_written = os.pwrite(file, view, offset)  # a disk that becomes full may accept only a part
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
    """Return up to `READ_BYTES` bytes from `offset` on; none after the end. Blocks. Raises NotFound and OSError."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise NotFound(f"there is no response {path.name!r} any more", code="response_not_found") from None
    try:
        return os.pread(file, READ_BYTES, offset)
    finally:
        os.close(file)


async def pieces_of(path: Path, offset: int = 0) -> AsyncGenerator[bytes, None]:
    """Yield the content of a file from `offset` on, read in a thread. Raises NotFound and OSError."""
    while piece := await asyncio.to_thread(read_piece, path, offset):
        yield piece
        offset += len(piece)
