"""Stores a process's unreported usage in files, so that no usage is lost if the process is killed.

For each process, the folder contains a lock, which the process holds while it lives, and a file for each report that is
not in the ledger yet. Each finished request adds a line, which survives a crash of the process but not of the machine.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from app.disk import hidden_name, take_lock
from app.errors import described
from app.usage.records import UsageReport, Used, UsedFor, values_of

logger = logging.getLogger(__name__)

JOURNALS = "usage"  # name of the journals' folder inside the folder of files and batches
_LOCK_SUFFIX = ".lock"


class UsageJournal:
    """The journal files of this process. `write` takes microseconds, so it may be called on the event loop."""

    def __init__(self, folder: Path, process: str, number: int) -> None:
        """Open the file of report `number`, to which usage is written until `switch_to` is called. Raises OSError."""
        self._folder = folder
        self._process = process
        for each in (folder.parent, folder):  # mkdir does not apply the mode to missing parents
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Lock the file before giving it its final name. If others could lock it, they would treat this process as dead.
        lock = folder / (process + _LOCK_SUFFIX)
        hidden = folder / hidden_name(lock.name)
        held = take_lock(hidden)
        assert held is not None, "no other process uses this name"
        self._lock = held
        os.rename(hidden, lock)
        self._file: int | None = self.file_of(number)
        self._has_failed = False

    @property
    def has_file(self) -> bool:
        """Whether a file is open for writing."""
        return self._file is not None

    def write(self, used_for: UsedFor, used: Used) -> None:
        """Write a finished request's usage. If the write fails, the usage is lost only if the process is killed."""
        if self._file is None:
            return
        line = b"\n" + json.dumps([*used_for, *values_of(used)]).encode()
        try:
            os.write(self._file, line)
            self._has_failed = False
        except OSError as error:
            self.report_failure(error)

    def report_failure(self, error: OSError) -> None:
        """Log a failure. Further failures are not logged until a write succeeds again."""
        if not self._has_failed:
            logger.error("usage cannot be written to %s: %s", self._folder, described(error))
        self._has_failed = True

    def file_of(self, number: int) -> int:
        """Open a report's file for appending, and return its descriptor. Raises OSError."""
        return os.open(_path(self._folder, self._process, number), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def switch_to(self, file: int | None) -> int | None:
        """Write to this file from now on (None for no file). Returns the previous file, which the caller must close."""
        before, self._file = self._file, file
        return before

    def forget(self, number: int) -> None:
        """Delete the file of a report that the ledger includes. The file must not be open for writing."""
        _path(self._folder, self._process, number).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files and release the lock, so that other processes treat this process as dead."""
        if self._file is not None:
            os.close(self._file)
        os.close(self._lock)


class DeadJournal:
    """The journal of a dead process, which may contain unreported usage. Only one process at a time can open it."""

    def __init__(self, folder: Path, process: str, lock: int) -> None:
        self.process = process
        self._folder = folder
        self._lock = lock

    def reports(self) -> list[UsageReport]:
        """Return, in order, the reports that may not be in the ledger yet. Raises OSError if a file cannot be read."""
        numbers = sorted(
            int(path.suffix[1:]) for path in self._folder.glob(f"{self.process}.*") if path.suffix[1:].isdigit()
        )
        return [
            UsageReport(process=self.process, number=number, used=_read(_path(self._folder, self.process, number)))
            for number in numbers
        ]

    def forget(self) -> None:
        """Delete the journal. Call this only after the ledger has accepted all of its reports."""
        for path in self._folder.glob(f"{self.process}.*"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock. Other processes may then read the rest of the journal."""
        os.close(self._lock)


def processes(folder: Path) -> list[str]:
    """Return the names of all processes with a lock in the folder, dead or alive."""
    return sorted(path.name.removesuffix(_LOCK_SUFFIX) for path in folder.glob(f"*{_LOCK_SUFFIX}"))


def remains(folder: Path, process: str) -> DeadJournal | None:
    """Return a dead process's journal; None if the process lives or another one reads it. The caller must close it."""
    lock = take_lock(folder / (process + _LOCK_SUFFIX))
    return None if lock is None else DeadJournal(folder, process, lock)


def _path(folder: Path, process: str, number: int) -> Path:
    return folder / f"{process}.{number}"


def _read(path: Path) -> dict[UsedFor, Used]:
    """Return the summed usage in a file. Skips torn lines, as a full disk leaves them."""
    sums: dict[UsedFor, Used] = {}
    for line in path.read_bytes().splitlines():
        try:
            key, model, request_class, day, *used = json.loads(line)
            used_for, each = UsedFor(key, model, request_class, day), Used(*used)
        except (ValueError, TypeError):
            continue
        sums[used_for] = sums.get(used_for, Used()) + each
    return sums
