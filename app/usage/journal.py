"""What a process has counted and not reported yet, in files that outlive it: a killed process loses no request.

A folder has of each process a lock, which it holds while it lives, and a file for each report that does not count yet.
A line is written when a request ends. It outlives the process, not the machine.
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

JOURNALS = "usage"  # the folder, in that of files and batches
_LOCK_SUFFIX = ".lock"


class UsageJournal:
    """The files of this process. Only `write` is called on the event loop: it takes microseconds."""

    def __init__(self, folder: Path, process: str, number: int) -> None:
        """`number`: of the report that will have what is written from now on."""
        self._folder = folder
        self._process = process
        for each in (folder.parent, folder):  # the mode is not that of parents that are made on the way
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Under its name it is locked from the beginning: no process takes it for that of a dead process.
        lock = folder / (process + _LOCK_SUFFIX)
        hidden = folder / hidden_name(lock.name)
        held = take_lock(hidden)
        assert held is not None, "the name is this process's"
        self._lock = held
        os.rename(hidden, lock)
        self._file: int | None = self.file_of(number)
        self._has_failed = False

    @property
    def has_file(self) -> bool:
        """Whether there is a file to write to."""
        return self._file is not None

    def write(self, used_for: UsedFor, used: Used) -> None:
        """One request has ended. What the disk does not take is counted all the same, if the process lives on."""
        if self._file is None:
            return
        line = b"\n" + json.dumps([*used_for, *values_of(used)]).encode()
        try:
            os.write(self._file, line)
            self._has_failed = False
        except OSError as error:
            self.report_failure(error)

    def report_failure(self, error: OSError) -> None:
        """Log it, once until it works again."""
        if not self._has_failed:
            logger.error("usage cannot be written to %s: %s", self._folder, described(error))
        self._has_failed = True

    def file_of(self, number: int) -> int:
        """A new file for a report, opened."""
        return os.open(_path(self._folder, self._process, number), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def go_on_in(self, file: int | None) -> int | None:
        """Write to this file from now on, or to none; the one before, to be closed."""
        before, self._file = self._file, file
        return before

    def forget(self, number: int) -> None:
        """A report counts now. Its file is not written to any more."""
        _path(self._folder, self._process, number).unlink(missing_ok=True)

    def close(self) -> None:
        """As if the process had died."""
        if self._file is not None:
            os.close(self._file)
        os.close(self._lock)


class Remains:
    """What a dead process has written and may not have reported. Only one process has it at a time."""

    def __init__(self, folder: Path, process: str, lock: int) -> None:
        self.process = process
        self._folder = folder
        self._lock = lock

    def reports(self) -> list[UsageReport]:
        """Its reports that may not count yet, in their order."""
        numbers = sorted(
            int(path.suffix[1:]) for path in self._folder.glob(f"{self.process}.*") if path.suffix[1:].isdigit()
        )
        return [
            UsageReport(process=self.process, number=number, used=_read(_path(self._folder, self.process, number)))
            for number in numbers
        ]

    def forget(self) -> None:
        """All of it counts."""
        for path in self._folder.glob(f"{self.process}.*"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave what is there to others."""
        os.close(self._lock)


def processes(folder: Path) -> list[str]:
    """The names of all processes that have files here, dead or alive."""
    return sorted(path.name.removesuffix(_LOCK_SUFFIX) for path in folder.glob(f"*{_LOCK_SUFFIX}"))


def remains(folder: Path, process: str) -> Remains | None:
    """What a dead process has left; the caller must close it. None when it lives, or when another process has this."""
    lock = take_lock(folder / (process + _LOCK_SUFFIX))
    return None if lock is None else Remains(folder, process, lock)


def _path(folder: Path, process: str, number: int) -> Path:
    return folder / f"{process}.{number}"


def _read(path: Path) -> dict[UsedFor, Used]:
    """Its sums. A line that a full disk has cut off is passed over; each begins with a line end, so it ends there."""
    sums: dict[UsedFor, Used] = {}
    for line in path.read_bytes().splitlines():
        try:
            key, model, request_class, day, *used = json.loads(line)
            used_for, each = UsedFor(key, model, request_class, day), Used(*used)
        except (ValueError, TypeError):
            continue
        sums[used_for] = sums.get(used_for, Used()) + each
    return sums
