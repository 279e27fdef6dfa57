"""The files of stored answers over a storage that is full, broken, slow, or takes a part of a write."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.batches import AnswerEnd
from app.errors import NotFound, Unavailable
from app.jobs import answer_log
from app.jobs.answer_log import MAX_PENDING_BYTES, READ_BYTES, AnswerLog, LogWriter, pieces_of

END = AnswerEnd("completed")


def a_log(path: Path, content: bytes = b"", writer: LogWriter | None = None) -> AnswerLog:
    path.write_bytes(content)
    return AnswerLog(path, writer or LogWriter(), len(content))


async def read(log: AnswerLog, offset: int = 0, *, waits: bool = True) -> tuple[bytes, AnswerEnd | None]:
    data, end = b"", None
    async for part in log.parts(offset, waits=waits):
        data, end = data + part.data, part.end or end
    return data, end


class Disk:
    """What becomes of each write, in the place of `os.pwrite`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: OSError | None = None
        self.max_bytes: int | None = None  # of one write
        self._write = os.pwrite
        monkeypatch.setattr(answer_log.os, "pwrite", self.pwrite)
        monkeypatch.setattr(answer_log, "STORAGE_PAUSE_S", 0.001)

    def pwrite(self, file: int, data: bytes, offset: int) -> int:
        if self.error is not None:
            raise self.error
        return self._write(file, data[: self.max_bytes], offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


async def test_readers_get_everything_in_order_wherever_they_begin(tmp_path: Path) -> None:
    log = a_log(tmp_path / "a", b"head")
    readers = [asyncio.create_task(read(log, offset)) for offset in (0, 2, 4)]
    pieces = [bytes([number % 256]) * 700 for number in range(100)]  # more than the tail in memory
    for piece in pieces:
        await log.append(piece)
        await asyncio.sleep(0)
    readers.append(asyncio.create_task(read(log, 4 + 700)))
    await log.flush()
    log.close(END)
    whole = b"head" + b"".join(pieces)
    for reader, offset in zip(readers, (0, 2, 4, 704), strict=True):
        assert await reader == (whole[offset:], END)
    assert (tmp_path / "a").read_bytes() == whole


async def test_what_a_reader_takes_and_its_parts_are_the_whole_answer_in_order(tmp_path: Path) -> None:
    log = a_log(tmp_path / "a", b"head", LogWriter(clock=lambda: 0.0))  # no thread writes
    source, got, num_parts = random.Random(1), bytearray(), 0

    def take(data: bytes) -> bool:
        takes = source.random() < 0.8
        got.extend(data if takes else b"")
        return takes

    async def read_on() -> None:
        nonlocal num_parts
        async for part in log.parts(4, waits=True, take=take):
            got.extend(part.data)
            num_parts += 1

    reading = asyncio.create_task(read_on())
    pieces = [bytes([number]) * source.randrange(1, 400) for number in range(200)]
    for piece in pieces:
        await log.append(piece)
        for _ in range(source.randrange(4)):
            await asyncio.sleep(0)
    await log.flush()
    log.close(END)
    await reading
    assert bytes(got) == b"".join(pieces)
    assert 20 < num_parts < len(pieces) / 2, "some are taken, some are parts"


async def test_a_reader_that_does_not_wait_gets_no_end_before_there_is_one(tmp_path: Path) -> None:
    log = a_log(tmp_path / "a", b"head")
    assert await read(log, waits=False) == (b"head", None)


async def test_a_file_that_is_larger_than_a_piece_is_read_in_pieces(tmp_path: Path) -> None:
    content = os.urandom(2 * READ_BYTES + 5)
    log = a_log(tmp_path / "a", content)
    log.close(END)
    assert [len(part.data) async for part in log.parts(3, waits=True)] == [READ_BYTES, READ_BYTES, 2, 0]
    assert b"".join([piece async for piece in pieces_of(tmp_path / "a")]) == content
    with pytest.raises(NotFound):
        await anext(pieces_of(tmp_path / "b"))


async def test_a_reader_gets_no_byte_of_a_write_that_has_not_ended(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"head and a part of a write")
    log = AnswerLog(tmp_path / "a", LogWriter(), 4)
    assert await read(log, 1, waits=False) == (b"ead", None)


async def test_a_write_that_takes_a_part_is_continued(tmp_path: Path, disk: Disk) -> None:
    disk.max_bytes = 3
    log = a_log(tmp_path / "a")
    await log.append(b"0123456789")
    await log.flush()
    assert (tmp_path / "a").read_bytes() == b"0123456789"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
async def test_a_full_disk_makes_an_answer_wait(tmp_path: Path, disk: Disk, number: int) -> None:
    log = a_log(tmp_path / "a")
    disk.error = OSError(number, "full")
    await log.append(b"first ")
    await asyncio.sleep(0.005)
    await log.append(b"second")
    assert await read(log, waits=False) == (b"", None), "a reader gets nothing that is not in the file"
    flushing = asyncio.create_task(log.flush())
    disk.error = None
    await flushing
    assert await read(log, waits=False) == (b"first second", None)
    assert (tmp_path / "a").read_bytes() == b"first second"


async def test_memory_is_bounded_while_the_disk_is_full(tmp_path: Path, disk: Disk) -> None:
    log = a_log(tmp_path / "a")
    disk.error = OSError(errno.ENOSPC, "full")
    appending = asyncio.create_task(_append_all(log, [bytes(100_000)] * 20))
    await asyncio.sleep(0.01)
    assert not appending.done()
    assert len(log.work()[2]) <= MAX_PENDING_BYTES + 100_000
    disk.error = None
    await appending
    await log.flush()
    assert (tmp_path / "a").stat().st_size == 2_000_000


async def _append_all(log: AnswerLog, pieces: list[bytes]) -> None:
    for piece in pieces:
        await log.append(piece)


async def test_a_storage_that_will_not_come_back_fails_this_answer_alone(tmp_path: Path, disk: Disk) -> None:
    writer = LogWriter()
    broken, other = (a_log(tmp_path / name, writer=writer) for name in "ab")
    disk.error = PermissionError(errno.EPERM, "no")
    await broken.append(b"lost")
    for use in (broken.flush(), broken.append(b"more"), read(broken)):
        with pytest.raises(Unavailable, match="cannot store this answer"):
            await use
    disk.error = None
    await other.append(b"kept")
    await other.flush()
    assert (tmp_path / "b").read_bytes() == b"kept"


async def test_a_slow_storage_is_written_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 1.0, 1.5, 1.5, 1.5])  # of the first and the second turn, which are slow, and of the third
    in_threads: list[Callable[..., Any]] = []
    to_thread = asyncio.to_thread

    async def noted(work: Callable[..., Any], *arguments: Any) -> Any:
        in_threads.append(work)
        return await to_thread(work, *arguments)

    monkeypatch.setattr(answer_log.asyncio, "to_thread", noted)
    writer = LogWriter(lambda: next(times))
    log = a_log(tmp_path / "a", writer=writer)
    for number_in_threads, is_slow in ((0, True), (1, True), (2, False)):
        await log.append(b"x")
        await log.flush()
        assert (len(in_threads), writer.is_slow) == (number_in_threads, is_slow)


async def test_a_reader_that_is_cancelled_disturbs_no_other(tmp_path: Path) -> None:
    log = a_log(tmp_path / "a")
    leaving, staying = (asyncio.create_task(read(log)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await log.append(b"x")
    await log.flush()
    log.close(END)
    assert await staying == (b"x", END)


async def test_a_short_answer_is_read_from_memory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"head")
    log = AnswerLog(tmp_path / "a", LogWriter(), 4, content=b"head")
    (tmp_path / "a").unlink()
    assert await read(log, 1, waits=False) == (b"ead", None)
