"""Leaves a note for the next process if a crash or a hang ends this one, because no exception reports that.

Python's `faulthandler` writes the tracebacks of all threads to a file, even while native code holds the GIL. Each
process locks its own file, so that the next process can tell which files belong to processes that have ended.
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

HANGS_S = 600.0  # longer than any stage of loading takes, including compilation
_PREFIX = "crash-"
_note: tuple[Path, int] | None = None  # this process's file and its descriptor; `faulthandler` supports only one
_is_timed = False


def open_note(folder: Path, work: str) -> None:
    """Leave a note in this folder if this process crashes from now on. A later call replaces `work`, not the folder.

    work: one line that identifies the work during which the crash happens; `crashes` returns it.
    """
    global _note
    content = f"{work}\n".encode()
    if _note is not None:  # rewrite the file in place, because the timer of `ending_hangs` may write to its descriptor
        os.ftruncate(_note[1], 0)
        os.pwrite(_note[1], content, 0)
        os.lseek(_note[1], len(content), os.SEEK_SET)
        return
    path = folder / f"{_PREFIX}{os.getpid()}-{time.time_ns()}"
    hidden, descriptor = path.with_name(hidden_name(path.name)), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = take_lock(hidden)
        assert descriptor is not None, "the name includes the process id, so no other process locks it"
        os.write(descriptor, content)
        hidden.rename(path)
    except OSError as error:
        logger.warning("a crash will not be recorded, because %s cannot be written: %s", path, error)
        if descriptor is not None:
            os.close(descriptor)
        return
    # Libraries such as Ray may have replaced faulthandler's signal handlers. Without `disable`, `enable` would only
    # switch files and not install the handlers again.
    faulthandler.disable()
    faulthandler.enable(descriptor)
    _note = path, descriptor


def close_note() -> None:
    """Remove the note. Later crashes write tracebacks to standard error."""
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


atexit.register(close_note)  # a crash while the interpreter exits is not an error
os.register_at_fork(after_in_child=_forget_note)  # the note belongs to the parent


@contextmanager
def ending_hangs() -> Iterator[None]:
    """End the process, leaving its note, if the block takes longer than `HANGS_S`. Does nothing without a note.

    Ending the process is the only way out of a compiler that hangs. Nested blocks share the outermost block's limit.
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
    """Yield (work, first line of the note, end time) for each process that crashed or hung since the last call.

    Logs each note in full and removes its file. Also removes the files of processes that ended without a crash.
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
