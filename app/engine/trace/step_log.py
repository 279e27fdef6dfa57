"""A step log, written by a separate thread. The engine never waits for the log and never fails because of it.

The engine appends entries to a bounded queue. The thread wakes up at the first entry, waits 0.2 s for more, and writes
each entry as one line. If the disk is too slow, entries are dropped, and their number is written instead. A crash only
loses the entries in the queue.
"""

from __future__ import annotations

import atexit
import fcntl
import io
import logging
import os
import threading
from collections import deque
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from app.config import EngineConfig
from app.engine.model_runner import ModelRunner
from app.engine.request import ModelInfo
from app.engine.trace.entries import DroppedEntries, Entry, Header, to_line
from app.engine.trace.recorder import StepRecorder
from app.engine.trace.redaction import Redactor
from app.errors import InvalidSetup, traceback_of
from app.versions import commit, versions

logger = logging.getLogger(__name__)


def recorder_of(
    config: EngineConfig, *, runner: ModelRunner, model_info: ModelInfo, num_blocks: int
) -> StepRecorder | None:
    """Return a recorder that writes a step log, or None if no folder is configured.

    Raises:
        InvalidSetup: the folder is not writable.
    """
    settings = config.step_log
    if settings.path is None:
        return None
    header = log_header(config, runner=runner, model_info=model_info, num_blocks=num_blocks)
    folder = Path(settings.path).expanduser()
    # 1 GB is enough for a day of moderate load. Each new file then replaces the oldest sixteenth of the log.
    files = LogFiles(folder, run=header.run, file_bytes=64_000_000, max_files=16)
    try:
        log = StepLog(files, header, redactor=None if settings.record_prompts else Redactor(config.cache.block_size))
    except OSError as error:
        raise InvalidSetup(f"step_log.path: {settings.path} is not writable: {error}; set another folder") from error
    logger.info("recording every step in %s", folder)
    return StepRecorder(log.put, log.close)


def log_header(config: EngineConfig, *, runner: ModelRunner, model_info: ModelInfo, num_blocks: int) -> Header:
    """Return the header of a step log: all data needed to build an equal engine, or to see how another one differs."""
    began = datetime.now(UTC)
    return Header(
        run=f"{began:%Y%m%dT%H%M%S}-{uuid4().hex[:8]}",
        began=began.isoformat(timespec="seconds"),
        launches_ahead=runner.launches,
        num_blocks=num_blocks,
        facts=asdict(model_info),
        config=config.model_dump(mode="json"),
        versions=versions(),
        commit=commit(),
        settings=config.scheduler.version,
    )


class StepLog:
    """Accepts entries from one thread and writes them to files in another."""

    def __init__(
        self, files: LogFiles, header: Header, *, redactor: Redactor | None = None, max_pending: int = 10_000
    ) -> None:
        """Open the first file and start the thread. Raises OSError if the file cannot be written.

        max_pending: maximum number of queued entries. Further entries are dropped.
        """
        self._files = files
        self._header = header
        self._redactor = redactor
        self._max_pending = max_pending
        self._pending: deque[Entry] = deque()
        self._num_unreported = 0  # entries dropped since the last accepted entry
        self.num_lost = 0
        self._wake = threading.Event()
        self._is_closing = threading.Event()
        self._has_failed = False
        self._num_bytes = 0  # size of the open file
        self._file = self._open()
        self._thread = threading.Thread(target=self._run, name="step log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, entry: Entry) -> bool:
        """Queue an entry to be written. Returns False if it is dropped. Never blocks or raises."""
        if self._has_failed or len(self._pending) >= self._max_pending:
            self._drop()
            return False
        if self._num_unreported:
            self._pending.append(DroppedEntries(self._num_unreported))
            self._num_unreported = 0
        self._pending.append(entry)
        if not self._wake.is_set():
            self._wake.set()
        return True

    def close(self) -> None:
        """Write the remaining entries and stop the thread. Safe to call twice."""
        atexit.unregister(self.close)
        self._is_closing.set()
        self._wake.set()
        close_s = 10.0  # maximum time to wait for the disk
        self._thread.join(close_s)
        if self.num_lost:
            logger.warning("the step log lacks %d entries, because the disk was too slow", self.num_lost)
            self.num_lost = 0

    def _drop(self) -> None:
        if not self.num_lost:
            logger.warning("the disk is too slow for the step log, which drops entries; serving continues")
        self.num_lost += 1
        self._num_unreported += 1

    # ------------------------------------------------------------------ the writer's thread

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._wake.wait()
                self._is_closing.wait(0.2)
                self._wake.clear()
                self._write_pending()
            self._write_pending()
        except Exception as error:
            self._has_failed = True
            logger.error("the step log can no longer be written; serving continues: %s", traceback_of(error))
        finally:
            with suppress(OSError):  # the original error was already logged
                self._file.close()

    def _write_pending(self) -> None:
        while self._pending:
            pending = self._pending.popleft()
            for entry in (pending,) if self._redactor is None else self._redactor.redacted(pending):
                self._write(to_line(entry))
            if self._num_bytes >= self._files.file_bytes:
                self._open_next_file()

    def _write(self, line: str) -> None:
        # Write each line separately, because the engine's thread can run during each system call.
        self._num_bytes += self._file.write(f"{line}\n".encode())
        self._file.flush()

    def _open_next_file(self) -> None:
        self._file.close()
        self._header = replace(self._header, part=self._header.part + 1)
        self._file = self._open()

    def _open(self) -> io.BufferedWriter:
        file = self._files.open_part(self._header.part)
        try:
            self._num_bytes = file.write(f"{self._header.to_line()}\n".encode())
            file.flush()
        except OSError:
            with suppress(OSError):  # closing flushes, which fails again
                file.close()
            raise
        return file


class LogFiles:
    """The files of one run, in a folder with a limited number of files.

        steps-20261120T200325-9f2c01d7-00001.jsonl    the first file of the run that began at 20:03:25
        steps-20261120T200325-9f2c01d7-00002.jsonl

    Several engines may share a folder, because files that are being written are never deleted.
    """

    def __init__(self, folder: Path, *, run: str, file_bytes: int, max_files: int) -> None:
        self.folder = folder
        self._run = run
        self.file_bytes = file_bytes  # size after which the log continues in another file
        self._max_files = max_files

    def open_part(self, part: int) -> io.BufferedWriter:
        """Create a file, readable only by its owner because it may hold prompts. Delete the oldest. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = open(self.folder / f"steps-{self._run}-{part:05d}.jsonl", "xb", opener=_open_private)  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until the file is closed or the process ends
        self._prune()
        return file

    def _prune(self) -> None:
        """Delete the oldest files, except those that are being written, until at most `max_files` are left."""
        files = sorted(self.folder.glob("steps-*.jsonl"))  # in order of the time when the run began
        num_too_many = len(files) - self._max_files
        for path in files:
            if num_too_many <= 0:
                return
            with suppress(OSError):  # another process has deleted the file or is writing it
                _delete_unless_locked(path)
                num_too_many -= 1


def _delete_unless_locked(path: Path) -> None:
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _open_private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)
