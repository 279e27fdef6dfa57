"""What a service does with a disk that is full, and with one that cannot be used."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.errors import Unavailable
from tests.kit.jobs import OWNER, Echo, all_files, begin, input_line, jsonl, service_in, until, upload

MEBIBYTE = 1024 * 1024


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
