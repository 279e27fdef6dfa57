"""Notes that remain when a crash or a hang ends a process: a segmentation fault raises no exception.

Python's `faulthandler` writes the tracebacks of all threads into a file, even while native code holds the GIL. Each
process holds a lock on its file, so the next process can tell which files belong to processes that have ended.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.disk import hidden_name, take_lock

logger = logging.getLogger(__name__)

HANGS_S = 600.0  # longer than any work at the load, including compilers
_PREFIX = "crash-"
_note: tuple[Path, int] | None = None  # this process's file and descriptor; `faulthandler` has one file
_is_timed = False


def open_note(folder: Path, work: str) -> None:
    """Leave a note in this folder if this process crashes from now on. The last of several calls counts.

    work: a line that says what the process does, for the process that reads the note.
    """
    global _note
    content = f"{work}\n".encode()
    if _note is not None:  # keep the file: the timer of `ending_hangs` may hold it
        os.ftruncate(_note[1], 0)
        os.pwrite(_note[1], content, 0)
        os.lseek(_note[1], len(content), os.SEEK_SET)
        return
    path = folder / f"{_PREFIX}{os.getpid()}-{time.time_ns()}"
    hidden, descriptor = path.with_name(hidden_name(path.name)), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = take_lock(hidden)
        assert descriptor is not None, "no other process knows the name"
        os.write(descriptor, content)
        hidden.rename(path)
    except OSError as error:
        logger.warning("a crash will leave no note: %s cannot be written: %s", path, error)
        if descriptor is not None:
            os.close(descriptor)
        return
    # A library may have replaced faulthandler's signal handlers, as Ray does. An enabled faulthandler would only switch
    # to the new file.
    faulthandler.disable()
    faulthandler.enable(descriptor)
    _note = path, descriptor


def close_note() -> None:
    """Remove the note. Later crashes write their tracebacks to standard error."""
    if _note is not None:
        _note[0].unlink(missing_ok=True)
        _forget_note()


def _forget_note() -> None:
    global _note
    if _note is None:
        return
    faulthandler.disable()
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    os.close(_note[1])
    _note = None


atexit.register(close_note)  # a crash while the interpreter exits means nothing
os.register_at_fork(after_in_child=_forget_note)  # the note belongs to the parent


@contextmanager
def ending_hangs() -> Iterator[None]:
    """End a process that has a note if the block takes longer than `HANGS_S`: nothing can interrupt a compiler.

    A nested block shares the time limit of the outer block.
    """
    global _is_timed
    if _note is None or _is_timed:
        yield
        return
    faulthandler.dump_traceback_later(HANGS_S, exit=True, file=_note[1])
    _is_timed = True
    try:
        yield
    finally:
        _is_timed = False
        faulthandler.cancel_dump_traceback_later()


def crashes(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Yield the work, the note's first line and the end time of each process that crashed or hung since the last call.

    The whole note is logged. The files of processes that ended normally are removed.
    """
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        try:
            descriptor = take_lock(path)
            if descriptor is None:
                continue  # the process is alive
            try:
                ended_at = path.stat().st_mtime
                work, _, note = path.read_text(encoding="utf-8", errors="replace").partition("\n")
                path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
        except OSError:
            continue
        if note.strip():
            logger.warning("an earlier process crashed or hung during this work: %s\n%s", work, note)
            yield work, note.strip().splitlines()[0], ended_at
