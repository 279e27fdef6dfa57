"""The notes that a process leaves where a crash or a hang ends it: no exception tells of a segmentation fault.

Python's `faulthandler` writes the tracebacks of all threads into a file, also while native code holds the interpreter.
The process keeps a lock on its file, so the next process knows which files are of processes that have ended.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.disk import take_lock

logger = logging.getLogger(__name__)

HANGS_S = 600.0  # of work at the load that takes minutes at most, compilers included
_PREFIX = "crash-"
_note: tuple[Path, int] | None = None  # of this process: the file and its descriptor; `faulthandler` has one file


def open_note(folder: Path, work: str) -> None:
    """Leave a note in this folder if this process crashes from now on. The note takes the place of an earlier one.

    work: what the process does, in one line, for the process that reads the note.
    """
    global _note
    close_note()
    path = folder / f"{_PREFIX}{os.getpid()}-{time.time_ns()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = take_lock(path)
        if descriptor is None:
            return
        os.write(descriptor, f"{work}\n".encode())
    except OSError as error:
        logger.warning("a crash will leave no note: %s cannot be written: %s", path, error)
        return
    faulthandler.enable(descriptor)
    _note = path, descriptor


def close_note() -> None:
    """Leave no note any more. Tracebacks of a crash go to standard error."""
    global _note
    if _note is None:
        return
    path, descriptor = _note
    _forget_note()
    path.unlink(missing_ok=True)
    os.close(descriptor)


def _forget_note() -> None:
    global _note
    if _note is None:
        return
    _note = None
    faulthandler.disable()
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


os.register_at_fork(after_in_child=_forget_note)  # the note is the parent's


@contextmanager
def ending_hangs() -> Iterator[None]:
    """End a process that has a note if the block takes longer than `HANGS_S`: nothing can interrupt a compiler."""
    if _note is None:
        yield
        return
    faulthandler.dump_traceback_later(HANGS_S, exit=True, file=_note[1])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def crashes(folder: Path) -> Iterator[tuple[str, str]]:
    """Of each process that crashed or hung since the last call: its work, and the first line of its note.

    The log gets the whole note. Files of processes that ended otherwise are removed.
    """
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        try:
            descriptor = take_lock(path)
            if descriptor is None:
                continue  # its process lives
            try:
                work, _, note = path.read_text(encoding="utf-8", errors="replace").partition("\n")
                path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
        except OSError:
            continue
        if note.strip():
            logger.warning("an earlier process ended while it did this: %s\n%s", work, note)
            yield work, note.strip().splitlines()[0]
