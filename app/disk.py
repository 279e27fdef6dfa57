"""What survives a crash of the machine. Blocks: call it in a thread."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk: files that were created, renamed or removed in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """The file has the old content or the new one, whatever happens."""
    temporary = path.with_name(hidden_name(path.name))
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    sync_folder(path.parent)


def hidden_name(name: str) -> str:
    """What a file is called until it is whole."""
    return f".{name}.tmp"


def take_lock(path: Path) -> int | None:
    """A lock on a folder, or on a file that is made where there is none; None when another process has it.

    It is held by the descriptor that this gives, so it ends with its process, however that ends. On NFS only a file can
    be locked.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
