"""What is known of files and batches, in SQLite: every change is one transaction, on disk before it counts.

One writer: use it in one thread. The end of a line is a row; its key is what makes it end only once.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from app.errors import InvalidSetup, NotFound
from app.jobs import webhook_outbox
from app.jobs.job import Batch, LineError, Status, StoredFile
from app.jobs.line import LineResult
from app.jobs.service import PageOf
from app.jobs.webhook_outbox import NewLetter

_FILE_COLUMNS = tuple(field.name for field in fields(StoredFile))
_BATCH_COLUMNS = tuple(field.name for field in fields(Batch))
_ENDED = tuple(status.value for status in Status if status.has_ended)
_NOT_ENDED = f"status NOT IN ({', '.join(map(repr, _ENDED))})"

_VERSION = 3  # of the tables below; a change of theirs needs another
_READABLE_VERSIONS = (0, 1, 2, _VERSION)  # none yet; without letters, or jobs, which are added

# The number is the order of creation. Where a column has no type SQLite keeps what it gets.
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files (number INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(_FILE_COLUMNS)}, UNIQUE (id));
CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(_BATCH_COLUMNS)}, UNIQUE (id));
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
CREATE TABLE IF NOT EXISTS results (batch_id, line INTEGER, is_error, text, PRIMARY KEY (batch_id, line));
CREATE TABLE IF NOT EXISTS jobs (batch_id PRIMARY KEY, job_id);
{webhook_outbox.SCHEMA}
PRAGMA user_version = {_VERSION};
"""


_COUNTS = {
    "num_batches": "count(*) AS num_batches",
    **{
        name: f"sum({name}) AS {name}"
        for name in ("num_lines", "num_completed", "num_failed", "num_input_tokens", "num_output_tokens")
    },
}


@dataclass(frozen=True, slots=True)
class StatusCount:
    """What all batches of one status have together."""

    status: Status
    num_batches: int
    num_lines: int
    num_completed: int
    num_failed: int
    num_input_tokens: int
    num_output_tokens: int


class Store:
    """The database of one folder."""

    def __init__(self, folder: Path) -> None:
        """Make it where there is none. Raises InvalidSetup for one that a version with other tables has made."""
        self._path = folder / "batches.sqlite3"
        self._connection = self._connect()
        [version] = self._connection.execute("PRAGMA user_version").fetchone()
        if version not in _READABLE_VERSIONS:
            self._connection.close()
            raise InvalidSetup(
                f"{self._path} has tables of version {version}; this Carousel reads {_VERSION}: set batches.path to "
                f"another folder, or run the version that made it"
            )
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")  # a commit is on disk when it returns
        self._connection.execute("PRAGMA secure_delete = FAST")  # a secret that is forgotten is not in the file
        self._connection.executescript(_SCHEMA)
        self.letters = webhook_outbox.Letters(self._connection)

    def close(self) -> None:
        """Close it; what was committed stays."""
        self._connection.close()

    # Files

    def add_file(self, file: StoredFile) -> None:
        """Make a kept file known."""
        with self._transaction():
            self._insert("files", _file_row(file))

    def file(self, owner: str, file_id: str, now: float) -> StoredFile:
        """Raises NotFound when the owner has none, or no longer."""
        query = "SELECT * FROM files WHERE id = ? AND owner = ? AND ifnull(expires_at, ?) >= ?"
        row = self._row(query, (file_id, owner, now, now))
        if row is None:
            raise NotFound(f"there is no file {file_id[:100]!r}", code="file_not_found")
        return _stored_file(row)

    def files(self, page: PageOf, now: float) -> list[StoredFile]:
        """The files of a page, and one more when there are more. Raises NotFound for an `after` that there is not."""
        rows = self._page(
            "files", page, "ifnull(expires_at, ?) >= ? AND purpose = ifnull(?, purpose)", (now, now, page.purpose)
        )
        return [_stored_file(row) for row in rows]

    def file_ids(self) -> list[str]:
        """Of all files."""
        return [row["id"] for row in self._connection.execute("SELECT id FROM files")]

    def total_bytes(self) -> int:
        """What all files have together."""
        row = self._row("SELECT ifnull(sum(bytes), 0) AS total FROM files", ())
        assert row is not None, "a sum has one row"
        return int(row["total"])

    def readers(self, file_id: str) -> list[str]:
        """The batches that have not ended and read this file."""
        query = f"SELECT id FROM batches WHERE input_file_id = ? AND {_NOT_ENDED}"
        return [row["id"] for row in self._connection.execute(query, (file_id,))]

    def remove_file(self, file_id: str) -> None:
        """Forget a file."""
        with self._transaction():
            self._connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def expired_file_ids(self, now: float) -> list[str]:
        """Files whose time is over and that no batch reads."""
        query = f"""SELECT id FROM files WHERE expires_at < ? AND id NOT IN
                    (SELECT input_file_id FROM batches WHERE {_NOT_ENDED})"""
        return [row["id"] for row in self._connection.execute(query, (now,))]

    # Batches

    def add_batch(self, batch: Batch, letter: NewLetter | None = None) -> None:
        """Make a batch known, and the letter that tells of its end."""
        with self._transaction():
            self._insert("batches", _batch_row(batch))
            if letter is not None:
                self.letters.add(batch.id, letter)

    def batch(self, batch_id: str, owner: str | None = None) -> Batch:
        """Raises NotFound when there is none, or the owner has none where one is named."""
        query = "SELECT * FROM batches WHERE id = ? AND owner = ifnull(?, owner)"
        row = self._row(query, (batch_id, owner))
        if row is None:
            raise NotFound(f"there is no batch {batch_id[:100]!r}", code="batch_not_found")
        return _batch(row)

    def batches(self, page: PageOf) -> list[Batch]:
        """The batches of a page, and one more when there are more. Raises NotFound for an `after` that there is not."""
        return [_batch(row) for row in self._page("batches", page, "true", ())]

    def unfinished(self) -> list[Batch]:
        """The batches that have not ended, the oldest first."""
        return [
            _batch(row) for row in self._connection.execute(f"SELECT * FROM batches WHERE {_NOT_ENDED} ORDER BY number")
        ]

    def change_batch(self, batch_id: str, was: Status, **changes: Any) -> Batch:
        """Change a batch if it still has the status `was`; the batch as it is then."""
        columns = ", ".join(f"{name} = ?" for name in changes)
        with self._transaction():
            changed = self._connection.execute(
                f"UPDATE batches SET {columns} WHERE id = ? AND status = ?",
                (*map(_value, changes.values()), batch_id, was.value),
            )
            if changed.rowcount:
                self._tell_of_end(batch_id, changes)
        return self.batch(batch_id)

    def end_batch(self, batch_id: str, new_files: Sequence[StoredFile], **changes: Any) -> None:
        """End a batch: its files become known, its rows go."""
        columns = ", ".join(f"{name} = ?" for name in changes)
        with self._transaction():
            for file in new_files:
                self._insert("files", _file_row(file))
            self._connection.execute(
                f"UPDATE batches SET {columns} WHERE id = ?", (*map(_value, changes.values()), batch_id)
            )
            for table in ("results", "jobs"):
                self._connection.execute(f"DELETE FROM {table} WHERE batch_id = ?", (batch_id,))
            self._tell_of_end(batch_id, changes)

    def _tell_of_end(self, batch_id: str, changes: Mapping[str, Any]) -> None:
        status = changes["status"]
        if status.has_ended:
            self.letters.batch_ended(batch_id, status, changes[f"{status.value}_at"])

    def counts(self, owner: str) -> list[StatusCount]:
        """The owner's batches by status."""
        query = f"SELECT status, {', '.join(_COUNTS.values())} FROM batches WHERE owner = ? GROUP BY status"
        return [
            StatusCount(Status(row["status"]), **{name: row[name] for name in _COUNTS})
            for row in self._connection.execute(query, (owner,))
        ]

    # Lines

    def record(self, results: Sequence[LineResult]) -> None:
        """Book the ends of lines, of any batches, in one transaction. A line that has ended stays as it was."""
        with self._transaction():
            for result in results:
                self._record(result)

    def _record(self, result: LineResult) -> None:
        inserted = self._connection.execute(
            """INSERT INTO results SELECT id, ?, ?, ? FROM batches
               WHERE id = ? AND status IN ('in_progress', 'cancelling') ON CONFLICT DO NOTHING""",
            (result.line_number, result.is_error, result.text, result.batch_id),
        )
        if inserted.rowcount:
            self._connection.execute(
                """UPDATE batches SET num_completed = num_completed + ?, num_failed = num_failed + ?,
                   num_input_tokens = num_input_tokens + ?, num_cached_tokens = num_cached_tokens + ?,
                   num_output_tokens = num_output_tokens + ? WHERE id = ?""",
                (
                    not result.is_error,
                    result.is_error,
                    result.num_input_tokens,
                    result.num_cached_tokens,
                    result.num_output_tokens,
                    result.batch_id,
                ),
            )

    def ended_lines(self, batch_id: str) -> set[int]:
        """The numbers of the lines that have ended."""
        return {
            row["line"] for row in self._connection.execute("SELECT line FROM results WHERE batch_id = ?", (batch_id,))
        }

    def results(self, batch_id: str) -> Iterator[tuple[int, bool, str]]:
        """(line number, is it an error, the line) of all that have ended. For any thread: it reads by itself."""
        with closing(self._connect()) as connection:
            query = "SELECT line, is_error, text FROM results WHERE batch_id = ? ORDER BY line"
            for row in connection.execute(query, (batch_id,)):
                yield row["line"], bool(row["is_error"]), row["text"]

    # Jobs

    def job_id(self, batch_id: str) -> str | None:
        """The last job that was begun, or was to be begun, for a batch that has not ended."""
        row = self._row("SELECT job_id FROM jobs WHERE batch_id = ?", (batch_id,))
        return None if row is None else str(row["job_id"])

    def keep_job_id(self, batch_id: str, job_id: str) -> None:
        """From here on this is the batch's job, whether it has been begun or not."""
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?)", (batch_id, job_id))

    # SQL

    def _connect(self) -> sqlite3.Connection:
        # Only one thread at a time uses it, but not always the one that made it. No hidden transactions.
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        return connection

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _row(self, query: str, values: Sequence[object]) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._connection.execute(query, values).fetchone()
        return row

    def _insert(self, table: str, row: dict[str, Any]) -> None:
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        self._connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(row.values()))

    def _page(self, table: str, page: PageOf, condition: str, values: Sequence[object]) -> list[sqlite3.Row]:
        beyond: tuple[object, ...] = ()
        if page.after is not None:
            cursor = self._row(f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (page.after, page.owner))
            if cursor is None:
                raise NotFound(f"there is nothing with the id {page.after[:100]!r} to go on after", param="after")
            condition += f" AND number {'>' if page.is_ascending else '<'} ?"
            beyond = (cursor["number"],)
        order = "ASC" if page.is_ascending else "DESC"
        query = f"SELECT * FROM {table} WHERE owner = ? AND {condition} ORDER BY number {order} LIMIT ?"
        return self._connection.execute(query, (page.owner, *values, *beyond, page.limit + 1)).fetchall()


def _value(value: Any) -> Any:
    """A field as SQLite keeps it."""
    if isinstance(value, Status):
        return value.value
    if isinstance(value, tuple):
        return json.dumps([asdict(error) for error in value])
    return json.dumps(value) if isinstance(value, dict) else value


def _file_row(file: StoredFile) -> dict[str, Any]:
    return {name: getattr(file, name) for name in _FILE_COLUMNS}


def _stored_file(row: sqlite3.Row) -> StoredFile:
    return StoredFile(**{name: row[name] for name in _FILE_COLUMNS})


def _batch_row(batch: Batch) -> dict[str, Any]:
    return {name: _value(getattr(batch, name)) for name in _BATCH_COLUMNS}


def _batch(row: sqlite3.Row) -> Batch:
    values = {name: row[name] for name in _BATCH_COLUMNS}
    values["status"] = Status(row["status"])
    values["errors"] = tuple(LineError(**error) for error in json.loads(row["errors"]))
    values["metadata"] = None if row["metadata"] is None else json.loads(row["metadata"])
    return Batch(**values)
