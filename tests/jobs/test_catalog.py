"""What SQLite keeps: versions, the status guard, lines that end once."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from app.errors import InvalidSetup
from app.jobs import Batch, LineError, LineResult
from app.jobs.catalog import Store
from app.jobs.job import Status


def a_batch(status: Status) -> Batch:
    return Batch(
        id=f"batch-{status}",
        owner="ann",
        endpoint="/v1/completions",
        input_file_id="file-1",
        status=status,
        created_at=5,
        expires_at=9,
        metadata={"key": "value"},
        errors=(LineError(code="code", message="words", line=3, param="url"),),
    )


def result(batch: Batch, line: int, text: str, *, is_error: bool = False) -> LineResult:
    return LineResult(batch_id=batch.id, line_number=line, is_error=is_error, text=text, num_output_tokens=7)


def test_a_batch_comes_back_as_it_was(tmp_path: Path) -> None:
    batch = a_batch(Status.FAILED)
    with closing(Store(tmp_path)) as store:
        store.add_batch(batch)
    with closing(Store(tmp_path)) as store:
        assert store.batch(batch.id) == batch


def test_a_line_ends_once_and_only_while_its_batch_goes_on(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        going, done = a_batch(Status.IN_PROGRESS), a_batch(Status.COMPLETED)
        for batch in (going, done):
            store.add_batch(batch)
        store.record([result(going, 1, "first"), result(going, 1, "again"), result(done, 1, "late")])
        store.record([result(going, 1, "and again"), result(going, 2, "bad", is_error=True)])
        assert list(store.results(going.id)) == [(1, False, "first"), (2, True, "bad")]
        assert list(store.results(done.id)) == []
        after = store.batch(going.id)
        assert (after.num_completed, after.num_failed, after.num_output_tokens) == (1, 1, 14)
        assert store.batch(done.id).num_completed == 0


def test_a_change_comes_too_late_when_the_status_is_another(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        batch = a_batch(Status.CANCELLING)
        store.add_batch(batch)
        assert store.change_batch(batch.id, Status.IN_PROGRESS, status=Status.FINALIZING) == batch


@pytest.mark.parametrize(("version", "lacks"), [(1, ("letters", "jobs")), (2, ("jobs",))])
def test_a_folder_of_a_version_before_is_opened_and_gets_what_it_lacks(
    tmp_path: Path, version: int, lacks: tuple[str, ...]
) -> None:
    batch = a_batch(Status.COMPLETED)
    with closing(Store(tmp_path)) as store:
        store.add_batch(batch)
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as connection:
        connection.executescript(
            f"{' '.join(f'DROP TABLE {table};' for table in lacks)} PRAGMA user_version = {version}"
        )
    with closing(Store(tmp_path)) as store:
        assert store.batch(batch.id) == batch
        assert store.letters.next_due_at() is None
        assert store.job_id(batch.id) is None
        store.keep_job_id(batch.id, "job-1")
        store.keep_job_id(batch.id, "job-2")
        assert store.job_id(batch.id) == "job-2"
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (3,)


def test_tables_of_another_version_are_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as connection:
        connection.execute("PRAGMA user_version = 7")
    with pytest.raises(InvalidSetup, match="tables of version 7"):
        Store(tmp_path)
