"""Log files that store answers while they are generated.

Appended bytes are buffered in memory until they are written. If the disk is full, only the affected answers wait, and
their writes are retried. A slow disk blocks the event loop once; after that, a thread writes. Readers receive bytes
only once they are in the file, so clients never read tokens that a crash of this process would lose.
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

MAX_PENDING_BYTES = 1024 * 1024  # if an answer has more unwritten bytes, `append` waits until all are written
READ_BYTES = 256 * 1024  # maximum size of the piece that one read returns
_TAIL_BYTES = 16 * 1024  # kept in memory from the end of a file, so that readers of a growing file need no disk read
# Rounds of writes that take longer count as slow. Fast storage is written on the event loop, because a thread would
# have to wait for the interpreter's lock after each write, which would double the time and delay the readers.
_SLOW_S = 0.01

Take = Callable[[bytes], bool]  # receives the next bytes of an answer and returns False to refuse them


class _Descriptor:
    """An open file, which is closed once neither the log nor a write in a thread refers to it."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_WRONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class AnswerLog:
    """The log file of one answer. Use it on one event loop; only `sync` may run in another thread."""

    def __init__(self, path: Path, writer: LogWriter, num_bytes: int, *, content: bytes = b"") -> None:
        """Open an existing file whose first `num_bytes` bytes are valid. Raises OSError.

        If the file's whole content is known, pass it as `content`, so that readers get the tail from memory.
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
        """Queue bytes for writing, and wait if too many are unwritten. Raises Unavailable if the storage is broken."""
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
        """Flush the file to the disk. Blocks. Raises OSError."""
        os.fsync(self._file.number)

    def close(self, end: AnswerEnd | None = None, failure: Exception | None = None) -> None:
        """End the answer and drop its unwritten bytes. Readers receive `end`, or raise `failure`."""
        self._end, self._failure = end, self._failure or failure
        self._pending.clear()
        self._wake()

    async def parts(self, offset: int, *, waits: bool, take: Take | None = None) -> AsyncGenerator[AnswerPart, None]:
        """Yield the bytes from `offset` on, then the end. Raises the answer's failure if it has failed.

        With `waits`, the generator waits for bytes that are not written yet. While it waits, new bytes are passed to
        `take` until it refuses some, because waking the reader for each token would cost several times as much.
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
            else:  # while a thread writes, a reader of the file may briefly be ahead of `num_bytes`
                offset = max(offset, await self._change(take if offset == self.num_bytes else None))

    async def _read(self, offset: int) -> bytes:
        in_tail = offset - (self.num_bytes - len(self._tail))
        if in_tail >= 0:
            return bytes(self._tail[in_tail:])
        data = await asyncio.to_thread(read_piece, self.path, offset)
        return data[: self.num_bytes - offset]  # later bytes belong to a write that is in progress or failed midway

    async def _change(self, take: Take | None = None) -> int:
        """Wait for a change that `take` does not accept. Returns the file's number of valid bytes before the change."""
        change: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, take))
        return await change

    def _wake(self, data: bytes = b"") -> None:
        """Notify all waiting callers that `data` was written or, if it is empty, that something else changed."""
        waiting, self._waiting = self._waiting, []
        for change, take in waiting:
            if change.done():  # the reader was cancelled
                continue
            if data and take is not None and take(data):
                self._waiting.append((change, take))
            else:
                change.set_result(self.num_bytes - len(data))

    # Only `LogWriter` calls the following methods.

    def work(self) -> _Work:
        """Return the next write as (file, offset in the file, bytes)."""
        return self._file, self.num_bytes, bytes(self._pending)

    def note_written(self, data: bytes) -> bool:
        """Record that `data` is in the file. Returns whether more bytes are pending."""
        del self._pending[: len(data)]
        self.num_bytes += len(data)
        self._tail += data
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
        self._wake(data)
        return bool(self._pending)

    def note_broken(self, error: OSError) -> None:
        """Fail the answer after a write error that retries would not fix."""
        logger.error("the answer %s cannot be stored: %s", self.path.name, error)
        self.close(failure=Unavailable("the server cannot store this answer; see its log for the reason"))


_Work = tuple[_Descriptor, int, bytes]


class LogWriter:
    """Writes the pending bytes of all logs in rounds, on the event loop or, if the storage is slow, in a thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds; it times each round of writes to detect slow storage."""
        self._clock = clock
        self.is_slow = False  # whether the last round of writes was slow
        self._waiting: dict[AnswerLog, None] = {}
        self._put_off: dict[AnswerLog, asyncio.TimerHandle] = {}  # retries of logs whose storage is full or unreachable
        self._writing: asyncio.Task[None] | None = None

    def add(self, log: AnswerLog) -> None:
        """Schedule a write of the log's pending bytes. Does nothing while a retry of this log is scheduled."""
        if log not in self._put_off:
            self._waiting[log] = None
            if self._writing is None:
                self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Cancel all retries and wait until the queued writes are finished."""
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
            logger.error("answers cannot be stored: %s; retrying every %.0f s", error, STORAGE_PAUSE_S)
        self._put_off[log] = asyncio.get_running_loop().call_later(STORAGE_PAUSE_S, self._try_again, log)

    def _try_again(self, log: AnswerLog) -> None:
        del self._put_off[log]
        self.add(log)


def _write_all(work: Sequence[_Work]) -> list[OSError | None]:
    """Perform all writes. Returns an error or None for each."""
    errors: list[OSError | None] = []
    for file, offset, data in work:
        try:
            _write_at(file.number, offset, data)
            errors.append(None)
        except OSError as error:
            errors.append(error)
    return errors


def _write_at(file: int, offset: int, data: bytes) -> None:
    """Write all of `data` at `offset`. Safe to repeat after an error. Raises OSError."""
    view = memoryview(data)
    while view:
        num_written = os.pwrite(file, view, offset)  # a disk that becomes full may accept only a part of the bytes
        view, offset = view[num_written:], offset + num_written


def create_file(path: Path, content: bytes) -> None:
    """Create a file with this content, readable only by its owner, and flush it to the disk. Blocks. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        _write_at(file, 0, content)
        os.fsync(file)
    finally:
        os.close(file)


def read_piece(path: Path, offset: int) -> bytes:
    """Return up to `READ_BYTES` bytes from `offset` on; b"" at the end. Blocks. Raises NotFound or OSError."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise NotFound(f"the response {path.name!r} no longer exists", code="response_not_found") from None
    try:
        return os.pread(file, READ_BYTES, offset)
    finally:
        os.close(file)


async def pieces_of(path: Path, offset: int = 0) -> AsyncGenerator[bytes, None]:
    """Yield a file's content from `offset` on, which is read in a thread. Raises NotFound or OSError."""
    while piece := await asyncio.to_thread(read_piece, path, offset):
        yield piece
        offset += len(piece)
