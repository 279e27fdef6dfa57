"""A folder of KV blocks, one file each, which the processes of a machine read and write without coordination.

A file receives its name only when it is complete, so a process may be killed at any moment. Files are not synced to the
disk. After a crash of the machine, the checksum reveals torn files. Each file also stores its block's tokens, so two
prefixes with the same name never receive each other's blocks; they only lose time.

    FOLDER/<namespace>/<tenant>/<name>    8 bytes of the namespace, 8 bytes of a hash of the tenant, the prefix's name
    FOLDER/.lock                          the size of all files; locked by the process that counts or deletes files
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
HEADER = struct.Struct("<8sII")  # magic, bytes of the tokens, checksum of tokens and content
ROW_BYTES = 4096  # row size in the table that the checksum of the content sums up
NAME = re.compile("[0-9a-f]{40}")
KEPT_SHARE = 0.9  # share of `max_bytes` that stays in use after files were deleted


class BlockFolder:
    """The blocks of one namespace in a folder that processes share. One thread writes and refreshes; any may read."""

    def __init__(self, path: Path, *, namespace: bytes, max_bytes: int) -> None:
        """Create the folder. `max_bytes` limits the files of all processes; each process may exceed it by one file.

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
            raise PermissionError(errno.EPERM, "others may write into it", str(self._own))

    def has(self, name: bytes) -> bool:
        """Return whether the folder held the block when last listed, or this process wrote it since. Thread-safe."""
        return name in self._folders

    def refresh(self) -> None:
        """List the blocks that other processes have written and deleted."""
        before, self._changed = self._changed, {}
        listed: dict[str, set[bytes]] = {folder: set() for folder in before}  # the names in folders that have changed
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
        """Write a block's file under a hidden name, and rename it once it is complete. Raises OSError."""
        folder = self._folder_of(tenant)
        hidden = folder / f".{os.getpid()}"
        header = header_of(token_ids, content)
        num_bytes = len(header) + len(content)
        try:
            descriptor = self._begun(hidden, num_bytes)
        except FileNotFoundError:
            for each in (self._path, self._own, folder):  # one by one, because mkdir gives parents the default mode
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
        """Fill the buffer with a block. Returns False if the block is missing or invalid, and deletes an invalid block.

        If the block's folder is not known, the folder of `tenant` is searched.
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
                logger.warning("the block %s cannot be read: %s", path, error)
            return False
        if is_whole and header == header_of(token_ids, content):
            return True
        logger.warning("deleting the block %s: it is torn, damaged or of other tokens; its tokens are computed", path)
        self._folders.pop(name, None)
        _delete(path)
        return False

    def note_use(self, name: bytes, minute: int, place: int) -> None:
        """Record that the last block of a prefix of `place` blocks was used in this minute.

        Among the blocks of one minute, later ones are deleted first, because they are useless without the earlier ones.
        """
        folder, used_at = self._folders.get(name), 1000 * (minute * 60_000_000 - place)  # ns
        if folder is not None:
            with suppress(OSError):
                os.utime(os.path.join(folder, name.hex()), ns=(used_at, used_at))

    def make_room(self, num_bytes: int) -> None:
        """Count a file before it is written. If the total is too large, delete old blocks of the largest tenant.

        The least recently used blocks are deleted first. All processes add to one total, so that none has to list the
        files for each write. The total may be too high, so all files are counted before any is deleted. Raises OSError.
        """
        has_deleted = False
        with locked(self._path / ".lock") as lock:
            found = os.pread(lock, TOTAL.size, 0)
            total = TOTAL.unpack(found)[0] if len(found) == TOTAL.size else None  # None for a new or older folder
            if total is None or total + num_bytes > self._max_bytes:
                total, has_deleted = self._delete_oldest(num_bytes)
            os.pwrite(lock, TOTAL.pack(total + num_bytes), 0)
        if has_deleted:
            self._changed.clear()
            self.refresh()

    def _delete_oldest(self, num_bytes: int) -> tuple[int, bool]:
        """Make room for `num_bytes`. Returns the size of the remaining files, and whether any file was deleted."""
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
        """Return last use, bytes and path of all models' files by folder, the least recently used file last."""
        files: dict[str, list[tuple[float, int, str]]] = {}
        for namespace in _entries(self._path):
            for folder in _entries(namespace.path) if namespace.is_dir() else ():
                found = filter(None, map(_use_of, _entries(folder.path)))
                files[folder.path] = sorted(found, reverse=True)
        return {folder: found for folder, found in files.items() if found}


def header_of(token_ids: Sequence[int], content: memoryview) -> bytes:
    """Return the header of a block outside the KV memory: magic, sizes, checksum, and the block's tokens."""
    tokens = array("q", token_ids).tobytes()
    return HEADER.pack(MAGIC, len(tokens), crc32(tokens, _checksum(content))) + tokens


def _checksum(content: memoryview) -> int:
    """Return a checksum of the sums of rows and columns, in a tenth of the time of a checksum of all bytes.

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
    """Return the entries of a folder, or an empty list if another process has deleted the folder."""
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _use_of(entry: os.DirEntry[str]) -> tuple[float, int, str] | None:
    """Return last use, bytes and path of a file, or None if the file is gone.

    An unfinished file counts as used when it was last written, so that of a dead process is soon among the oldest.
    """
    try:
        stat = entry.stat()
    except OSError:
        return None
    return stat.st_mtime, stat.st_size, entry.path
