"""A file system that is really full, to its last byte: a small one of its own, in memory."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.batches import ItemResponse
from app.errors import Unavailable
from app.jobs import batch_runner
from app.jobs.catalog import Catalog
from app.jobs.outputs import BatchFiles
from tests import waiting
from tests.kit.jobs import OWNER, Echo, all_files, begin, ends, input_line, jsonl, ok, service_in, until, upload

NUM_LINES = 20
LINES = jsonl(*(input_line(f"line-{number}") for number in range(NUM_LINES)))
LONG = "x" * 5000  # longer than a block: of a line there is room for a part


class Disk:
    """It is full while a file of another program takes what is left of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._balloon = folder / "of another program"

    def fill(self) -> None:
        """Take the last byte."""
        descriptor = os.open(self._balloon, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        piece = bytes(65536)
        try:
            while piece:
                try:
                    os.write(descriptor, piece)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece = piece[: len(piece) // 2]
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """Give it back."""
        self._balloon.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this user cannot mount a file system: {mounted.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(autouse=True)
def _looks_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other program is quicker than the look at what is free; and pauses are short."""
    monkeypatch.setattr("app.jobs.batch_runner.shortage_of_disk", lambda *_, **__: None)
    monkeypatch.setattr("app.jobs.local_service.shortage_of_disk", lambda *_, **__: None)
    monkeypatch.setattr("app.jobs.batch_runner.STORAGE_PAUSE_S", 0.01)
    monkeypatch.setattr("app.jobs.local_service.OPENING_RETRY_S", 0.01)


async def is_complete(service: Any, batch_id: str, folder: Path) -> None:
    """It ends with every line once, and nothing else stays."""
    batch = await until(service, batch_id)
    output, errors = await ends(service, batch)
    assert (batch["status"], output.keys(), errors) == ("completed", {f"line-{n}" for n in range(NUM_LINES)}, {})
    assert len(await all_files(service)) == len(list((folder / "files").iterdir())) == 2
    assert not list((folder / "drafts").iterdir())


@pytest.mark.parametrize("place", [0, 7, NUM_LINES - 1])
async def test_a_disk_that_is_full_in_the_middle_of_a_batch_costs_no_line(disk: Disk, place: int) -> None:
    def fills(times: int) -> ItemResponse:
        if times == 1:
            disk.fill()
        return ok(LONG)

    answers = {f"line-{number}": lambda _: ok(LONG) for number in range(NUM_LINES)}
    echo, folder = Echo(answers | {f"line-{place}": fills}), disk.folder / "batches"
    async with service_in(folder, echo, max_in_flight=1) as service:
        batch_id = await begin(service, LINES)
        paused = await waiting.until(lambda: service.batch(OWNER, batch_id), lambda batch: batch["paused"] is not None)
        assert (paused["paused"]["code"], paused["request_counts"]["completed"]) == ("storage_failed", place)
        with pytest.raises(Unavailable, match="cannot use its storage now"):
            await upload(service, LINES)
        disk.free()
        await is_complete(service, batch_id, folder)
    assert all(echo.asked[f"line-{number}"] == 1 for number in range(place)), "what was done is not done again"


def first_time(disk: Disk, function: Callable[..., Any]) -> Callable[..., Any]:
    """The disk becomes full just before its first call."""
    calls: list[int] = []

    def called(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            disk.fill()
        return function(*args, **named)

    return called


@pytest.mark.parametrize("when", ["files", "catalog"])
async def test_a_disk_that_is_full_at_the_end_of_a_batch_costs_no_line(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    write: Callable[..., BatchFiles] = batch_runner.write_batch_files
    if when == "files":
        monkeypatch.setattr("app.jobs.batch_runner.write_batch_files", first_time(disk, write))
    else:
        monkeypatch.setattr(Catalog, "end_job", first_time(disk, Catalog.end_job))
    folder = disk.folder / "batches"
    async with service_in(folder, Echo()) as service:
        batch_id = await begin(service, LINES)
        await waiting.until(lambda: service.batch(OWNER, batch_id), lambda batch: batch["paused"] is not None)
        disk.free()
        await is_complete(service, batch_id, folder)


async def test_a_service_on_a_full_disk_opens_as_soon_as_there_is_room(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    echo, folder = Echo(), disk.folder / "batches"
    echo.hold = asyncio.Event()
    async with service_in(folder, echo) as service:
        batch_id = await begin(service, LINES)
        await echo.has_open(NUM_LINES)
    echo.hold = None
    disk.fill()
    service = service_in(folder, echo)
    service.start()
    try:
        await waiting.until(lambda: "cannot be opened: database or disk is full; retrying" in caplog.text)
        with pytest.raises(Unavailable):
            await service.batch(OWNER, batch_id)
        disk.free()
        await service.opened()
        await is_complete(service, batch_id, folder)
    finally:
        await service.close()
