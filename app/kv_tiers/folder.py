"""A folder of KV blocks, one file per block, that all processes on a machine read and write without coordination.

A file receives its final name only when it is complete, so a process may be killed at any time. Files are not synced to
the disk; after a crash of the machine, the checksum reveals torn files. Each file also stores its block's tokens, so if
the names of two prefixes collide, neither is filled with the other's blocks. Such a collision only costs time.

    FOLDER/<namespace>/<tenant>/<name>    8 bytes of the namespace, 8 bytes of a hash of the tenant, the prefix's name
    FOLDER/.lock                          the total size of all files; locked while files are counted or deleted
"""

from __future__ import annotations

import errno
import logging
import os
import re
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

import numpy as np

from app.disk import locked

logger = logging.getLogger(__name__)

MAGIC = b"carouKV2"
TOTAL = struct.Struct("<q")  # the content of the lock file
HEADER = struct.Struct("<8sII")  # magic, size of the tokens in bytes, checksum of tokens and content
ROW_BYTES = 4096  # the checksum treats the content as a table with rows of this size
NAME = re.compile("[0-9a-f]{40}")
KEPT_SHARE = 0.9  # old files are deleted until the rest fill this share of `max_bytes`


class BlockFolder:
    """One namespace's blocks in a shared folder. One thread writes and refreshes; any thread may read."""

    def __init__(self, path: Path, *, namespace: bytes, max_bytes: int) -> None:
        """Create the folder. `max_bytes` limits the files of all processes. Each process may exceed it by one file.

        Raises OSError if the folder is not writable, or if other users may write to it, because its blocks are trusted.
        """
        self._path = path
        self._own = path / namespace[:8].hex()
        self._max_bytes = max_bytes
        self._folders: dict[bytes, str] = {}  # maps each block's name to the folder that stores the block
        self._changed: dict[str, int] = {}  # maps each folder to its modification time just before it was listed
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._own.mkdir(mode=0o700, exist_ok=True)
        if not os.access(self._own, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self._own))
        found = self._own.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "other users may write to it", str(self._own))

    def has(self, name: bytes) -> bool:
        """Whether the last listing contained the block, or this process has written it since. Thread-safe."""
        return name in self._folders

    def refresh(self) -> None:
        """List the folder to discover the blocks that other processes have written or deleted."""
        before, self._changed = self._changed, {}
        listed: dict[str, set[bytes]] = {folder: set() for folder in before}  # names in the folders that have changed
        with suppress(OSError):
            for folder in os.scandir(self._own):
                self._changed[folder.path] = folder.stat().st_mtime_ns
                if self._changed[folder.path] == before.get(folder.path):
                    del listed[folder.path]
                else:
                    names = (each.name for each in os.scandir(folder.path))
                    listed[folder.path] = {bytes.fromhex(name) for name in names if NAME.fullmatch(name)}
        gone = [name for name, at in list(self._folders.items()) if at in listed and name not in listed[at]]
        for name in gone:
            self._folders.pop(name, None)
        for path, found in listed.items():
            self._folders |= dict.fromkeys(found, path)

    def write(self, name: bytes, tenant: str, token_ids: Sequence[int], content: memoryview) -> None:
        """Write a block to a hidden file, which is renamed once it is complete. Raises OSError."""
        folder = self._folder_of(tenant)
        hidden = folder / f".{os.getpid()}"
        header = header_of(token_ids, content)
        num_bytes = len(header) + len(content)
        try:
            descriptor = self._begun(hidden, num_bytes)
        except FileNotFoundError:
            for each in (self._path, self._own, folder):  # one by one: mkdir creates parents with the default mode
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = self._begun(hidden, num_bytes)
        try:
            if os.writev(descriptor, (header, content)) != num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(hidden))
            hidden.rename(folder / name.hex())
        except OSError:
            _delete(hidden)
            raise
        finally:
            os.close(descriptor)
        self._folders[name] = str(folder)

    def _begun(self, hidden: Path, num_bytes: int) -> int:
        """Make room for `num_bytes` and return the descriptor of a new file."""
        self.make_room(num_bytes)
        return os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def _folder_of(self, tenant: str) -> Path:
        return self._own / blake2b(tenant.encode(), digest_size=8).hexdigest()

    def read(self, name: bytes, tenant: str, token_ids: Sequence[int], content: memoryview) -> bool:
        """Fill the buffer with a block. Returns False if the block is missing or invalid. Deletes an invalid block.

        A block that was not in the last listing is looked up in the folder of `tenant`.
        """
        path = os.path.join(self._folders.get(name) or self._folder_of(tenant), name.hex())
        header = bytearray(HEADER.size + array("q").itemsize * len(token_ids))
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                is_whole = os.readv(descriptor, (header, content)) == len(header) + len(content)
                is_whole = is_whole and not os.read(descriptor, 1)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._folders.pop(name, None)
            if not isinstance(error, FileNotFoundError):
                logger.warning("the KV block %s cannot be read: %s", path, error)
            return False
        if is_whole and header == header_of(token_ids, content):
            return True
        logger.warning("deleting the KV block %s, which is torn, corrupt or for other tokens; recomputing it", path)
        self._folders.pop(name, None)
        _delete(path)
        return False

    def note_use(self, name: bytes, minute: int, place: int) -> None:
        """Record that block number `place` of a prefix was used at `minute`, in the file's modification time.

        Among blocks used in the same minute, later ones are deleted first: they are useless without the earlier ones.
        """
        folder, used_at = self._folders.get(name), 1000 * (minute * 60_000_000 - place)  # ns
        if folder is not None:
            with suppress(OSError):
                os.utime(os.path.join(folder, name.hex()), ns=(used_at, used_at))

    def make_room(self, num_bytes: int) -> None:
        """Add a file to the total size before it is written. If the total is too large, delete old blocks.

        The largest tenant's least recently used blocks are deleted. All processes share one total, to avoid listing all
        files for each write. It may be too high, so all files are counted before any is deleted. Raises OSError.
        """
        has_deleted = False
        with locked(self._path / ".lock") as lock:
            found = os.pread(lock, TOTAL.size, 0)
            total = TOTAL.unpack(found)[0] if len(found) == TOTAL.size else None  # None if the folder has no total yet
            if total is None or total + num_bytes > self._max_bytes:
                total, has_deleted = self._delete_oldest(num_bytes)
            os.pwrite(lock, TOTAL.pack(total + num_bytes), 0)
        if has_deleted:
            self._changed.clear()
            self.refresh()

    def _delete_oldest(self, num_bytes: int) -> tuple[int, bool]:
        """Make room for `num_bytes`. Returns the total size of the remaining files, and whether any were deleted."""
        files = self._files()
        sizes = {folder: sum(size for _, size, _ in found) for folder, found in files.items()}
        total = sum(sizes.values())
        if total + num_bytes <= self._max_bytes:
            return total, False
        while sizes and total + num_bytes > KEPT_SHARE * self._max_bytes:
            largest = max(sizes, key=sizes.__getitem__)
            _, size, path = files[largest].pop()
            _delete(path)
            total -= size
            sizes[largest] -= size
            if not files[largest]:
                del sizes[largest]
                with suppress(OSError):
                    os.rmdir(largest)
        return total, True

    def _files(self) -> dict[str, list[tuple[float, int, str]]]:
        """Return (last use, size, path) of every namespace's files by folder, the least recently used file last."""
        files: dict[str, list[tuple[float, int, str]]] = {}
        for namespace in _entries(self._path):
            for folder in _entries(namespace.path) if namespace.is_dir() else ():
                found = filter(None, map(_use_of, _entries(folder.path)))
                files[folder.path] = sorted(found, reverse=True)
        return {folder: found for folder, found in files.items() if found}


def header_of(token_ids: Sequence[int], content: memoryview) -> bytes:
    """Return the header that precedes a block in a file or on a connection, including the block's tokens."""
    tokens = array("q", token_ids).tobytes()
    return HEADER.pack(MAGIC, len(tokens), crc32(tokens, _checksum(content))) + tokens


def _checksum(content: memoryview) -> int:
    """Return a checksum of the sums of rows and columns, which is ten times as fast as a checksum of all bytes.

    It always detects one lost or moved row or column, and one or two flipped bits.
    """
    whole = len(content) // ROW_BYTES * ROW_BYTES
    table = np.frombuffer(content[:whole], dtype=np.uint64).reshape(-1, ROW_BYTES // 8)
    checksum = crc32(content[whole:])
    for sums in (table.sum(axis=1), table.sum(axis=0)):
        checksum = crc32(sums, checksum)
    return checksum


def _delete(path: Path | str) -> None:
    with suppress(OSError):
        os.unlink(path)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return a folder's entries, or an empty list if the folder cannot be listed, for instance because it is gone."""
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _use_of(entry: os.DirEntry[str]) -> tuple[float, int, str] | None:
    """Return (last use, size, path) of a file, or None if the file is gone.

    The last use of an unfinished file is its last write, so a dead process's unfinished file is soon deleted.
    """
    try:
        stat = entry.stat()
    except OSError:
        return None
    return stat.st_mtime, stat.st_size, entry.path
