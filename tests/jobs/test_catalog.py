"""What SQLite keeps: versions, the status guard."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from app.batches import JobState, PageOf
from app.errors import InvalidSetup
from app.jobs.catalog import Catalog, Superseded
from app.jobs.job import ItemError, Job, StoredFile, StoredResponse
from app.webhooks.outbox import DeliveryState


def a_job(status: JobState, **fields: int) -> Job:
    return Job(
        id=f"batch-{status}",
        owner="ann",
        endpoint="/v1/completions",
        input_file_id="file-1",
        status=status,
        created_at=5,
        expires_at=9,
        metadata={"key": "value"},
        errors=(ItemError(code="code", message="words", line=3, param="url"),),
        **fields,
    )


def test_a_batch_comes_back_as_it_was(tmp_path: Path) -> None:
    job = a_job(JobState.FAILED)
    with closing(Catalog(tmp_path)) as catalog:
        catalog.add_job(job)
    with closing(Catalog(tmp_path)) as catalog:
        assert catalog.job(job.id) == job


def test_a_change_comes_too_late_when_the_status_is_another(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path)) as catalog:
        job = a_job(JobState.CANCELLING)
        catalog.add_job(job)
        assert catalog.change_job(job.id, JobState.IN_PROGRESS, status=JobState.FINALIZING) == job


def test_batches_that_have_ended_are_added_up_by_their_status(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path)) as catalog:
        for job in (a_job(JobState.COMPLETED, num_items=3, num_completed=2), a_job(JobState.IN_PROGRESS, num_items=9)):
            catalog.add_job(job)
        [(sums, number)] = catalog.ended_counts("ann")
        assert (sums.status, sums.num_items, sums.num_completed, number) == (JobState.COMPLETED, 3, 2, 1)
        assert catalog.ended_counts("bob") == []


def test_many_responses_are_removed_in_one_transaction(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path)) as catalog:
        ids = [f"resp_{number}" for number in range(100)]
        for response_id, previous in zip(ids, [None, *ids], strict=False):  # a conversation
            response = StoredResponse(
                id=response_id, owner="ann", created_at=1, expires_at=2, status="completed", previous=previous, end="{}"
            )
            catalog.add_response(response, now=1.0)
        statements: list[str] = []
        catalog._connection.set_trace_callback(statements.append)
        assert set(catalog.remove_responses(ids)) == set(ids)
        assert statements.count("COMMIT") == 1
        assert catalog.bytes_by_owner == {}


@pytest.mark.parametrize("version", [3, 7])
def test_tables_of_another_version_are_refused(tmp_path: Path, version: int) -> None:
    Catalog(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(InvalidSetup, match=f"tables of version {version}, but this Carousel reads 6"):
        Catalog(tmp_path)


A_FILE = StoredFile(
    id="file-1", owner="ann", bytes=1, created_at=5, expires_at=None, filename="f", purpose="batch_output"
)


def a_used_folder(folder: Path) -> Path:
    """Make one with a catalog of some pages, and a file; the catalog's path."""
    with closing(Catalog(folder)) as catalog:
        for number in range(30):
            catalog.add_file(replace(A_FILE, id=f"file-{number}", filename="f" * 500))
    (folder / "files").mkdir()
    (folder / "files" / "file-0").write_bytes(b"x")
    return folder / "batches.sqlite3"


def test_a_catalog_with_a_damaged_page_is_refused_or_names_everything(tmp_path: Path) -> None:
    """What it does not name is swept away as soon as it is open."""
    path = a_used_folder(tmp_path)
    whole, page_bytes, num_refused = path.read_bytes(), 4096, 0
    for place in range(0, len(whole), page_bytes):
        for content in (
            whole[:place] + bytes(page_bytes) + whole[place + page_bytes :],
            whole[:place],
            whole[: place + page_bytes // 2],
        ):
            path.write_bytes(content)
            try:
                with closing(Catalog(tmp_path)) as catalog:
                    assert len(catalog.file_ids()) == 30
            except InvalidSetup as refused:
                assert path.read_bytes() == content
                num_refused += "Restore the whole folder from a backup, or set batches.path" in str(refused)
    assert num_refused > len(whole) // page_bytes


def test_a_folder_whose_catalog_is_gone_is_not_begun_anew(tmp_path: Path) -> None:
    a_used_folder(tmp_path).unlink()
    for _ in range(2):
        with pytest.raises(
            InvalidSetup, match=r"batches.sqlite3 cannot be used: it is missing or empty, but the folder is not; .*"
        ):
            Catalog(tmp_path)
    assert (tmp_path / "files" / "file-0").exists()


def test_a_storage_that_fails_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again."""
    a_used_folder(tmp_path)
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as other:
        other.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(Catalog, "_connect", lambda self: sqlite3.connect(self._path, timeout=0))
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            Catalog(tmp_path)


def test_it_needs_no_memory_that_processes_share(tmp_path: Path) -> None:
    """WAL does, which is not there between machines; a database of a version that used it is changed."""
    job = a_job(JobState.FAILED)
    with closing(Catalog(tmp_path)) as catalog:
        catalog.add_job(job)
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as connection:
        assert connection.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
    with closing(Catalog(tmp_path)) as catalog:
        assert catalog.job(job.id) == job
        assert not (tmp_path / "batches.sqlite3-shm").exists()
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() != ("wal",)


def test_a_process_that_another_has_replaced_changes_nothing(tmp_path: Path) -> None:
    job, ended = a_job(JobState.IN_PROGRESS), {"status": JobState.COMPLETED, "completed_at": 7}
    with closing(Catalog(tmp_path)) as first:
        first.add_job(job, has_message=True)
        first.add_job(a_job(JobState.FINALIZING), has_message=True)
        first.end_job(a_job(JobState.FINALIZING).id, [], **ended)
        [message] = first.outbox.take(10, 10, 1, {})
        with closing(Catalog(tmp_path)) as second:
            for change in (
                lambda: first.add_job(a_job(JobState.VALIDATING)),
                lambda: first.change_job(job.id, job.status, status=JobState.CANCELLING),
                lambda: first.end_job(job.id, [], **ended),
                lambda: first.remove_file("file-1"),
                lambda: first.outbox.take(20, 20, 1, {}),
                lambda: first.outbox.put_off(message, 20, "reason"),
                lambda: first.outbox.end(message, DeliveryState.DELIVERED),
                first.file_ids,  # for a sweep
                first.unfinished,
            ):
                with pytest.raises(Superseded):
                    change()
            assert [each.id for each in second.unfinished()] == [job.id]
            assert second.outbox.num_pending() == 1
            second.end_job(job.id, [], **ended)


def num_steps(catalog: Catalog, call: Callable[[], object]) -> int:
    """How many thousand steps SQLite takes for a call."""
    steps: list[None] = []
    catalog._connection.set_progress_handler(lambda: steps.append(None), 1000)
    call()
    catalog._connection.set_progress_handler(None, 0)
    return len(steps)


def test_an_owners_list_costs_the_same_however_much_others_have(tmp_path: Path) -> None:
    file = StoredFile(id="", owner="bob", bytes=1, created_at=5, expires_at=90, filename="f", purpose="batch")
    with closing(Catalog(tmp_path)) as catalog:
        catalog._connection.execute("BEGIN")  # otherwise each row is a transaction of its own
        catalog._connection.executemany(
            "INSERT INTO files (id, owner, bytes, created_at, expires_at, filename, purpose) VALUES (?,?,?,?,?,?,?)",
            [(f"file-{n}", *astuple(file)[1:]) for n in range(20_000)],
        )
        catalog._connection.execute("COMMIT")
        catalog.add_file(replace(file, id="file-ann", owner="ann"))
        page = PageOf(owner="ann", limit=10)
        assert num_steps(catalog, lambda: catalog.files(page, now=6)) <= 1
        assert num_steps(catalog, lambda: catalog.expired_file_ids(6)) <= 1


def test_what_owners_keep_is_known_without_adding_it_up(tmp_path: Path) -> None:
    file = StoredFile(id="file-1", owner="ann", bytes=1, created_at=5, expires_at=9, filename="f", purpose="batch")
    large = replace(file, id="file-2", bytes=10_000)
    with closing(Catalog(tmp_path)) as catalog:
        catalog.add_job(a_job(JobState.FINALIZING))
        catalog.add_file(file)
        catalog.end_job("batch-finalizing", [large], status=JobState.COMPLETED, completed_at=7)
        assert catalog.bytes_by_owner == {"ann": 14_096}
    with closing(Catalog(tmp_path)) as catalog:
        assert catalog.bytes_by_owner == {"ann": 14_096}
        catalog.remove_file("file-1")
        catalog.remove_file("file-1")
        assert catalog.bytes_by_owner == {"ann": 10_000}
        catalog.remove_file("file-2")
        assert catalog.bytes_by_owner == {}


def test_batches_that_ended_long_ago_are_forgotten_with_their_messages(tmp_path: Path) -> None:
    def ended(name: str, at: int, output_file_id: str | None = None) -> Job:
        return replace(a_job(JobState.COMPLETED), id=name, completed_at=at, output_file_id=output_file_id)

    kept = StoredFile(
        id="file-2", owner="ann", bytes=1, created_at=1, expires_at=None, filename="x", purpose="batch_output"
    )
    with closing(Catalog(tmp_path)) as catalog:
        catalog.add_file(kept)
        for job in (
            ended("old", 5),
            ended("old-with-a-file", 5, kept.id),
            ended("old-without-its-file", 5, "file-3"),
            ended("young", 100),
            a_job(JobState.IN_PROGRESS),
        ):
            catalog.add_job(job)
        for name in ("told", "not-told-yet"):
            catalog.add_job(replace(a_job(JobState.FINALIZING), id=name), has_message=True)
            catalog.end_job(name, [], status=JobState.COMPLETED, completed_at=5)
        [told, _] = catalog.outbox.take(10, 20, 2, {})
        catalog.outbox.end(told, DeliveryState.DELIVERED)
        assert catalog.forget_ended(50) == 3
        page = PageOf(owner="ann", limit=10, is_ascending=True)
        remaining = ["old-with-a-file", "young", a_job(JobState.IN_PROGRESS).id, "not-told-yet"]
        assert [job.id for job in catalog.jobs(page)] == remaining
        assert catalog.outbox.shown(["told", "not-told-yet"]).keys() == {"not-told-yet"}
        assert catalog.forget_ended(50) == 0
