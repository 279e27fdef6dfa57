"""Writes that survive a crash of the machine, file locks, and a thread for both, because they block."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# A full disk may get free space, and network storage may recover. Other errors, such as EACCES, require an operator.
_PASSING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT))
_PASSING_SQLITE = frozenset((sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY))
STORAGE_FAILURES = (OSError, sqlite3.Error)
STORAGE_PAUSE_S = 5.0  # pause before retrying after storage has failed


def may_pass(error: OSError | sqlite3.Error) -> bool:
    """Return whether storage that failed with this error may recover without an operator."""
    if isinstance(error, OSError):
        return error.errno in _PASSING
    return primary_code(error) in _PASSING_SQLITE


def primary_code(error: sqlite3.Error) -> int:
    """Return SQLite's primary error code, without the extended part, or 0 for an error in the Python module."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def cache_folder() -> Path:
    """Return the folder for files that can be recreated: `$XDG_CACHE_HOME/carousel`, or else `~/.cache/carousel`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carousel"


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that the creation, renaming and removal of its files survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content. After any crash, the file contains either the old or the new content."""
    with replaced(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replaced(path: Path, *, survives_machine: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file to write, which replaces the file at `path` at the end of the block.

    The temporary name is always the same, so that the next write overwrites what a dead process left. Processes must
    therefore not write the same file concurrently. With `survives_machine`, the file is synced to disk; otherwise, a
    crash of the machine may leave a torn file.
    """
    temporary = path.with_name(hidden_name(path.name))
    yield temporary
    if survives_machine:
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
    os.rename(temporary, path)
    if survives_machine:
        sync_folder(path.parent)


def hidden_name(name: str) -> str:
    """Return a file's name while it is incomplete."""
    return f".{name}.tmp"


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Wait for a lock, and hold it during the `with` block. Yields the descriptor from `take_lock`."""
    descriptor = take_lock(path, waits=True)
    assert descriptor is not None, "`waits` never returns None"
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def locked_if_possible(
    path: Path, *, without: str, waiting: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Iterator[None]:
    """Hold a lock as `locked` does. If the file system does not support locks, the block runs without one.

    `without` is the start of the warning that is logged then. `waiting` is entered while another process has the lock.
    """
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = take_lock(path)
        if lock is None:
            with waiting():
                lock = take_lock(path, waits=True)
    except OSError as error:
        logger.warning("%s, because %s cannot be locked: %s", without, path, error.strerror)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def take_lock(path: Path, *, waits: bool = False) -> int | None:
    """Lock a folder or a file. Returns the descriptor that holds the lock, or None if another process holds it.

    Creates the file if it does not exist. With `waits`, waits for the other process instead of returning None. The lock
    is released when the descriptor is closed, even if the process dies. NFS can lock files but not folders.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


class OneThread:
    """Runs functions in a thread, one after another in the order of the calls, so that they can share state."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function and return its result. If the caller is cancelled, the function still runs to its end."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Block until all calls have ended."""
        self._executor.shutdown()
