"""SQLite database of files, batches, responses, webhooks and usage. Each change is one transaction, synced to disk.

The catalog supports one writer, so use it in one thread. `app/jobs/results.py` stores the results of batches.

Several machines may share the folder's storage, so the database cannot use a WAL, which requires shared memory. Opening
the database increments a generation number, so a process that has lost the lock without noticing can no longer write.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import msgspec

from app.batches import RESPONSE_RUNS, AnswerEnd, JobState, PageOf, previous_not_found
from app.disk import primary_code
from app.errors import InvalidRequest, InvalidSetup, NotFound
from app.jobs import usage_ledger
from app.jobs.job import ItemError, Job, StoredFile, StoredResponse
from app.jobs.space import MIN_CHARGED_BYTES
from app.usage.journal import JOURNALS
from app.webhooks.outbox import SCHEMA, WebhookOutbox
from app.webhooks.receiver import WebhookReceiver

_FILE_COLUMNS = tuple(field.name for field in fields(StoredFile))
_RESPONSE_COLUMNS = tuple(field.name for field in fields(StoredResponse))
_JOB_COLUMNS = tuple(field.name for field in fields(Job))
_ENDED = tuple(status.value for status in JobState if status.has_ended)
_RUNS = f"status IN {RESPONSE_RUNS}"  # selects responses that have not ended
_NOT_ENDED = f"status NOT IN ({', '.join(map(repr, _ENDED))})"

_VERSION = 6  # the version of the tables below; increase it whenever they change
# Databases of these versions are upgraded in place. Stored responses of version 5 have an old format and are dropped.
_EXTENDED = (4, 5)


# `number` is the order of creation. Columns have no type, so that SQLite stores values without converting them.
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files (number INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(_FILE_COLUMNS)}, UNIQUE (id));
CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(_JOB_COLUMNS)}, UNIQUE (id));
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
CREATE INDEX IF NOT EXISTS batches_by_owner ON batches (owner);
CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner);
CREATE INDEX IF NOT EXISTS files_by_expiry ON files (expires_at);
DROP TABLE IF EXISTS responses;
CREATE TABLE IF NOT EXISTS answers ({", ".join(_RESPONSE_COLUMNS)}, UNIQUE (id));
CREATE INDEX IF NOT EXISTS answers_by_status ON answers (status);
CREATE INDEX IF NOT EXISTS answers_by_expiry ON answers (expires_at);
CREATE INDEX IF NOT EXISTS answers_by_previous ON answers (previous);
CREATE TABLE IF NOT EXISTS service (one INTEGER PRIMARY KEY CHECK (one = 1), generation NOT NULL);
INSERT OR IGNORE INTO service VALUES (1, 0);
{SCHEMA}
{usage_ledger.SCHEMA}
PRAGMA user_version = {_VERSION};
"""


# Columns that are filled in when a batch ends and that can be summed over batches.
_COUNTS = ("num_items", "num_completed", "num_failed", "num_input_tokens", "num_cached_tokens", "num_output_tokens")


class Superseded(OSError):
    """Raised if another process has opened the folder since this one did, so this process must no longer change it."""


class Catalog:
    """The database of one folder. Every change raises Superseded once another process has opened it."""

    def __init__(self, folder: Path) -> None:
        """Open the database, or create one in an empty folder.

        Raises InvalidSetup if another version created the tables, if the database is damaged, or if it is missing from
        a folder with content. A new database would name none of the files, so a sweep would delete them as leftovers.
        """
        self._path = folder / "batches.sqlite3"
        self._connection = self._connect()
        try:
            self._check()
        except BaseException:
            self._connection.close()
            raise
        self._connection.execute("PRAGMA journal_mode = TRUNCATE")
        self._connection.execute("PRAGMA synchronous = FULL")  # a commit is on disk when it returns
        self._connection.execute("PRAGMA secure_delete = FAST")  # a deleted secret does not stay in the file
        self._connection.executescript(_SCHEMA)
        self._generation = self._take_generation()
        self.outbox = WebhookOutbox(self._connection, self._transaction)
        self.ledger = usage_ledger.UsageLedger(self._connection, self._transaction)
        # This mapping may be read from any thread, so it is replaced and never mutated.
        self.bytes_by_owner: Mapping[str, int] = self._bytes_by_owner()

    def close(self) -> None:
        self._connection.close()

    def check_generation(self) -> None:
        """Raise Superseded if another process has opened the folder since this one did."""
        [generation] = self._connection.execute("SELECT generation FROM service").fetchone()
        if generation != self._generation:
            raise Superseded(f"{self._path} was opened by another process after this one (number {self._generation})")

    # Files

    def add_file(self, file: StoredFile) -> None:
        """Add a file whose content is in the file store."""
        with self._transaction():
            self._insert("files", asdict(file))
        self._charge(file.owner, max(file.bytes, MIN_CHARGED_BYTES))

    def file(self, owner: str, file_id: str, now: float) -> StoredFile:
        """Return a file. Raises NotFound if the owner has no such file or the file has expired."""
        query = "SELECT * FROM files WHERE id = ? AND owner = ? AND ifnull(expires_at, ?) >= ?"
        row = self._row(query, (file_id, owner, now, now))
        if row is None:
            raise NotFound(f"there is no file {file_id[:100]!r}", code="file_not_found")
        return _stored_file(row)

    def files(self, page: PageOf, now: float) -> list[StoredFile]:
        """Return a page of files, plus one if there is a next page. Raises NotFound if `page.after` is unknown."""
        rows = self._page(
            "files", page, "ifnull(expires_at, ?) >= ? AND purpose = ifnull(?, purpose)", (now, now, page.purpose)
        )
        return [_stored_file(row) for row in rows]

    def file_ids(self) -> list[str]:
        """Return the ids of all files. Raises Superseded."""
        ids = [row["id"] for row in self._connection.execute("SELECT id FROM files")]
        self.check_generation()
        return ids

    def remove_unread_file(self, file_id: str) -> None:
        """Call `remove_file`. Raises InvalidRequest if an unfinished batch reads the file."""
        query = f"SELECT id FROM batches WHERE input_file_id = ? AND {_NOT_ENDED}"
        readers = [row["id"] for row in self._connection.execute(query, (file_id,))]
        if readers:
            raise InvalidRequest(f"the file is used by {', '.join(readers)}; wait for the batch to end, or cancel it")
        self.remove_file(file_id)

    def remove_file(self, file_id: str) -> None:
        """Delete a file's row. The content stays in the file store until the caller deletes it."""
        with self._transaction():
            removed = self._row("SELECT owner, bytes FROM files WHERE id = ?", (file_id,))
            self._connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        if removed is not None:
            self._charge(removed["owner"], -max(removed["bytes"], MIN_CHARGED_BYTES))

    def expired_file_ids(self, now: float) -> list[str]:
        """Return the ids of expired files that no unfinished batch reads."""
        query = f"""SELECT id FROM files WHERE expires_at < ? AND id NOT IN
                    (SELECT input_file_id FROM batches WHERE {_NOT_ENDED})"""
        return [row["id"] for row in self._connection.execute(query, (now,))]

    # Batches

    def add_job(self, job: Job, *, has_message: bool = False, receiver: WebhookReceiver | None = None) -> None:
        """Add a batch. With `has_message`, its end is reported to `receiver`, or to the default receiver if None."""
        with self._transaction():
            self._insert("batches", {name: _value(getattr(job, name)) for name in _JOB_COLUMNS})
            if has_message:
                self.outbox.add(job.id, receiver)

    def job(self, job_id: str, owner: str | None = None) -> Job:
        """Return a batch of `owner`, or of any owner if None. Raises NotFound."""
        query = "SELECT * FROM batches WHERE id = ? AND owner = ifnull(?, owner)"
        row = self._row(query, (job_id, owner))
        if row is None:
            raise NotFound(f"there is no batch {job_id[:100]!r}", code="batch_not_found")
        return _job(row)

    def jobs(self, page: PageOf) -> list[Job]:
        """Return a page of batches, plus one if there is a next page. Raises NotFound if `page.after` is unknown."""
        return [_job(row) for row in self._page("batches", page, "true", ())]

    def unfinished(self) -> list[Job]:
        """Return the batches that have not ended, oldest first. Raises Superseded."""
        rows = self._connection.execute(f"SELECT * FROM batches WHERE {_NOT_ENDED} ORDER BY number").fetchall()
        self.check_generation()
        return [_job(row) for row in rows]

    def given_up_ids(self) -> list[str]:
        """Return the ids of batches that began and failed without files. Their results exist only in their stores."""
        query = """SELECT id FROM batches WHERE status = ? AND in_progress_at IS NOT NULL
                   AND output_file_id IS NULL AND error_file_id IS NULL"""
        return [row["id"] for row in self._connection.execute(query, (JobState.FAILED.value,))]

    def change_job(self, job_id: str, was: JobState, **changes: Any) -> Job:
        """Update a batch if its status is still `was`. Returns the current batch in either case."""
        with self._transaction():
            self._update(job_id, was, changes)
        return self.job(job_id)

    def end_job(self, job_id: str, new_files: Sequence[StoredFile], **changes: Any) -> None:
        """End a batch, add its files and schedule its webhook message, all in one transaction."""
        with self._transaction():
            for file in new_files:
                self._insert("files", asdict(file))
            self._update(job_id, None, changes)
        for file in new_files:
            self._charge(file.owner, max(file.bytes, MIN_CHARGED_BYTES))

    def _update(self, job_id: str, was: JobState | None, changes: Mapping[str, Any]) -> None:
        """Update a batch if its status is still `was` (None for any). If the batch ends, schedule its message."""
        columns, status = ", ".join(f"{name} = ?" for name in changes), changes["status"]
        changed = self._connection.execute(
            f"UPDATE batches SET {columns} WHERE id = ? AND status = ifnull(?, status)",
            (*map(_value, changes.values()), job_id, _value(was)),
        )
        if changed.rowcount and status.has_ended:
            self.outbox.batch_ended(job_id, status.value, changes[f"{status.value}_at"])

    def forget_ended(self, before: float) -> int:
        """Delete up to 1,000 batches that ended before the time `before`. Returns the number of deleted batches.

        A batch is deleted only after its output files are gone and its messages are delivered or given up.
        """
        most_forgotten = 1000  # keeps the transaction short, because other work is waiting for the thread
        query = f"""SELECT id FROM batches WHERE NOT ({_NOT_ENDED})
                    AND coalesce(completed_at, failed_at, expired_at, cancelled_at) < ?
                    AND NOT EXISTS (SELECT 1 FROM files WHERE files.id IN (output_file_id, error_file_id))
                    AND NOT EXISTS (SELECT 1 FROM messages WHERE batch_id = batches.id AND due_at IS NOT NULL)
                    LIMIT {most_forgotten}"""
        ids = [(row["id"],) for row in self._connection.execute(query, (before,))]
        if ids:
            with self._transaction():
                self._connection.executemany("DELETE FROM messages WHERE batch_id = ?", ids)
                self._connection.executemany("DELETE FROM batches WHERE id = ?", ids)
        return len(ids)

    def ended_counts(self, owner: str) -> list[tuple[Job, int]]:
        """Return one entry per final status: a `Job` with the sums over the owner's ended batches, and their number."""
        sums = ", ".join(f"sum({name}) AS {name}" for name in _COUNTS)
        query = f"""SELECT status, count(*) AS number, {sums} FROM batches
                    WHERE owner = ? AND NOT ({_NOT_ENDED}) GROUP BY status"""
        return [(_sums(row), int(row["number"])) for row in self._connection.execute(query, (owner,))]

    def together(self, changes: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run several changes in one transaction, so that the disk is synced only once. Returns their results."""
        try:
            with self._transaction():
                return [change() for change in changes]
        except BaseException:
            self.bytes_by_owner = self._bytes_by_owner()
            raise

    # Responses

    def add_response(self, response: StoredResponse, now: float) -> None:
        """Add a response. Raises InvalidRequest if it continues a response that its owner does not have."""
        if response.previous is not None:
            try:
                self.stored_response(response.owner, response.previous, now)
            except NotFound as error:
                raise previous_not_found(response.previous) from error
        with self._transaction():
            self._insert("answers", asdict(response))
        self._charge(response.owner, max(response.num_bytes, MIN_CHARGED_BYTES))

    def stored_response(self, owner: str, response_id: str, now: float) -> StoredResponse:
        """Return a response. Raises NotFound if the owner has no such response, or if it was deleted or has expired."""
        query = "SELECT * FROM answers WHERE id = ? AND owner = ? AND NOT is_deleted AND ifnull(expires_at, ?) >= ?"
        row = self._row(query, (response_id, owner, now, now))
        if row is None:
            raise NotFound(f"there is no response {response_id[:100]!r}", code="response_not_found")
        return StoredResponse(**row)

    def continued_response(self, owner: str, response_id: str) -> StoredResponse:
        """Return the response that another one continues. It may be marked as deleted, or have expired.

        Raises InvalidRequest if the owner has no such response.
        """
        row = self._row("SELECT * FROM answers WHERE id = ? AND owner = ?", (response_id, owner))
        if row is None:
            raise previous_not_found(response_id)
        return StoredResponse(**row)

    def response_ids(self) -> list[str]:
        """Return the ids of all responses. Raises Superseded."""
        ids = [row["id"] for row in self._connection.execute("SELECT id FROM answers")]
        self.check_generation()
        return ids

    def unended_responses(self) -> list[StoredResponse]:
        """Return the responses that have not ended, oldest first. Raises Superseded."""
        rows = self._connection.execute(f"SELECT * FROM answers WHERE {_RUNS} ORDER BY created_at").fetchall()
        self.check_generation()
        return [StoredResponse(**row) for row in rows]

    def count_response_attempt(self, response_id: str, *, by: int = 1) -> None:
        """Count an attempt. `by=-1` reverts this if the process stops cleanly, because only crashes should count."""
        with self._transaction():
            query = "UPDATE answers SET num_attempts = num_attempts + ? WHERE id = ?"
            self._connection.execute(query, (by, response_id))

    def end_response(self, response_id: str, end: AnswerEnd, num_bytes: int) -> AnswerEnd:
        """End a response whose file has `num_bytes`. Returns `end`, or the existing end if it had already ended."""
        with self._transaction():
            row = self._row("SELECT owner, num_bytes, end FROM answers WHERE id = ?", (response_id,))
            if row is None or row["end"]:
                return end if row is None else msgspec.json.decode(row["end"], type=AnswerEnd)
            query = "UPDATE answers SET status = ?, end = ?, num_bytes = ? WHERE id = ?"
            self._connection.execute(query, (end.status, msgspec.json.encode(end).decode(), num_bytes, response_id))
        self._charge(row["owner"], max(num_bytes, MIN_CHARGED_BYTES) - max(row["num_bytes"], MIN_CHARGED_BYTES))
        return end

    def remove_responses(self, response_ids: Sequence[str]) -> list[str]:
        """Delete responses in one transaction. Returns the ids of the responses whose files may be deleted.

        A response that another one continues is only marked as deleted, because its text is still needed as history.
        """
        with self._transaction():
            removed = [row for response_id in response_ids for row in self._remove_unused(response_id)]
        for row in removed:
            self._charge(row["owner"], -max(row["num_bytes"], MIN_CHARGED_BYTES))
        return [row["id"] for row in removed]

    def _remove_unused(self, response_id: str) -> list[sqlite3.Row]:
        """Mark a response as deleted, then delete it and its predecessors up to the first that is still used."""
        removed: list[sqlite3.Row] = []
        self._connection.execute("UPDATE answers SET is_deleted = 1 WHERE id = ?", (response_id,))
        unused: str | None = response_id
        while unused is not None and (row := self._unused(unused)) is not None:
            self._connection.execute("DELETE FROM answers WHERE id = ?", (unused,))
            removed.append(row)
            unused = row["previous"]
        return removed

    def _unused(self, response_id: str) -> sqlite3.Row | None:
        """Return a response's row if it is marked as deleted and no response continues it, otherwise None."""
        return self._row(
            """SELECT id, owner, num_bytes, previous FROM answers WHERE id = ? AND is_deleted
               AND NOT EXISTS (SELECT 1 FROM answers AS next WHERE next.previous = answers.id)""",
            (response_id,),
        )

    def expired_response_ids(self, now: float) -> list[str]:
        """Return the ids of up to 1,000 ended responses that have expired and are not marked as deleted."""
        most_at_once = 1000
        query = f"""SELECT id FROM answers WHERE expires_at < ? AND NOT is_deleted AND NOT {_RUNS}
                    LIMIT {most_at_once}"""
        return [row["id"] for row in self._connection.execute(query, (now,))]

    # The disk space of files and responses

    def _charge(self, owner: str, num_bytes: int) -> None:
        now = self.bytes_by_owner.get(owner, 0) + num_bytes
        others = {each: taken for each, taken in self.bytes_by_owner.items() if each != owner}
        self.bytes_by_owner = others | ({owner: now} if now else {})

    def _bytes_by_owner(self) -> dict[str, int]:
        query = """SELECT owner, sum(max(bytes, ?)) AS taken FROM
                   (SELECT owner, bytes FROM files UNION ALL SELECT owner, num_bytes FROM answers) GROUP BY owner"""
        return {row["owner"]: row["taken"] for row in self._connection.execute(query, (MIN_CHARGED_BYTES,))}

    # SQL

    def _connect(self) -> sqlite3.Connection:
        # Only one thread at a time uses the connection, but not always the one that created it. `_transaction` begins
        # all transactions, so `sqlite3` must not begin any.
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        return connection

    def _check(self) -> None:
        try:
            [version] = self._connection.execute("PRAGMA user_version").fetchone()
            [problem] = self._connection.execute("PRAGMA integrity_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            if primary_code(error) not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
            raise self._lost(f"it is damaged: {error}") from error
        if problem != "ok":
            raise self._lost(f"it is damaged: {problem}")
        if version not in (0, *_EXTENDED, _VERSION):  # 0: a new database
            raise InvalidSetup(
                f"{self._path} has tables of version {version}, but this Carousel reads {_VERSION}; set batches.path "
                f"to another folder, or run the version that created the tables until all batches have ended"
            )
        # Ignore the folder of usage journals, which processes that send requests may have created earlier.
        if version == 0 and any(path.parent.name != JOURNALS for path in self._path.parent.glob("*/*")):
            raise self._lost("it is missing or empty, but the folder is not")

    def _lost(self, problem: str) -> InvalidSetup:
        return InvalidSetup(
            f"{self._path} cannot be used: {problem}; nothing was changed. Restore the whole folder from a backup, or "
            f"set batches.path to another folder (files and results of batches are in {self._path.parent})"
        )

    def _take_generation(self) -> int:
        query = "UPDATE service SET generation = generation + 1 RETURNING generation"
        [(generation,)] = self._connection.execute(query).fetchall()
        return int(generation)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run the body in a new transaction, or join the open one. Rolls back on errors. Raises Superseded."""
        if self._connection.in_transaction:
            yield
            return
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self.check_generation()
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
                raise NotFound(f"there is no entry with the id {page.after[:100]!r} in this list", param="after")
            condition += f" AND number {'>' if page.is_ascending else '<'} ?"
            beyond = (cursor["number"],)
        order = "ASC" if page.is_ascending else "DESC"
        query = f"SELECT * FROM {table} WHERE owner = ? AND {condition} ORDER BY number {order} LIMIT ?"
        return self._connection.execute(query, (page.owner, *values, *beyond, page.limit + 1)).fetchall()


def _value(value: Any) -> Any:
    if isinstance(value, JobState):
        return value.value
    if isinstance(value, tuple):
        return json.dumps([asdict(error) for error in value])
    return json.dumps(value) if isinstance(value, dict) else value


def _stored_file(row: sqlite3.Row) -> StoredFile:
    return StoredFile(**{name: row[name] for name in _FILE_COLUMNS})


def _job(row: sqlite3.Row) -> Job:
    values = {name: row[name] for name in _JOB_COLUMNS}
    values["status"] = JobState(row["status"])
    values["errors"] = tuple(ItemError(**error) for error in json.loads(row["errors"]))
    values["metadata"] = None if row["metadata"] is None else json.loads(row["metadata"])
    return Job(**values)


def _sums(row: sqlite3.Row) -> Job:
    counts = {name: row[name] for name in _COUNTS}
    status = JobState(row["status"])
    return Job(id="", owner="", endpoint="", input_file_id="", status=status, created_at=0, expires_at=0, **counts)
