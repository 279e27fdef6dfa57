"""A folder of step logs: numbered files of bounded size, and a bounded number of them.

    steps-20261120T200325-9f2c01d7-00001.jsonl    the first file of the run that began then
    steps-20261120T200325-9f2c01d7-00002.jsonl

Engines may share a folder: a file that is being written is never deleted.
"""

from __future__ import annotations

import fcntl
import io
import os
from contextlib import suppress
from pathlib import Path


class LogFiles:
    """Opens the files of one run, one after the other."""

    def __init__(self, folder: Path, *, run: str, file_bytes: int, max_files: int) -> None:
        self.folder = folder
        self._run = run
        self.file_bytes = file_bytes
        self._max_files = max_files

    def open_part(self, part: int) -> io.BufferedWriter:
        """A new file that only its owner may read: it may hold prompts. Deletes the oldest others. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = open(self.folder / f"steps-{self._run}-{part:05d}.jsonl", "xb", opener=_open_private)  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or its process ends
        self._prune()
        return file

    def _prune(self) -> None:
        """Delete the oldest files, except those being written, until the limit holds."""
        files = sorted(self.folder.glob("steps-*.jsonl"))  # by the time at which their runs began
        num_too_many = len(files) - self._max_files
        for path in files:
            if num_too_many <= 0:
                return
            with suppress(OSError):  # another process has deleted it, or it is being written
                _delete_unless_locked(path)
                num_too_many -= 1


def _delete_unless_locked(path: Path) -> None:
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _open_private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)
