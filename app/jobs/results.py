"""A run's folder: what the run is, the records as they come, and at the end the results.

    run.json               what runs here: the input's fingerprint and what the answers depend on
    results.partial.jsonl  the journal: one record a line, appended; after a crash it is valid up to a torn last line
    begun.bits             which rows have been begun, one bit each, kept by the kernel when this process is killed
    under_way.tokens       what is known of rows that have begun and not ended, see `app/jobs/partial_outputs.py`
    recovery.json          what deaths have cost so far
    results.jsonl          the journal once it is whole (or results.parquet, made from it)
    summary.json           written last: whoever sees it sees a finished run

One process at a time has the folder, by a lock that ends with it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from app.disk import sync_folder
from app.errors import Failure, InvalidSetup
from app.jobs.item_set import RowSet
from app.jobs.partial_outputs import UnderWay
from app.jobs.progress import Counts, Summary
from app.jobs.record import COLUMNS, COUNTING_COLUMNS, Record

MANIFEST, JOURNAL, BEGUN, UNDER_WAY, RECOVERY, SUMMARY = (
    "run.json", "results.partial.jsonl", "begun.bits", "under_way.tokens", "recovery.json", "summary.json",
)  # fmt: skip
RESULTS = {"jsonl": "results.jsonl", "parquet": "results.parquet"}
_PARQUET_ROWS = 10_000
_SCHEMA = pyarrow.schema(
    [pyarrow.field(name, pyarrow.int64() if name in COUNTING_COLUMNS else pyarrow.string()) for name in COLUMNS]
)


@dataclass(slots=True)
class Recovery:
    """What deaths have cost, over all runs on this folder."""

    runs: int = 0
    engines_lost: int = 0
    continued_rows: int = 0  # rows that had begun when their engine or the driver died, and went on after their tokens
    recomputed_rows: int = 0  # such rows of which no token was known, so that they began again


class OutputFolder:
    """The folder of one run, held by this process. All rows that have a record are in `settled`."""

    def __init__(self, path: Path, *, num_rows: int, output_format: str, lock: int) -> None:
        """Not for callers: `open_folder` checks and locks first."""
        self._lock = lock
        self._path = path
        self.num_rows = num_rows
        self._format = output_format
        self.settled = RowSet(num_rows)
        self.counts = Counts()
        self.under_way = UnderWay(path / UNDER_WAY)
        self._journal = _open_journal(path, output_format)
        self._end = self._recover()
        self.begun = RowSet.in_file(path / BEGUN, num_rows)
        self.recovery = _read_recovery(path)
        self._saved_recovery = replace(self.recovery)
        self.recovery.runs += 1
        self.note_interrupted(self.begun.beside(self.settled))
        self._save_recovery()

    def close(self) -> None:
        """Let the folder go; the run in it can be resumed."""
        os.close(self._journal)
        os.close(self._lock)

    def append(self, records: Iterable[Record]) -> None:
        """Add records; when this returns the death of this process cannot take them back (`sync`: nor the machine's).

        A row that has a record is passed over. Raises Failure when they cannot be written, and then none is.
        """
        new = {record.row: record for record in records if record.row not in self.settled}
        content = b"".join(record.to_line() for record in new.values())
        try:
            _write_all(self._journal, content)
        except OSError as error:
            with suppress(OSError):  # a torn end does no harm: the next run cuts it off
                os.ftruncate(self._journal, self._end)
            raise self._failure(error) from error
        self._end += len(content)
        for record in new.values():
            self._settle(record)

    def progress(self, token_ids: Mapping[int, Sequence[int]]) -> None:
        """Rows that have not ended have got further tokens. Raises Failure when they cannot be written."""
        self.under_way.add(token_ids)
        try:
            self.under_way.save()
        except OSError as error:
            raise self._failure(error) from error

    def note_interrupted(self, rows: Iterable[int]) -> None:
        """Rows that had begun have lost whoever computed them."""
        for row in rows:
            if row in self.under_way:
                self.recovery.continued_rows += 1
            else:
                self.recovery.recomputed_rows += 1

    def sync(self) -> None:
        """Bring what was appended, and `recovery`, to the disk. Raises Failure."""
        try:
            os.fsync(self._journal)
        except OSError as error:
            raise self._failure(error) from error
        self._save_recovery()

    def _save_recovery(self) -> None:
        if self.recovery != self._saved_recovery:
            self._write_json(RECOVERY, asdict(self.recovery))
            self._saved_recovery = replace(self.recovery)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Every row is settled: turn the journal into the results and write the summary. Raises Failure."""
        assert len(self.settled) == self.num_rows, "a run is finished when every row has its record"
        self.sync()
        try:
            if self._format == "parquet":
                _to_parquet(self._path / JOURNAL, self._path / RESULTS[self._format])
            else:
                os.rename(self._path / JOURNAL, self._path / RESULTS[self._format])
            sync_folder(self._path)
            self._write_json(SUMMARY, summary)
            for name in (JOURNAL, BEGUN, UNDER_WAY, RECOVERY):
                (self._path / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._failure(error) from error

    def _settle(self, record: Record) -> None:
        self.settled.add(record.row)
        self.counts.add(record)
        self.under_way.drop(record.row)

    def _recover(self) -> int:
        """Take up the records of earlier runs; what is behind the first unreadable line is cut off."""
        end = 0
        with open(self._journal, "rb", closefd=False) as journal:
            for line in journal:
                record = _record(line, self.num_rows)
                if record is None or record.row in self.settled:
                    break
                self._settle(record)
                end += len(line)
        os.ftruncate(self._journal, end)
        return end

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        try:
            write_atomically(self._path / name, json.dumps(content, indent=2).encode() + b"\n")
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> Failure:
        return Failure(
            f"{self._path}: cannot be written to: {error.strerror}; {len(self.settled):,} of {self.num_rows:,} "
            f"rows are safe there: make room, or whatever it needs, and go on with --resume"
        )


def open_folder(path: Path, *, run: Mapping[str, Any], num_rows: int, output_format: str, resume: bool) -> OutputFolder:
    """Take the folder for the run that `run` describes, creating it if need be. Nothing is changed if this raises.

    Raises:
        InvalidSetup: it holds something else, another run, a finished run, or one that is running or not resumed.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        try:
            if (path / MANIFEST).exists():
                _check_may_go_on(path, run, resume=resume)
            else:
                _check_is_empty(path)
                write_atomically(path / MANIFEST, json.dumps(run, indent=2).encode() + b"\n")
            return OutputFolder(path, num_rows=num_rows, output_format=output_format, lock=lock)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise InvalidSetup(f"--output {path}: cannot be used: {error.strerror}") from error


def written_lines(path: Path, offset: int, piece_bytes: int) -> bytes:
    """Whole lines of a JSONL run's records from `offset` on, while it runs or after it: a piece of them, or one line.

    After a run's death the next cuts off what is torn, so whoever reads along begins again with every run.
    """
    # The journal is renamed at the end, and back where a run was killed just then.
    for name in (JOURNAL, RESULTS["jsonl"], JOURNAL):
        try:
            with (path / name).open("rb") as file:
                file.seek(offset)
                content = file.read(piece_bytes)
                if b"\n" not in content:
                    content += file.readline()
        except FileNotFoundError:
            continue
        return content[: content.rfind(b"\n") + 1]
    return b""


def finished_summary(path: Path, run: Mapping[str, Any]) -> Summary | None:
    """The summary of this very run if it is finished; None if it is not, or not begun."""
    if not (path / SUMMARY).exists() or _read_json(path / MANIFEST) != dict(run):
        return None
    return Summary(**_read_json(path / SUMMARY))


def _check_may_go_on(path: Path, run: Mapping[str, Any], *, resume: bool) -> None:
    there = _read_json(path / MANIFEST)
    differing = sorted(name for name in run.keys() | there.keys() if there.get(name) != run.get(name))
    if differing:
        named = "; ".join(f"{name}: {there.get(name)!r} there, {run.get(name)!r} now" for name in differing[:4])
        raise InvalidSetup(f"--output {path}: holds another run ({named[:600]}); use another folder")
    if (path / SUMMARY).exists():
        raise InvalidSetup(f"--output {path}: this run is finished, see {path / SUMMARY}; use another folder")
    if not resume:
        raise InvalidSetup(f"--output {path}: holds this run, unfinished: go on with --resume, or use another folder")


def _check_is_empty(path: Path) -> None:
    strangers = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    if set(strangers) - {_hidden_name(MANIFEST)}:  # what a death at the very beginning may have left
        raise InvalidSetup(f"--output {path}: holds {', '.join(strangers[:3])} and no run; use an empty folder")


def write_atomically(path: Path, content: bytes) -> None:
    """The file has the old content or the new one, whatever happens."""
    temporary = path.with_name(_hidden_name(path.name))
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    sync_folder(path.parent)


def _hidden_name(name: str) -> str:
    return f".{name}.tmp"


def _lock(folder: Path) -> int:
    """A lock on the folder itself, held by the descriptor that this gives: when a process ends, so does its lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise InvalidSetup(f"--output {folder}: another process is at work on it; wait for its end") from error
    return descriptor


def _open_journal(path: Path, output_format: str) -> int:
    results = path / RESULTS[output_format]
    if output_format == "jsonl" and results.exists():  # killed between the last two steps of `finish`
        os.rename(results, path / JOURNAL)
    return os.open(path / JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _record(line: bytes, num_rows: int) -> Record | None:
    """The record in a line of the journal; None if it is torn."""
    try:
        record = Record(**json.loads(line))
    except (ValueError, TypeError):
        return None
    return record if line.endswith(b"\n") and 0 <= record.row < num_rows else None


def _read_recovery(path: Path) -> Recovery:
    return Recovery(**_read_json(path / RECOVERY)) if (path / RECOVERY).exists() else Recovery()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidSetup(f"{path}: is not valid JSON: {error}; use another folder") from error
    return dict(content)


def _to_parquet(journal: Path, results: Path) -> None:
    temporary = results.with_name(_hidden_name(results.name))
    with journal.open("rb") as lines, parquet.ParquetWriter(temporary, _SCHEMA) as writer:
        batch: list[dict[str, Any]] = []
        for line in lines:
            batch.append(json.loads(line))
            if len(batch) == _PARQUET_ROWS:
                writer.write_table(pyarrow.Table.from_pylist(batch, schema=_SCHEMA))
                batch = []
        writer.write_table(pyarrow.Table.from_pylist(batch, schema=_SCHEMA))
    _sync_file(temporary)
    os.rename(temporary, results)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
