"""Uploads, lists, limits, and the one process that may write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.batches import BatchLimits, NewBatch, NewFile, PageOf
from app.errors import BodyTooLarge, InvalidRequest, InvalidSetup, NotFound, Overloaded, StorageFull, Unavailable
from app.jobs.local_service import LocalBatchService
from app.jobs.space import RESERVE_BYTES
from tests import waiting
from tests.kit.jobs import (
    CHAT,
    OWNER,
    Echo,
    all_files,
    begin,
    content,
    ends,
    input_line,
    jsonl,
    service_in,
    until,
    upload,
)

OWNERS = ("ann", "bob", "cid")
ONE = jsonl(input_line("one"))


async def test_a_file_is_read_in_pieces_and_deleted_once(tmp_path: Path) -> None:
    async with service_in(tmp_path, Echo()) as service:
        data = bytes(range(256)) * 20
        file_id = await upload(service, data)
        assert await content(service, file_id) == data
        assert await service.read(OWNER, file_id, len(data), 10) == b""
        await service.delete_file(OWNER, file_id)
        for call in (
            service.file(OWNER, file_id),
            service.read(OWNER, file_id, 0, 1),
            service.delete_file(OWNER, file_id),
        ):
            with pytest.raises(NotFound):
                await call
        assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize("left", [0, 2000], ids=["empty", "cut"])
async def test_a_folder_whose_catalog_is_damaged_is_left_as_it_is(tmp_path: Path, left: int) -> None:
    """No file and no result is swept away because nothing names it any more."""

    def there() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    echo = Echo()
    async with service_in(tmp_path, echo) as service:
        echo.hold = asyncio.Event()
        await begin(service, ONE)
        await echo.has_open(1)
    (tmp_path / "batches.sqlite3").write_bytes((tmp_path / "batches.sqlite3").read_bytes()[:left])
    (tmp_path / "batches.sqlite3-journal").unlink(missing_ok=True)
    before = there()
    for _ in range(2):
        with pytest.raises(InvalidSetup, match=r"batches.sqlite3 cannot be used: .*; nothing was changed\. Restore"):
            async with service_in(tmp_path, Echo()):
                pass
        assert there() == before


@pytest.mark.parametrize(
    "file_id", ["", "..", "file-../../x", "../batches.sqlite3", "/etc/passwd", "x\0y", "' OR 1=1 --"]
)
async def test_an_id_is_only_looked_up(tmp_path: Path, file_id: str) -> None:
    async with service_in(tmp_path, Echo()) as service:
        await upload(service, ONE)
        for call in (
            service.file(OWNER, file_id),
            service.read(OWNER, file_id, 0, 10),
            service.delete_file(OWNER, file_id),
            service.batch(OWNER, file_id),
            service.cancel_batch(OWNER, file_id),
            service.create_batch(NewBatch(owner=OWNER, endpoint=CHAT, input_file_id=file_id)),
            service.files(PageOf(owner=OWNER, limit=1, after=file_id)),
        ):
            with pytest.raises(NotFound):
                await call


async def test_an_owner_does_not_see_what_another_owns(tmp_path: Path) -> None:
    async with service_in(tmp_path, Echo()) as service:
        batch = await until(service, await begin(service, ONE))
        file_id, other = batch["output_file_id"], "bob"
        for call in (
            service.file(other, file_id),
            service.read(other, file_id, 0, 10),
            service.delete_file(other, file_id),
            service.batch(other, batch["id"]),
            service.cancel_batch(other, batch["id"]),
            service.create_batch(NewBatch(owner=other, endpoint=CHAT, input_file_id=batch["input_file_id"])),
            service.files(PageOf(owner=other, limit=1, after=file_id)),
            service.batches(PageOf(owner=other, limit=1, after=batch["id"])),
        ):
            with pytest.raises(NotFound):
                await call
        assert (await service.files(PageOf(owner=other, limit=10)))["data"] == []
        assert (await service.batches(PageOf(owner=other, limit=10)))["data"] == []


async def test_lists_come_in_pages(tmp_path: Path) -> None:
    async with service_in(tmp_path, Echo()) as service:
        ids = [await upload(service, ONE) for _ in range(5)]
        newest = await service.files(PageOf(owner=OWNER, limit=2))
        assert [file["id"] for file in newest["data"]] == [ids[4], ids[3]]
        assert (newest["first_id"], newest["last_id"], newest["has_more"]) == (ids[4], ids[3], True)
        rest = await service.files(PageOf(owner=OWNER, limit=3, after=ids[3]))
        assert ([file["id"] for file in rest["data"]], rest["has_more"]) == ([ids[2], ids[1], ids[0]], False)
        oldest = await service.files(PageOf(owner=OWNER, limit=1, after=ids[0], is_ascending=True, purpose="batch"))
        assert [file["id"] for file in oldest["data"]] == [ids[1]]
        none = await service.files(PageOf(owner=OWNER, limit=1, purpose="batch_output"))
        assert none == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_a_file_may_have_so_many_bytes_and_not_one_more(tmp_path: Path) -> None:
    async with service_in(
        tmp_path, Echo(), limits=BatchLimits(max_file_bytes=10_000), max_total_bytes=15_000
    ) as service:
        upload_id = await service.begin_upload("")
        await service.append(upload_id, b"x" * 10_000)
        with pytest.raises(BodyTooLarge):
            await service.append(upload_id, b"x")
        await service.finish_upload(upload_id, NewFile(filename="x", purpose="batch"))
        with pytest.raises(InvalidRequest) as full:
            await upload(service, b"x" * 5_001, owner="")
        assert full.value.code == "storage_full"
        await upload(service, b"x" * 5_000, owner="")


async def is_taken(service: LocalBatchService, num_bytes: int, owner: str) -> bool:
    [result] = await asyncio.gather(upload(service, b"x" * num_bytes, owner=owner), return_exceptions=True)
    assert isinstance(result, str) or getattr(result, "code", "") == "storage_full", result
    return isinstance(result, str)


async def test_no_owner_can_take_the_place_of_all_files(tmp_path: Path) -> None:
    """Each may keep as much as stays free for others; what it deletes is free again, for another process too."""
    for owner, num_files in zip(OWNERS, (10, 5, 2), strict=True):  # of 20
        async with service_in(tmp_path, Echo(), max_total_bytes=200_000) as service:
            assert [await is_taken(service, 10_000, owner) for _ in range(num_files)] == [True] * num_files
            assert not await is_taken(service, 10_000, owner)
    async with service_in(tmp_path, Echo(), max_total_bytes=200_000) as service:
        for file in await all_files(service, "ann"):
            await service.delete_file("ann", file["id"])
        assert await is_taken(service, 10_000, "bob")
        uploads = [await service.begin_upload("dan") for _ in range(2)]
        await service.append(uploads[0], b"x" * 50_000)
        with pytest.raises(InvalidRequest, match="use 50,000 bytes"):
            await service.append(uploads[1], b"x" * 50_000)


async def test_many_small_files_take_what_they_take_of_the_disk(tmp_path: Path) -> None:
    async with service_in(tmp_path, Echo(), max_total_bytes=20 * 4096) as service:
        assert [await is_taken(service, 1, OWNER) for _ in range(12)] == [True] * 10 + [False] * 2


def has_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """The disk of 100 GB has so many bytes free."""
    disk = SimpleNamespace(f_frsize=1, f_bavail=num_bytes, f_blocks=100_000_000_000)
    monkeypatch.setattr("os.statvfs", lambda _: disk)


async def test_a_disk_that_is_nearly_full_takes_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with service_in(tmp_path, Echo()) as service:
        file_id, upload_id = await upload(service, ONE), await service.begin_upload(OWNER)
        has_free(monkeypatch, RESERVE_BYTES - 1)
        new = NewBatch(owner=OWNER, endpoint=CHAT, input_file_id=file_id)
        for call in (service.begin_upload(OWNER), service.append(upload_id, ONE), service.create_batch(new)):
            with pytest.raises(StorageFull, match="536,870,911 bytes free"):
                await call
        await service.abandon_upload(upload_id)
        assert not list((tmp_path / "drafts").iterdir())
        assert (await service.delete_file(OWNER, file_id))["deleted"]
        has_free(monkeypatch, RESERVE_BYTES)
        assert await service.begin_upload(OWNER)


async def test_what_was_abandoned_leaves_nothing(tmp_path: Path) -> None:
    async with service_in(tmp_path, Echo()) as service:
        upload_id = await service.begin_upload(OWNER)
        await service.append(upload_id, b"x")
        await service.abandon_upload(upload_id)
        await service.abandon_upload(upload_id)
        with pytest.raises(Unavailable):
            await service.append(upload_id, b"x")
        assert not list((tmp_path / "drafts").iterdir())


async def test_an_abandoned_upload_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.jobs.local_service.HOUSEKEEPING_S", 0.01)
    monkeypatch.setattr("app.jobs.local_service.UPLOAD_TIMEOUT_S", 0.03)
    async with service_in(tmp_path, Echo()) as service:
        upload_id = await service.begin_upload(OWNER)
        await waiting.until(lambda: not list((tmp_path / "drafts").iterdir()))
        with pytest.raises(Unavailable):
            await service.append(upload_id, b"x")


async def test_so_many_batches_and_no_more(tmp_path: Path) -> None:
    echo = Echo()
    echo.hold = asyncio.Event()
    async with service_in(tmp_path, echo, limits=BatchLimits(max_batches=2)) as service:
        batch_ids = [await begin(service, ONE, owner="") for _ in range(2)]
        with pytest.raises(Overloaded):
            await begin(service, ONE, owner="")
        echo.hold.set()
        for batch_id in batch_ids:
            await until(service, batch_id, owner="")
        await begin(service, ONE, owner="")


async def num_taken(call: Callable[[], Awaitable[object]], num_calls: int) -> int:
    """How many of so many calls at once are not refused as too many."""
    results = await asyncio.gather(*(call() for _ in range(num_calls)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, BaseException)]
    assert all(isinstance(each, Overloaded) for each in refused), refused
    return num_calls - len(refused)


async def test_owners_share_the_places_for_batches_and_uploads(tmp_path: Path) -> None:
    """Of 64 places two thirds for two that come at the same time, and something for each that comes later."""
    echo = Echo()
    echo.hold = asyncio.Event()
    async with service_in(tmp_path, echo) as service:
        file_ids = {owner: await upload(service, ONE, owner=owner) for owner in OWNERS}

        def create(owner: str) -> Callable[[], Awaitable[object]]:
            new = NewBatch(owner=owner, endpoint=CHAT, input_file_id=file_ids[owner])
            return lambda: service.create_batch(new)

        def send(owner: str) -> Callable[[], Awaitable[object]]:
            return lambda: service.begin_upload(owner)

        assert [await num_taken(create(owner), 80) for owner in OWNERS] == [32, 16, 8]
        assert [await num_taken(send(owner), 80) for owner in OWNERS] == [32, 16, 8]
        echo.hold.set()


async def test_what_a_client_has_begun_is_done_though_it_goes(tmp_path: Path) -> None:
    """A batch that is known is worked off, an upload that is begun is dropped by its time."""
    async with service_in(tmp_path, Echo()) as service:
        file_id = await upload(service, ONE)
        for num_turns in range(6):
            new = NewBatch(owner=OWNER, endpoint=CHAT, input_file_id=file_id)
            for call in (service.create_batch(new), service.begin_upload(OWNER)):
                task = asyncio.create_task(call)
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for batch in (await service.batches(PageOf(owner=OWNER, limit=100)))["data"]:
            assert (await until(service, batch["id"]))["status"] == "completed"
        drafts = tmp_path / "drafts"  # a file is made in a thread, and is known or gone soon after
        await waiting.until(lambda: {path.name for path in drafts.iterdir()} == set(service._uploads))


async def test_the_input_of_a_batch_stays_until_it_has_ended(tmp_path: Path) -> None:
    echo = Echo()
    echo.hold = asyncio.Event()
    async with service_in(tmp_path, echo) as service:
        batch = await service.batch(OWNER, await begin(service, ONE))
        with pytest.raises(InvalidRequest, match=batch["id"]):
            await service.delete_file(OWNER, batch["input_file_id"])
        echo.hold.set()
        batch = await until(service, batch["id"])
        assert (await service.delete_file(OWNER, batch["input_file_id"]))["deleted"]
        with pytest.raises(InvalidRequest, match="purpose is 'batch_output'"):
            await service.create_batch(NewBatch(owner=OWNER, endpoint=CHAT, input_file_id=batch["output_file_id"]))


async def test_a_folder_that_cannot_be_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    service = service_in(tmp_path / "file", Echo())
    service.start()
    with pytest.raises(FileExistsError):
        await service.opened()
    with pytest.raises(FileExistsError):
        service.check_health()
    with pytest.raises(Unavailable):
        await service.begin_upload(OWNER)
    await service.close()


async def test_a_second_process_waits_for_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.jobs.local_service.LOCK_RETRY_S", 0.01)
    first = service_in(tmp_path, Echo())
    second = service_in(tmp_path, Echo())
    async with first:
        file_id = await upload(first, ONE)
        second.start()
        await asyncio.sleep(0.05)
        with pytest.raises(Unavailable):
            await second.file(OWNER, file_id)
    await second.opened()
    assert (await second.file(OWNER, file_id))["id"] == file_id
    await second.close()


LINES = {f"line-{n}" for n in range(6)}


async def both_open(folder: Path) -> tuple[LocalBatchService, Echo, LocalBatchService, Echo, str]:
    """A service in the middle of a batch, whose lock the storage gave away, and the next one, in its middle too."""
    first_echo, second_echo = Echo(), Echo()
    first_echo.hold, second_echo.hold = asyncio.Event(), asyncio.Event()
    first, second = (service_in(folder, echo, max_in_flight=2) for echo in (first_echo, second_echo))
    first.start()
    await first.opened()
    batch_id = await begin(first, jsonl(*map(input_line, sorted(LINES))))
    await first_echo.has_open(2)
    (folder / "lock").unlink()
    second.start()
    await second.opened()
    await second_echo.has_open(2)
    return first, first_echo, second, second_echo, batch_id


async def test_two_processes_that_both_hold_the_folder_lose_and_double_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.local_service.GENERATION_CHECK_S", 3600)  # the first goes on as long as it can
    first, first_echo, second, second_echo, batch_id = await both_open(tmp_path)
    upload_id = await first.begin_upload(OWNER)
    await first.append(upload_id, ONE)
    file_id = await upload(second, ONE)
    assert first_echo.hold
    assert second_echo.hold
    first_echo.hold.set()
    await waiting.until(lambda: first_echo.asked.keys() == LINES and not first_echo.num_open)
    for change in (
        first.finish_upload(upload_id, NewFile(filename="x", purpose="batch")),
        first.delete_file(OWNER, file_id),
        first.cancel_batch(OWNER, batch_id),
        begin(first, ONE),
    ):
        with pytest.raises(Unavailable):
            await change
    assert (await second.batch(OWNER, batch_id))["status"] == "in_progress"
    second_echo.hold.set()
    batch = await until(second, batch_id)
    assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
    await first.close()
    await second.close()
    async with service_in(tmp_path, Echo()) as third:
        assert await third.batch(OWNER, batch_id) == batch
        output, errors = await ends(third, batch)
        assert (output.keys(), errors) == (LINES, {})
        assert (
            {file["id"] for file in await all_files(third)}
            == {path.name for path in (tmp_path / "files").iterdir()}
            == {file_id, batch["input_file_id"], batch["output_file_id"]}
        )


def has_ended(service: LocalBatchService) -> bool:
    try:
        service.check_health()
    except ExceptionGroup:
        return True
    return False


async def test_a_process_stops_when_it_has_lost_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.jobs.local_service.GENERATION_CHECK_S", 0.01)
    first, first_echo, second, _, _ = await both_open(tmp_path)
    await waiting.until(lambda: not first_echo.num_open)  # its lines were aborted
    with pytest.raises(Unavailable):
        await first.begin_upload(OWNER)
    await waiting.until(lambda: has_ended(first))  # after its catalog is closed; and so it is replaced
    second.check_health()
    await first.close()
    await second.close()
