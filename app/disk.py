"""What survives a crash of the machine, a thread for it, and the cache. Functions here block: call them in a thread."""

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

# A full disk gets room again, and a network storage comes back; a folder without permission stays as it is.
_PASSING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT))
_PASSING_SQLITE = frozenset((sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY))
STORAGE_FAILURES = (OSError, sqlite3.Error)
STORAGE_PAUSE_S = 5.0  # before a storage that failed is tried again


def may_pass(error: OSError | sqlite3.Error) -> bool:
    """Whether a storage that failed like this may work again without a change of its settings."""
    if isinstance(error, OSError):
        return error.errno in _PASSING
    return primary_code(error) in _PASSING_SQLITE


def primary_code(error: sqlite3.Error) -> int:
    """What has gone wrong, as SQLite numbers it, without where that happened; 0: it was not in SQLite."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def cache_folder() -> Path:
    """Where files of ours lie that can be made again: `$XDG_CACHE_HOME/carousel`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carousel"


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk: files that were created, renamed or removed in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """The file has the old content or the new one, whatever happens."""
    with replaced(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replaced(path: Path, *, survives_machine: bool = True) -> Iterator[Path]:
    """Give the name of a file to write, which takes the place of that at `path` at the end of the block.

    The name is always the same, so that what the death of a process leaves is overwritten: one process at a time writes
    a file. survives_machine: it is on the disk then, else a death of the machine may leave it torn.
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
    """What a file is called until it is whole."""
    return f".{name}.tmp"


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a lock, after the processes that hold it before. Gives the descriptor of `take_lock`."""
    descriptor = take_lock(path, waits=True)
    assert descriptor is not None, "it has waited"
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def locked_if_possible(
    path: Path, *, without: str, waiting: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Iterator[None]:
    """Hold a lock as `locked`. A file system without locks gives none; then the block runs all the same.

    without: what the log says then. waiting: around the wait for another process, if there is one.
    """
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = take_lock(path)
        if lock is None:
            with waiting():
                lock = take_lock(path, waits=True)
    except OSError as error:
        logger.warning("%s: %s: %s", without, path, error.strerror)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def take_lock(path: Path, *, waits: bool = False) -> int | None:
    """A lock on a folder, or on a file that is made where there is none; None when another process has it.

    waits: until that one lets go of it, instead.

    It is held by the descriptor that this gives, so it ends with its process, however that ends. On NFS only a file can
    be locked.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


class OneThread:
    """Runs functions one after the other, in the order of the calls: what they share needs no lock."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns or raises. It runs to its end though the caller is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Return when all calls have ended."""
        self._executor.shutdown()
