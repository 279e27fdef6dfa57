"""Contents of files in a storage elsewhere: fsspec's own in memory, and a folder behind a URL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from app.errors import InvalidSetup, Unavailable
from app.jobs.files import FileStore
from app.jobs.local_service import LocalBatchService
from tests.jobs.lives import OWNER, Echo, all_files, begin, content, ends, input_line, jsonl, until, upload
from tests.jobs.lives import service_in as in_folder

TEN = jsonl(*(input_line(f"line-{n}") for n in range(10)))


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where contents go."""
    yield "memory://bucket/files" if request.param == "memory" else f"file://{tmp_path}/elsewhere"
    fsspec.filesystem("memory").store.clear()


def service_in(folder: Path, url: str, answer: Any = None) -> LocalBatchService:
    return in_folder(folder, answer or Echo(), files=url)


def found(url: str) -> set[str]:
    """The names of all files below the URL."""
    filesystem, root = fsspec.core.url_to_fs(url)
    return {str(path).rpartition("/")[2] for path in filesystem.find(root)}


def test_a_whole_batch_with_its_files_elsewhere(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "here"

    async def first_life() -> str:
        async with service_in(folder, url) as service:
            batch = await until(service, await begin(service, TEN))
            assert len((await ends(service, batch))[0]) == 10
            assert found(url) == {batch["input_file_id"], batch["output_file_id"]}
            assert not list((folder / "files").iterdir())
            assert not list((folder / "drafts").iterdir())
            return str(batch["output_file_id"])

    async def second_life(file_id: str) -> None:
        async with service_in(folder, url) as service:
            assert (await content(service, file_id)).count(b"\n") == 10
            await service.delete_file(OWNER, file_id)
            assert file_id not in found(url)

    asyncio.run(second_life(asyncio.run(first_life())))


def test_a_large_file_comes_back_in_pieces(tmp_path: Path, url: str) -> None:
    data = bytes(range(256)) * 20_000

    async def main() -> None:
        async with service_in(tmp_path / "here", url) as service:
            file_id = await upload(service, data)
            assert await service.read(OWNER, file_id, 1_000_000, 3_000_000) == data[1_000_000:4_000_000]
            assert await service.read(OWNER, file_id, len(data), 10) == b""

    asyncio.run(main())


def test_a_sweep_removes_what_is_ours_and_unknown_and_nothing_else(tmp_path: Path, url: str) -> None:
    first, second = FileStore(tmp_path / "first", url), FileStore(tmp_path / "second", url)
    ids = []
    for folder in (first, first, second):
        with folder.draft() as draft:
            draft.write(b"x")
            draft.keep()
            ids.append(draft.id)
    filesystem, root = fsspec.core.url_to_fs(url)
    own = (tmp_path / "first" / "files-name").read_text()
    for name in (f"{root}/somebody-elses", f"{root}/{own}/notes.txt"):
        filesystem.pipe_file(name, b"y")
    FileStore(tmp_path / "first", url).sweep(lambda: ids[:1])
    assert found(url) == {ids[0], ids[2], "somebody-elses", "notes.txt"}


def test_a_storage_that_fails_is_told_and_leaves_nothing(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem, _ = fsspec.core.url_to_fs(url)

    class NoCredentials(Exception):
        """As clients of object stores have their own."""

    def fail(*_: object, **__: object) -> None:
        raise NoCredentials("the secret of the bucket")

    async def main() -> None:
        async with service_in(tmp_path / "here", url) as service:
            with monkeypatch.context() as failing:
                failing.setattr(type(filesystem), "put_file", fail)
                with pytest.raises(Unavailable) as told:
                    await upload(service, TEN)
                assert "secret" not in told.value.message
            assert await all_files(service) == []
            assert not list((tmp_path / "here" / "drafts").iterdir())
            file_id = await upload(service, TEN)
            with monkeypatch.context() as failing:
                failing.setattr(type(filesystem), "cat_file", fail)
                with pytest.raises(Unavailable):
                    await service.read(OWNER, file_id, 0, 10)
            assert await content(service, file_id) == TEN

    asyncio.run(main())


def test_a_url_that_nothing_here_can_open_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetup) as told:
        FileStore(tmp_path, "nothing://user:canary@host/x")
    assert told.value.message.startswith("batches.files: nothing:// cannot be opened here: Protocol not known")
    assert "canary" not in told.value.message
