"""What a service with its default limits does with too much of everything, and with a disk that is full."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.batches import BatchLimits, NewFile
from app.errors import BodyTooLarge, Unavailable
from tests import waiting
from tests.kit.jobs import OWNER, Echo, all_files, begin, ends, input_line, jsonl, service_in, until, upload

MEBIBYTE = 1024 * 1024


async def test_50001_lines_are_too_many_and_nothing_runs(tmp_path: Path) -> None:
    echo = Echo()
    async with service_in(tmp_path, echo) as service:
        batch = await until(service, await begin(service, jsonl(*(input_line(f"l{n}") for n in range(50_001)))))
        assert batch["status"] == "failed"
        [error] = batch["errors"]["data"]
        assert (error["code"], error["message"]) == ("too_many_lines", "the file has more than 50,000 lines")
        assert (batch["output_file_id"], batch["error_file_id"], echo.asked.total()) == (None, None, 0)


async def test_200_mebibytes_are_taken_and_not_one_byte_more(tmp_path: Path) -> None:
    piece = b"x" * MEBIBYTE
    async with service_in(tmp_path, Echo()) as service:
        upload_id = await service.begin_upload(OWNER)
        for _ in range(200):
            await service.append(upload_id, piece)
        with pytest.raises(BodyTooLarge, match="more than 209,715,200 bytes"):
            await service.append(upload_id, b"x")
        file = await service.finish_upload(upload_id, NewFile(filename="x", purpose="batch"))
        assert file["bytes"] == BatchLimits().max_file_bytes == 200 * MEBIBYTE


@contextmanager
def no_room_beyond(num_bytes: int) -> Iterator[None]:
    """The system itself refuses to make any file larger, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_an_upload_that_the_disk_has_no_room_for_leaves_nothing_and_the_service_lives(tmp_path: Path) -> None:
    async with service_in(tmp_path, Echo()) as service:
        with no_room_beyond(2 * MEBIBYTE):
            upload_id = await service.begin_upload(OWNER)
            await service.append(upload_id, b"x" * MEBIBYTE)
            with pytest.raises(Unavailable, match="cannot use its storage now"):
                await service.append(upload_id, b"x" * 3 * MEBIBYTE)
            await service.abandon_upload(upload_id)
            assert await all_files(service) == []
            batch = await until(service, await begin(service, jsonl(input_line("small"))))
            assert batch["status"] == "completed"
        await upload(service, b"x" * 4 * MEBIBYTE)
    assert not list((tmp_path / "drafts").iterdir())


async def test_a_batch_whose_results_the_disk_has_no_room_for_waits_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.batch_runner.STORAGE_PAUSE_S", 0.05)
    echo = Echo()

    def num_completed(batch: dict[str, Any]) -> int:
        return int(batch["request_counts"]["completed"])

    lines = jsonl(*(input_line(f"l{n}", body={"name": f"{n:02}" + "x" * 100_000}) for n in range(20)))
    async with service_in(tmp_path, echo) as service:
        echo.hold = asyncio.Event()
        batch_id = await begin(service, lines)
        await echo.has_open(20)
        with no_room_beyond(300_000):  # the journal of results reaches it with the third line
            echo.hold.set()
            await waiting.until(lambda: service.batch(OWNER, batch_id), num_completed)
            with no_room_beyond(0):  # so that the journal of the next try has no room either
                kept = num_completed(await service.batch(OWNER, batch_id))
                await asyncio.sleep(0.3)
                batch = await service.batch(OWNER, batch_id)
                assert (batch["status"], num_completed(batch)) == ("in_progress", kept)
                assert kept < 20
        batch = await until(service, batch_id)
        output, _ = await ends(service, batch)
        assert (batch["status"], len(output)) == ("completed", 20)


async def test_a_folder_on_a_full_disk_is_opened_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.local_service.OPENING_RETRY_S", 0.05)
    async with service_in(tmp_path, Echo()) as service:
        kept = await upload(service, b"x" * MEBIBYTE)
    service = service_in(tmp_path, Echo())
    with no_room_beyond(0):
        service.start()
        opened = asyncio.create_task(service.opened())
        await asyncio.sleep(0.3)
        assert not opened.done(), "neither open nor failed"
        service.check_health()
        with pytest.raises(Unavailable):
            await all_files(service)
    await opened
    assert [file["id"] for file in await all_files(service)] == [kept]
    await service.close()


async def test_a_database_that_cannot_be_opened_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite3").mkdir()
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        async with service_in(tmp_path, Echo()):
            pass
